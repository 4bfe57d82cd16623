"""A snapshot of the pool for the page audit, taken between two steps.

It has the rows of the request table with their holders, the free pages, and the tokens in the radix
tree. Rows continue to change while a device still reads them. Each row has a version: while it
stays the same, the entries that the snapshot names stay the same.
"""

from typing import Any, NamedTuple

from .library import AuditError
from .requests import live_requests
from .wire import AUDIT_NAMES_MAX, is_nameable

_U64 = (1 << 64) - 1


class Row(NamedTuple):
    """A row of the request table whose first `tokens` entries are in use."""

    row: int
    tokens: int
    # The number of the session that holds the row. Holders without a name get the highest numbers.
    session: int
    version: int
    # Changes whenever the session's KV is recomputed.
    key: int
    # The number of leading tokens whose KV is written and final; 0 while a turn runs.
    sealed_tokens: int
    # The number of leading tokens that are in the tree, under the holder's lock.
    protected_tokens: int


class Snapshot(NamedTuple):
    """`free` holds page ids, `tree` token slots, both as int64 on the pool's device. They live as
    long as the snapshot; the engine never writes to them."""

    names: list[str]
    rows: list[Row]
    free: Any
    tree: Any


def audit_refusal(scheduler: Any) -> str:
    """Returns why the pool's pages can't be audited; empty if they can. For every other
    configuration it was checked that each page belongs to a row, is free, or is in the tree."""
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
        "KV lies outside the device too": (
            scheduler.enable_hierarchical_cache
            or scheduler.enable_hisparse
            or scheduler.enable_lmcache
        ),
        "decoding is speculative": scheduler.draft_worker is not None,
        "prefill and decode are apart": scheduler.disaggregation_mode.value != "null",
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def take_snapshot(scheduler: Any) -> Snapshot:
    """Takes a snapshot. Must be called between two steps, on the scheduler's thread.

    Fails while a beam search runs, because its rows belong to no request."""
    if any(request.beam_group is not None for request in live_requests(scheduler)):
        raise AuditError("a beam search is running; ask again later")
    names, rows = list_rows(scheduler)
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    try:
        # Walks the whole tree; in Python, if the tree's core is in Python.
        return Snapshot(names, rows, allocator.get_all_free_pages(), tree.all_values_flatten())
    except RecursionError:
        raise AuditError("the radix tree is too deep to walk; ask again later") from None


def list_rows(scheduler: Any) -> tuple[list[str], list[Row]]:
    """Returns the session names and the rows held now. Sessions whose names are too long or too
    many have rows of their own, but no name."""
    generations = scheduler.req_to_token_pool.req_generation.tolist()
    slots = scheduler.tree_cache.session.slots
    sessions = scheduler.session_controller.sessions
    live = live_requests(scheduler)
    # A finished turn stays in the last batch while the device may still write for it. The session's
    # own flag is not enough: refusing a second turn clears it while the first one runs.
    busy = {id(request.session) for request in live if request.session is not None}
    held = [(name, slot.kv) for name, slot in slots.items() if slot.kv.holds_kv]
    held.sort(key=lambda one: not is_nameable(one[0]))
    names = [name for name, _ in held[:AUDIT_NAMES_MAX] if is_nameable(name)]
    rows, seen = [], set()
    for name, kv in held:
        seen.add(kv.req_pool_idx)
        session = sessions.get(name)
        runs = session is None or session._inflight or id(session) in busy
        # The last token's KV is written by the next turn.
        sealed = 0 if runs else max(0, kv.kv_committed_len - 1)
        rows.append(_row(len(rows), kv, generations, name, sealed))
    for request in live:
        kv = request.kv
        if kv.holds_kv and kv.req_pool_idx not in seen:
            seen.add(kv.req_pool_idx)
            rows.append(_row(len(rows), kv, generations, str(request.rid), 0))
    return names, rows


def _row(number: int, kv: Any, generations: list[int], holder: str, sealed: int) -> Row:
    row, generation = kv.req_pool_idx, generations[kv.req_pool_idx]
    # The version changes when the row's prefix is redirected to the tree's own pages, and when a
    # turn begins or ends: that changes `sealed`, and may free the pages behind it.
    version = hash((generation, kv.cache_protected_len, sealed)) & _U64
    key = hash((row, generation, holder)) & _U64
    protected = kv.cache_protected_len
    return Row(row, kv.kv_allocated_len, number, version, key, sealed, protected)
