"""Publishes the radix tree again as KV events, for an agent that has missed some: one that says that
all is void, then stores for every node.

Whoever follows the events, not the agent alone, knows after them what the tree holds. The events go
into the engine's own queue, between those of what happens meanwhile, so that their order is right.
They are made by pieces, which end within a node where it is long: the tree changes between them.

That nothing is said that isn't so: a piece says of pages that are in the tree then where they are
then, and the engine itself says what changes later.

That nothing is left out: all pages of a published node are known, so what the engine stores behind
them is understood. What it stores behind others isn't: it lies behind a node that is still to come,
and comes after it. Of the way from the last published node to the next one the first `_done` pages
are known. For the way begins where it did: a split puts a new node before one that keeps its id and
its end, and only leaves go. A node that is gone may have been split before: then what is left of
its way comes instead. What is gone and stored again is behind what is known, or still to come.
"""

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# After so long a piece takes no further part: a step of a small model takes several times that.
PIECE_SECONDS = 0.002
# Pages between two looks at the clock: 0.3 ms of one token each.
PART_PAGES = 64


class Republisher:
    """Of one scheduler."""

    def __init__(self, scheduler: Any, wake: Callable[[], None]):
        self._publisher = scheduler.kv_events_publisher
        self._tree = getattr(scheduler.tree_cache, "tree_core", None)
        self._wake = wake
        # Where it began: another one where the tree was flushed since.
        self._root: Any = None
        # Nodes to look at, the next one last; and those whose pages have all been published.
        self._nodes: list[Any] = []
        self._published: set[int] = set()
        # Pages published of the way from the last published node to the next one to look at.
        self._done = 0
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
        self._root, self._published, self._done = self._tree.root_node, set(), 0
        self._nodes = list(self._root.children.values())
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
        if self._root is not self._tree.root_node:
            # All that came since came behind what is known: the new root.
            self._nodes = []
        while self._nodes:
            node = self._nodes.pop()
            if not self._publish(self._way(node), end):
                self._nodes.append(node)
            if time.perf_counter() >= end:
                break
        self._publisher.publish_kv_events()
        if self._nodes:
            # An idle scheduler sleeps.
            self._wake()
        else:
            self._root, self._published = None, set()

    def _way(self, node: Any) -> list[Any]:
        """From behind the last published node to this one, or to the last before it that is left."""
        way: list[Any] = []
        while (parent := node.parent) is not None and node.id not in self._published:
            # What is gone looks as if it had its pages still, but those before don't lead to it.
            if parent.children.get(node.key.child_key(self._tree.page_size)) is node:
                way.append(node)
            node = parent
        return way[::-1]

    def _publish(self, way: list[Any], end: float) -> bool:
        """Goes on along the way, until the time is up. Has it come to its end?"""
        for node in way:
            pages = len(node.hash_value)
            while self._done < pages:
                begin, self._done = self._done, min(self._done + PART_PAGES, pages)
                self._store(node, begin, self._done)
                # Afterwards: each piece does some.
                if time.perf_counter() >= end:
                    return False
            self._done -= pages
            self._published.add(node.id)
            self._nodes += node.children.values()
        self._done = 0
        return True

    def _store(self, node: Any, begin: int, end: int) -> None:
        """Some of a node's pages, where they are."""
        from sglang.srt.disaggregation.kv_events import StorageMedium

        part = _part(node, begin, end, self._tree.page_size)
        if not node.evicted:
            self._tree.kv_events.record_store(part, medium=StorageMedium.GPU)
        if node.backuped:
            self._tree.kv_events.record_store(part, medium=StorageMedium.CPU)


def _part(node: Any, begin: int, end: int, page_size: int) -> Any:
    """Some of a node's pages, as much of a node as the engine's recorder looks at."""
    hashes, event_hashes = node.hash_value, node.event_hash_value or []
    parent = node.parent
    if begin:
        before = slice(begin - 1, begin)
        parent = SimpleNamespace(
            hash_value=hashes[before], event_hash_value=event_hashes[before], parent=node
        )
    return SimpleNamespace(
        key=node.key[begin * page_size : end * page_size],
        hash_value=hashes[begin:end],
        event_hash_value=event_hashes[begin:end] or None,
        parent=parent,
    )


def _refusal(publisher: Any, tree: Any) -> str:
    if not publisher.enable_kv_cache_events:
        return "the engine publishes no KV events"
    if not hasattr(getattr(tree, "kv_events", None), "record_store"):
        return (
            f"the tree's core is {type(tree).__name__}, which tells nobody its nodes;"
            " --enable-session-radix-cache chooses one that does"
        )
    return ""
