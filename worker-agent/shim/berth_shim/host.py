"""Reads the engine's host tier: the copies of KV in the host's memory, and how fast it loads them.

The engine copies KV of its radix tree to the host, by its write policy, and loads it back when a
prompt begins with it and the device has evicted it. A load may be under way while other prompts
are computed. Everything here runs on the scheduler's thread, and nothing waits for the device.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from .wire import HostFacts


def keeps_no_host_tier(tree: Any) -> bool:
    """Whether the engine has no host tier: no controller of one, or host memory only as a buffer on
    the way to a storage."""
    controller = getattr(tree, "cache_controller", None)
    return controller is None or getattr(tree, "host_memory_mode", None) == "buffer_only"


class HostTier:
    """The host tier of one scheduler; one that is never there if the engine has none."""

    def __init__(self, scheduler: Any, off_reason: str = ""):
        tree = scheduler.tree_cache
        self._tree = None if off_reason or keeps_no_host_tier(tree) else tree
        # Loads that were begun and whose time isn't known, oldest first: at most as many as the
        # engine has under way.
        self._timed_loads: deque[Any] = deque()
        self._loaded_tokens = self._loads_us = 0

    def record_load(self, begin_ns: int) -> None:
        """Times the newest load. The engine's call that began it has ended now, and had begun at
        `begin_ns`."""
        if self._tree is None:
            return
        self._count_ended_loads()
        load = self._tree.cache_controller.ack_load_queue[-1]
        if load.timing_enabled:
            self._timed_loads.append(load)
        elif str(self._tree.device) == "cpu":
            # There the load is done now.
            self._count_load(load, (time.perf_counter_ns() - begin_ns) // 1000)

    def _count_ended_loads(self) -> None:
        while self._timed_loads and self._timed_loads[0].finish_event.query():
            load = self._timed_loads.popleft()
            milliseconds = load.start_event.elapsed_time(load.finish_event)
            self._count_load(load, round(milliseconds * 1000))

    def _count_load(self, load: Any, microseconds: int) -> None:
        self._loaded_tokens += load.num_tokens
        self._loads_us += microseconds

    def read(self) -> HostFacts | None:
        """Returns the tier's figures; None without a tier."""
        if self._tree is None:
            return None
        self._count_ended_loads()
        controller = self._tree.cache_controller
        pool = controller.mem_pool_host
        used_tokens = max(0, pool.logical_size - pool.available_size())
        loading_tokens = _tokens(controller.load_queue, controller.ack_load_queue)
        writing_tokens = _tokens(controller.write_queue, controller.ack_write_queue)
        return HostFacts(
            total_tokens=pool.logical_size,
            used_tokens=used_tokens,
            evictable_tokens=max(
                0, used_tokens - self._kept_tokens(loading_tokens, writing_tokens)
            ),
            loading_tokens=loading_tokens,
            writing_tokens=writing_tokens,
            loaded_tokens=self._loaded_tokens,
            loads_us=self._loads_us,
        )

    def _kept_tokens(self, loading_tokens: int, writing_tokens: int) -> int:
        """Estimates how many of the host's tokens the engine doesn't evict."""
        moving_tokens = loading_tokens + writing_tokens
        if self._tree.is_write_back:
            # Then the engine also evicts copies of what the device has.
            return moving_tokens
        # What the engine loads is in the device's figures already.
        return max(moving_tokens, self._tree.evictable_size() + self._tree.protected_size())


def _tokens(queued: Iterable[Any], begun: Iterable[Any]) -> int:
    """The tokens of copies that the engine has queued, and of those that it has begun."""
    return sum(len(copy.device_indices) for copy in queued) + sum(
        copy.num_tokens for copy in begun
    )
