"""Takes a snapshot of the KV pool between two scheduler steps, for the page audit.

A session holds a row of the engine's request table while it has KV; so does a running request
without a session. The snapshot only says which rows to read. The engine may change a row while the
device still copies the row. So each row has a version: while the version stays the same, so do the
row's entries in use.
"""

from typing import Any, NamedTuple

from .requests import live_requests
from .wire import AUDIT_NAMES_MAX, is_nameable

_U64_MASK = (1 << 64) - 1


class AuditError(Exception):
    """An audit isn't possible. The error's text says why, for an operator."""


class Row(NamedTuple):
    """A row of the engine's request table, with its holder: a session, or a request without one."""

    row_index: int
    # The leading entries that are in use.
    tokens: int
    # The sessions that the snapshot names come first, in the order of their names. Holders without
    # a name get the numbers after them.
    holder_number: int
    version: int
    # Changes whenever the holder's KV is computed anew.
    key: int
    # Leading tokens whose KV is written and doesn't change any more. 0 while a turn of the session
    # may still write.
    sealed_tokens: int
    # Leading tokens that are in the radix tree, where the holder locks them.
    protected_tokens: int


class Snapshot(NamedTuple):
    """The engine never writes to the tensors."""

    # Of sessions that hold rows. A session's number is its index in this list.
    session_names: list[str]
    rows: list[Row]
    # Page ids, as an int64 tensor on the pool's device.
    free_pages: Any
    # Token slots, as an int64 tensor on the pool's device.
    tree_slots: Any


def audit_refusal(scheduler: Any) -> str:
    """Empty if the pages can be audited: then each page belongs to a row, is free, or is in the
    radix tree."""
    allocator = scheduler.token_to_kv_pool_allocator
    name = type(allocator).__name__
    reasons = {
        f"the pool's allocator is {name}": name not in (
            "TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"
        ),
        "the pool's pages are spread over ranks": (
            (allocator.page_size, allocator.size)
            != (scheduler.page_size, scheduler.max_total_num_tokens)
        ),
        "prefill and decode share the device's processors": scheduler.enable_pdmux,
        "the model writes by diffusion": scheduler.dllm_config is not None,
        "the model keeps state beside its KV": scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm,
        "KV of one prompt lies on the device and outside of it": (
            scheduler.enable_hisparse
            # SGLang 0.5.20 has another tree cache with LMCache, for which the shim is inert.
            or getattr(scheduler, "enable_lmcache", False)
        ),
        "decoding is speculative": scheduler.draft_worker is not None,
        "prefill and decode are apart": scheduler.disaggregation_mode.value != "null",
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def take_snapshot(scheduler: Any) -> Snapshot:
    """Must be called between two steps, on the scheduler's thread. Raises an `AuditError` while a
    beam search runs, because its rows belong to no request."""
    if any(request.beam_group is not None for request in live_requests(scheduler)):
        raise AuditError("a beam search is running; ask again later")
    session_names, rows = list_rows(scheduler)
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    try:
        # This walks the whole tree. A tree whose core is in Python can be too deep for that.
        tree_slots = tree.all_values_flatten()
        return Snapshot(session_names, rows, allocator.get_all_free_pages(), tree_slots)
    except RecursionError:
        raise AuditError("the radix tree is too deep to walk; ask again later") from None


def list_rows(scheduler: Any) -> tuple[list[str], list[Row]]:
    """Returns the names of the sessions that hold rows, and all rows held now. At most
    AUDIT_NAMES_MAX sessions are named, and none with an id that is too long to send."""
    generations = scheduler.req_to_token_pool.req_generation.tolist()
    slots = scheduler.tree_cache.session.slots
    sessions = scheduler.session_controller.sessions
    requests = live_requests(scheduler)
    # The sessions with a request in a batch or queue. The session's own flag `_inflight` is not
    # enough. A finished turn clears the flag, but stays in the last batch while the device may
    # still write for the turn. And refusing a second turn clears the flag while the first runs.
    busy_sessions = {id(request.session) for request in requests if request.session is not None}
    session_kv = [(name, slot.kv) for name, slot in slots.items() if slot.kv.holds_kv]
    session_kv.sort(key=lambda name_and_kv: not is_nameable(name_and_kv[0]))
    session_names = [name for name, _ in session_kv[:AUDIT_NAMES_MAX] if is_nameable(name)]
    rows: list[Row] = []
    listed_row_indexes = set()
    for name, kv in session_kv:
        listed_row_indexes.add(kv.req_pool_idx)
        session = sessions.get(name)
        may_write = session is None or session._inflight or id(session) in busy_sessions
        # The KV of the last token isn't written yet. The next turn writes it.
        sealed_tokens = 0 if may_write else max(0, kv.kv_committed_len - 1)
        rows.append(_make_row(len(rows), kv, generations, name, sealed_tokens))
    for request in requests:
        kv = request.kv
        if kv.holds_kv and kv.req_pool_idx not in listed_row_indexes:
            listed_row_indexes.add(kv.req_pool_idx)
            rows.append(_make_row(len(rows), kv, generations, str(request.rid), 0))
    return session_names, rows


def _make_row(
    holder_number: int, kv: Any, generations: list[int], holder_name: str, sealed_tokens: int
) -> Row:
    """`generations` has a number for each row, which the engine changes when it assigns the row."""
    row_index, generation = kv.req_pool_idx, generations[kv.req_pool_idx]
    # The version must change when the engine replaces the row's leading pages by the tree's pages,
    # which changes the protected length, and when a turn begins or ends, which changes
    # `sealed_tokens`: pages after the sealed tokens may then be freed.
    version = hash((generation, kv.cache_protected_len, sealed_tokens)) & _U64_MASK
    key = hash((row_index, generation, holder_name)) & _U64_MASK
    return Row(
        row_index,
        kv.kv_allocated_len,
        holder_number,
        version,
        key,
        sealed_tokens,
        kv.cache_protected_len,
    )
