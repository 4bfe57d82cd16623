"""A cut through the pool, for the page audit: who holds which rows of the request table, what is
free, what is in the radix tree, at one moment between two steps.

Rows go on changing while a device still reads them. Each has a version: as long as it stays, the
entries that the cut names stay.
"""

from typing import Any, NamedTuple

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
    # As many of the tokens are not written again; known only while no turn runs.
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
    allocator = type(scheduler.token_to_kv_pool_allocator).__name__
    reasons = {
        f"the pool's allocator is {allocator}": allocator not in (
            "TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"
        ),
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
    """The cut of this moment. Between two steps only, on the scheduler's thread."""
    names, rows = rows_of(scheduler)
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    return Cut(names, rows, allocator.get_all_free_pages(), tree.all_values_flatten())


def rows_of(scheduler: Any) -> tuple[list[str], list[Row]]:
    """The rows that are held now. Sessions that can't be named, or are too many to be, are told
    apart and not named."""
    generations = scheduler.req_to_token_pool.req_generation.tolist()
    slots = scheduler.tree_cache.session.slots
    sessions = scheduler.session_controller.sessions
    held = [(id, slot.kv) for id, slot in slots.items() if slot.kv.holds_kv]
    held.sort(key=lambda one: not nameable(one[0]))
    names = [id for id, _ in held[:AUDIT_NAMES_MAX] if nameable(id)]
    rows, seen = [], set()
    for id, kv in held:
        seen.add(kv.req_pool_idx)
        session = sessions.get(id)
        # A turn that runs on the record writes behind what was committed, and moves that on.
        runs = session is None or session._inflight
        committed = 0 if runs else kv.kv_committed_len
        rows.append(_row(len(rows), kv, generations, id, committed))
    for request in live_requests(scheduler):
        kv = request.kv
        if kv.holds_kv and kv.req_pool_idx not in seen:
            seen.add(kv.req_pool_idx)
            rows.append(_row(len(rows), kv, generations, str(request.rid), 0))
    return names, rows


def _row(number: int, kv: Any, generations: list[int], holder: str, committed: int) -> Row:
    row, generation = kv.req_pool_idx, generations[kv.req_pool_idx]
    # The prefix is pointed to the tree's own pages when it is put there.
    version = hash((generation, kv.cache_protected_len, committed)) & _U64
    key = hash((row, generation, holder)) & _U64
    sealed, protected = committed, kv.cache_protected_len
    return Row(row, kv.kv_allocated_len, number, version, key, sealed, protected)
