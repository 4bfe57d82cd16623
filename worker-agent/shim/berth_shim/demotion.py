"""Demotes idle sessions on the agent's command: moves a session's KV into the radix tree.

After that the session's row of the request table is free, and the engine may evict its KV. The
session's tokens stay, and its next turn reuses whole pages of what is still in the tree. The engine
itself does the same with the KV of an aborted turn; here it is a finished one. The *slot*, which
holds the KV between turns, hands its KV record and its lock back to the session's last request,
whose KV `release_kv_cache` moves into the tree. Call `demote` only where the engine also closes
sessions: before the requests of a step are handled.

An engine with a hierarchical cache copies the KV to the host then, or when it evicts it, so that
the session's next turn costs a load and no computing.

Ranks that share a session (tensor, pipeline or context parallelism) would have to demote it in the
same step, but only one of them receives the agent's commands. `demotion_refusal` also refuses
configurations in which demotion was never tested on an engine.
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
        "KV of one prompt lies on the device and outside of it": (
            scheduler.enable_hisparse
            # SGLang 0.5.20 has another tree cache with LMCache, for which the shim is inert.
            or getattr(scheduler, "enable_lmcache", False)
        ),
        "decoding is speculative": get_spec().speculative_algorithm is not None,
        "thinking is stripped from the cache": get_serving().strip_thinking_cache,
        "prefill and decode are apart": scheduler.disaggregation_mode.value != "null",
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def demote(scheduler: Any, id: str) -> str:
    """Demotes the session. Returns why it was not demoted; empty if it was.

    The reasons are `unknown`, `in_flight`, `closing`, `no_kv`, `busy`, `multimodal` and
    `not_cacheable`. After `busy`, the agent can ask again after a step or two.
    """
    session = scheduler.session_controller.sessions.get(id)
    if session is None or not session.streaming:
        return "unknown"
    slots = scheduler.tree_cache.session.slots
    slot = slots.get(id)
    request = last_request(session)
    refusals = {
        "in_flight": session._inflight,
        "closing": session.close_on_finish,
        "no_kv": slot is None or not slot.kv.holds_kv,
        # The session's flag `_inflight` is not enough: the engine clears it if it refuses a second
        # turn while the first one runs.
        "busy": any(other.session is session for other in live_requests(scheduler)),
    }
    for refusal, applies in refusals.items():
        if applies:
            return refusal
    if request is None or not request.finished() or request.kv.holds_kv:
        # The slot has KV, but no finished turn that could take it.
        return "busy"
    if request.multimodal_inputs is not None:
        return "multimodal"
    if request.skip_radix_cache_insert:
        return "not_cacheable"
    _release(scheduler, session, slots.pop(id), request)
    return ""


def last_request(session: Any) -> Any:
    """Returns the request of the session's last committed turn; None if there is none."""
    if session.committed_origin_len is None or len(session.req_nodes) != 1:
        return None
    [node] = session.req_nodes.values()
    return node.req


def _release(scheduler: Any, session: Any, slot: Any, request: Any) -> None:
    """Moves the slot's KV into the radix tree, as the KV of the session's last request."""
    from sglang.srt.mem_cache.common import release_kv_cache

    # The request's token arrays may end with the prompt of a later turn that was aborted in the
    # queue: no harm, because the tree's key ends at the committed length.
    request.kv = slot.kv
    if hasattr(slot, "lock"):
        request.lock, slot.lock = slot.lock, None
        into_tree = {"checkpoint": True}
    else:
        # SGLang 0.5.20 and 0.5.21 keep the lock in three fields, and name the argument differently.
        for field in ("last_node", "lock_receipt", "swa_prefix_lock_released"):
            setattr(request, field, getattr(slot, field))
        into_tree = {"is_insert": True}
    # If the request had a session, `release_kv_cache` would give the KV record back to the slot.
    request.session = None
    tree = scheduler.tree_cache
    copied_from_hits = tree.write_through_threshold
    if getattr(tree, "cache_controller", None) is not None:
        # With `write_through_selective` the engine copies KV to the host only when it is used a
        # second time. All of this KV is: its session's next turn will want it. Other policies
        # don't differ. SGLang 0.5.20 and 0.5.21 don't know what was inserted before.
        tree.write_through_threshold = 1
        if hasattr(request.kv, "cache_inserted_len"):
            request.kv.cache_inserted_len = 0
    try:
        release_kv_cache(request, tree, **into_tree)
    finally:
        tree.write_through_threshold = copied_from_hits
        request.session = session
