"""Loads a session's KV from the host to the device on the agent's command, before its next turn.

The engine itself begins a load when a turn needs it, and the turn waits. A load of the shim waits for
nothing: it is refused while a prompt waits, no row is free or the engine is paused, and it takes no
KV that a turn or a pinned session holds, nor the pages that running turns need while it lasts. On a
GPU, all that is computed next waits for it, as for a load that a turn needs. The loaded KV can be
evicted again as soon as it is there.

Call `Prefetcher.prefetch` where the engine itself may begin a load: before the requests of a step
are handled.
"""

from array import array
from collections.abc import Iterable
from typing import Any

from .demotion import last_request
from .host import keeps_no_host_tier

# What a running turn may generate during a load. A load of 100k tokens takes 0.65 s at 20 GB/s and
# 128 KiB a token, and a step of decoding 10 ms at least.
GROWTH_TOKENS_MAX = 64


class Prefetcher:
    """Begins the loads of one scheduler, one at a time."""

    def __init__(self, scheduler: Any, off_reason: str = ""):
        self._scheduler = scheduler
        self._tree = scheduler.tree_cache
        # Why no session's KV can be loaded; empty if it can.
        self.refusal = off_reason or _refusal(scheduler)
        self._loading_node: int | None = None

    @property
    def is_loading(self) -> bool:
        """Whether the engine has not yet taken the latest load for ended."""
        return self._loading_node in getattr(self._tree, "ongoing_load_back", ())

    def prefetch(self, id: str, tokens_max: int) -> tuple[int, str]:
        """Begins to load the session's KV. Returns how many tokens, or 0 and the reason.

        The reasons are `unknown`, if the engine has no KV by which it knows the session, `resident`
        (also but for so few tokens that the engine loads them for no turn), `busy`, `too_long` (more
        than `tokens_max`), `no_room`, or why the engine can't do it.
        """
        if self.refusal:
            return 0, self.refusal
        # Before the tree is asked, which takes it for a use of the KV.
        if self._is_busy():
            return 0, "busy"
        node = self._deepest_node(id)
        if node is None:
            return 0, "unknown"
        tokens = _host_tokens(node)
        if tokens < max(1, self._tree.load_back_threshold):
            return 0, "resident"
        if tokens > tokens_max:
            return 0, "too_long"
        if not self._tree.load_back(node.id, mem_quota=self._room_tokens()):
            return 0, "no_room"
        self._loading_node = node.id
        self._tree.ready_to_load_host_cache()
        self._let_forwards_wait()
        return tokens, ""

    def _deepest_node(self, id: str) -> Any:
        """Returns the node where the session's newest KV ends; None if there is none."""
        session = self._scheduler.session_controller.sessions.get(id)
        if session is not None and session.streaming:
            # A demoted one has no tags. Its KV is in the tree by its tokens.
            request = last_request(session)
            if request is None or id in self._tree.session.slots:
                return None
            tokens = (*request.origin_input_ids, *request.output_ids)
            return self._matched_node(tokens, request)
        [component, *_] = self._tree.components.values()
        leaves = component._session_leaves.get(id, ())
        leaf = max(leaves, key=lambda node: node.last_access_time, default=None)
        # What is before a node on the device is there too. To say so costs no use and no time.
        if leaf is None or not leaf.evicted:
            return leaf
        return self._matched_node(_tokens_to(leaf), leaf.key)

    def _matched_node(self, tokens: Iterable[int], namespace: Any) -> Any:
        """Returns the node where the tree's KV of these tokens ends. As for a turn, this counts as
        the latest use of the KV: what was evicted would else be evicted again first."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(
            array("q", tokens), namespace.extra_key, cache_salt=namespace.cache_salt
        )
        matched = self._tree.match_prefix(MatchPrefixParams(key=key))
        node = self._tree.tree_core.node_by_id(matched.best_match_node)
        return None if node.parent is None else node

    def _is_busy(self) -> bool:
        scheduler, controller = self._scheduler, self._tree.cache_controller
        return bool(
            scheduler.waiting_queue
            # It would not see the load's end, and could not release its memory.
            or scheduler._engine_paused
            or scheduler.chunked_req is not None
            or scheduler.req_to_token_pool.available_size() == 0
            or controller.load_queue
            or self.is_loading
            or not self._tree.has_free_load_back_slot()
        )

    def _room_tokens(self) -> int:
        """Returns how many tokens the pool has for the load and for the part of the session's KV
        that is on the device, which the load locks."""
        stats = self._scheduler.pool_stats_observer.get_pool_stats()
        growing = len(self._scheduler.running_batch.reqs)
        return stats.full_available_size + stats.full_evictable_size - growing * GROWTH_TOKENS_MAX

    def _let_forwards_wait(self) -> None:
        """Makes what the device computes from now on wait for the load. A turn waits only for loads
        that the engine began for it."""
        if str(self._tree.device) == "cpu":
            return
        finished = self._tree.cache_controller.ack_load_queue[-1].finish_event
        self._scheduler.forward_stream.wait_event(finished)
        # Without overlapped scheduling the scheduler's own stream computes.
        self._scheduler.device_module.current_stream().wait_event(finished)


def _refusal(scheduler: Any) -> str:
    from sglang.srt.runtime_context import get_parallel

    parallel, tree = get_parallel(), scheduler.tree_cache
    reasons = {
        "the engine has no host tier": keeps_no_host_tier(tree),
        "the tree's core doesn't expose its nodes": not hasattr(
            getattr(tree.tree_core, "kv_events", None), "record_store"
        ),
        "several ranks share a session": (
            parallel.attn_tp_size, parallel.attn_cp_size, parallel.pp_size
        ) != (1, 1, 1),
        "the model keeps state beside its KV": scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm,
        "prefill and decode are apart": scheduler.disaggregation_mode.value != "null",
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _tokens_to(node: Any) -> list[int]:
    """Returns the tokens from the root to the node's end."""
    path = []
    while node.parent is not None:
        path.append(node.key.raw_token_ids())
        node = node.parent
    return [token for tokens in reversed(path) for token in tokens]


def _host_tokens(node: Any) -> int:
    """Counts the tokens before the node's end that only the host has."""
    tokens = 0
    while node.parent is not None and node.evicted:
        tokens += len(node.key)
        node = node.parent
    return tokens
