"""A cut through the pool, for the page audit: who holds which rows of the request table, what is
free, what is in the radix tree, at one moment between two steps.

Rows go on changing while a device still reads them. Each has a version: as long as it stays, the
entries that the cut names stay.
"""

from typing import Any, NamedTuple

from .library import Failed
from .requests import live_requests
from .wire import AUDIT_NAMES_MAX, nameable

_U64 = (1 << 64) - 1


class Row(NamedTuple):
    """A row of the request table whose first `tokens` entries are in use."""

    row: int
    tokens: int
    # Who holds it: a named session's number, or one above them all.
    session: int
    version: int
    # Changes whenever the session's KV is made anew.
    key: int
    # As many of the tokens are not written again, and are written; known only while no turn runs.
    sealed_tokens: int
    # As many of them lie in the tree, under the holder's lock.
    protected_tokens: int


class Cut(NamedTuple):
    """`free` holds page ids, `tree` token slots, both int64 on the pool's device. They live as long
    as the cut; the engine never writes into them."""

    names: list[str]
    rows: list[Row]
    free: Any
    tree: Any


def unauditable(scheduler: Any) -> str:
    """Why the pool's pages can't be told apart; empty when they can. What isn't named here was read
    or run: everything that holds pages has a row, is free, or is in the tree."""
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


def take(scheduler: Any) -> Cut:
    """The cut of this moment. Between two steps only, on the scheduler's thread.

    Fails while a beam search runs: its rows belong to no request."""
    if any(request.beam_group is not None for request in live_requests(scheduler)):
        raise Failed("a beam search runs; ask again")
    names, rows = rows_of(scheduler)
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    try:
        # Walks the tree, in Python where its core is.
        return Cut(names, rows, allocator.get_all_free_pages(), tree.all_values_flatten())
    except RecursionError:
        raise Failed("the radix tree is too deep to be walked; ask again") from None


def rows_of(scheduler: Any) -> tuple[list[str], list[Row]]:
    """The rows that are held now. Sessions that can't be named, or are too many to be, are told
    apart and not named."""
    generations = scheduler.req_to_token_pool.req_generation.tolist()
    slots = scheduler.tree_cache.session.slots
    sessions = scheduler.session_controller.sessions
    live = live_requests(scheduler)
    # A turn that has ended stays in the last batch while the device may still write for it; and the
    # session's own flag is cleared by a turn that was refused beside one that runs.
    busy = {id(request.session) for request in live if request.session is not None}
    held = [(name, slot.kv) for name, slot in slots.items() if slot.kv.holds_kv]
    held.sort(key=lambda one: not nameable(one[0]))
    names = [name for name, _ in held[:AUDIT_NAMES_MAX] if nameable(name)]
    rows, seen = [], set()
    for name, kv in held:
        seen.add(kv.req_pool_idx)
        session = sessions.get(name)
        runs = session is None or session._inflight or id(session) in busy
        # The last token's KV comes with the next turn.
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
    # The prefix is pointed to the tree's own pages when it is put there; a turn that begins or ends
    # changes what is sealed, and may give up what lies behind it.
    version = hash((generation, kv.cache_protected_len, sealed)) & _U64
    key = hash((row, generation, holder)) & _U64
    protected = kv.cache_protected_len
    return Row(row, kv.kv_allocated_len, number, version, key, sealed, protected)
