"""Demotion: an idle session's KV goes into the radix tree, evictable; its row is freed, its
transcript stays. The next turn finds in the tree what is still there, by whole pages.

It is what the engine does with an aborted turn's KV, done to a turn that has ended well: the slot
hands record and lock back to the session's last request, and `release_kv_cache` checkpoints that
into the tree. It runs where the engine closes sessions, before a step's requests are looked at.

Ranks that share a session (tensor, pipeline, context parallel) would have to do it at the same
step, and only one of them hears the agent; there, and wherever else this was never proven on an
engine, `undemotable` says no.
"""

from typing import Any

from .requests import live_requests


def undemotable(scheduler: Any) -> str:
    """Why no session of this engine can be demoted; empty when they can."""
    from sglang.srt.runtime_context import get_parallel, get_serving, get_spec

    parallel, tree = get_parallel(), scheduler.tree_cache
    reasons = {
        "several ranks share a session": (
            parallel.attn_tp_size, parallel.attn_cp_size, parallel.pp_size
        ) != (1, 1, 1),
        "the radix cache is off": tree.disable,
        "the model keeps state beside its KV": scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm,
        "KV lies outside the device too": (
            scheduler.enable_hierarchical_cache
            or scheduler.enable_hisparse
            or scheduler.enable_lmcache
        ),
        "decoding is speculative": get_spec().speculative_algorithm is not None,
        "thinking is stripped from the cache": get_serving().strip_thinking_cache,
        "prefill and decode are apart": scheduler.disaggregation_mode.value != "null",
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def demote(scheduler: Any, id: str) -> str:
    """Demotes the session; returns why not, empty when done.

    Refusals: `unknown`, `in_flight`, `closing`, `no_kv`, `busy` (a request of it is still in a
    batch or queue: ask again after a step or two), `multimodal`, `not_cacheable`.
    """
    session = scheduler.session_controller.sessions.get(id)
    if session is None or not session.streaming:
        return "unknown"
    slots = scheduler.tree_cache.session.slots
    slot = slots.get(id)
    request = _last_request(session)
    refusals = {
        "in_flight": session._inflight,
        "closing": session.close_on_finish,
        "no_kv": slot is None or not slot.kv.holds_kv,
        # The flag alone can't be trusted: a refused overlapping turn clears the live turn's.
        "busy": any(other.session is session for other in live_requests(scheduler)),
    }
    for refusal, applies in refusals.items():
        if applies:
            return refusal
    if request is None or not request.finished() or request.kv.holds_kv:
        # KV without a turn that has ended, which no queue knows: some state this was not made for.
        return "busy"
    if request.multimodal_inputs is not None:
        return "multimodal"
    if request.skip_radix_cache_insert:
        return "not_cacheable"
    _release(scheduler, session, slots.pop(id), request)
    return ""


def _last_request(session: Any) -> Any:
    if session.committed_origin_len is None or len(session.req_nodes) != 1:
        return None
    [node] = session.req_nodes.values()
    return node.req


def _release(scheduler: Any, session: Any, slot: Any, request: Any) -> None:
    from sglang.srt.mem_cache.common import release_kv_cache

    # A turn that was aborted in the queue has appended its prompt to the token arrays it shares
    # with this request. Those tokens lie behind the committed length, where the tree's key ends.
    request.kv = slot.kv
    request.lock, slot.lock = slot.lock, None
    # While the request has a session, its cache gives the record back to a slot.
    request.session = None
    try:
        release_kv_cache(request, scheduler.tree_cache, checkpoint=True)
    finally:
        request.session = session
