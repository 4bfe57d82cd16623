"""Demotion: moves an idle session's KV into the radix tree.

The KV becomes evictable and the session's row free; the transcript stays. The next turn finds whole
pages of what is still in the tree.

This is what the engine does with an aborted turn's KV, applied to a turn that has finished: the
slot hands its record and lock back to the session's last request, and `release_kv_cache`
checkpoints that request into the tree. It runs where the engine closes sessions: before a step's
requests are handled.

Ranks that share a session (tensor, pipeline or context parallelism) would have to demote it in the
same step, but only one of them receives the agent's commands. For these and other configurations in
which demotion was never tested on an engine, `demotion_refusal` returns a reason.
"""

from typing import Any

from .requests import live_requests


def demotion_refusal(scheduler: Any) -> str:
    """Returns why no session of this engine can be demoted; empty if sessions can be."""
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
    """Demotes the session. Returns why it was not done; empty when done.

    Refusals: `unknown`, `in_flight`, `closing`, `no_kv`, `busy` (a request of the session is still
    in a batch or queue: ask again after a step or two), `multimodal`, `not_cacheable`.
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
        # The flag is not enough: refusing an overlapping turn clears the flag of the running one.
        "busy": any(other.session is session for other in live_requests(scheduler)),
    }
    for refusal, applies in refusals.items():
        if applies:
            return refusal
    if request is None or not request.finished() or request.kv.holds_kv:
        # KV without a finished turn or a queued request is a state that demotion doesn't support.
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

    # A turn that was aborted in the queue has appended its prompt to the token arrays that it
    # shares with this request. Those tokens are behind the committed length, which is where the
    # tree's key ends.
    request.kv = slot.kv
    request.lock, slot.lock = slot.lock, None
    # While the request has a session, the cache would give the record back to a slot.
    request.session = None
    try:
        release_kv_cache(request, scheduler.tree_cache, checkpoint=True)
    finally:
        request.session = session
