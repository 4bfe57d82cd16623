"""Publishes the radix tree again as KV events, for an agent that has missed some: one that says that
all is void, then a store for every node.

Whoever follows the events, not the agent alone, knows after them what the tree holds. The events go
into the engine's own queue, between those of what happens meanwhile, so that their order is right;
they are made by pieces of whole nodes, so that a step waits for one long node at most.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

# After so long a piece takes no further node: a step of a small model takes several times that.
PIECE_SECONDS = 0.002


class Republisher:
    """Of one scheduler."""

    def __init__(self, scheduler: Any, wake: Callable[[], None]):
        self._publisher = scheduler.kv_events_publisher
        self._tree = getattr(scheduler.tree_cache, "tree_core", None)
        self._wake = wake
        # Nodes to look at, and those whose pages have been published since the beginning.
        self._nodes: list[Any] = []
        self._published: set[int] = set()
        # Why it can't be done; empty where it can.
        self.refusal = _refusal(self._publisher, self._tree)

    @property
    def runs(self) -> bool:
        """Is there a piece to do?"""
        return bool(self._nodes)

    def begin(self) -> None:
        """Begins, or begins again."""
        if self.refusal:
            return
        try:
            self._begin()
        except Exception as error:
            self._give_up(error)

    def _begin(self) -> None:
        # What is queued happened before, and is void too.
        self._publisher.publish_kv_events()
        self._tree.kv_events.record_all_cleared()
        self._nodes = list(self._tree.root_node.children.values())
        self._published = set()
        self._publisher.publish_kv_events()

    def go_on(self) -> None:
        """Does a piece. Raises nothing: one that fails is the last, and the agent knows less."""
        if not self._nodes:
            return
        try:
            self._piece()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.refusal = f"{type(error).__name__}: {error}"
        self._nodes = []
        logging.getLogger(__name__).warning("the tree can't be published: %s", self.refusal)

    def _piece(self) -> None:
        end = time.perf_counter() + PIECE_SECONDS
        while self._nodes and time.perf_counter() < end:
            node = self._nodes.pop()
            if node.id not in self._published and self._is_in_tree(node):
                self._publish(node)
        self._publisher.publish_kv_events()
        if self._nodes:
            # An idle scheduler sleeps.
            self._wake()
        else:
            self._published = set()

    def _is_in_tree(self, node: Any) -> bool:
        """What was evicted meanwhile, and all of a tree that was flushed, has no way to the root."""
        while (parent := node.parent) is not None:
            if parent.children.get(node.key.child_key(self._tree.page_size)) is not node:
                return False
            node = parent
        return node is self._tree.root_node

    def _publish(self, node: Any) -> None:
        """A node after those before it: it may have been split meanwhile. What was stored meanwhile
        behind a node that isn't published yet meant nothing to anyone, so it comes after it again."""
        from sglang.srt.disaggregation.kv_events import StorageMedium

        way = []
        while node.parent is not None and node.id not in self._published:
            way.append(node)
            node = node.parent
        for node in reversed(way):
            self._published.add(node.id)
            if not node.evicted:
                self._tree.kv_events.record_store(node, medium=StorageMedium.GPU)
            if node.backuped:
                self._tree.kv_events.record_store(node, medium=StorageMedium.CPU)
            self._nodes += node.children.values()


def _refusal(publisher: Any, tree: Any) -> str:
    if not publisher.enable_kv_cache_events:
        return "the engine publishes no KV events"
    if not hasattr(getattr(tree, "kv_events", None), "record_store"):
        return (
            f"the tree's core is {type(tree).__name__}, which tells nobody its nodes;"
            " --enable-session-radix-cache chooses one that does"
        )
    return ""
