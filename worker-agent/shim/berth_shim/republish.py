"""Publishes the radix tree again as KV events, for an agent that has missed some.

The first event says that all blocks are cleared; then comes a store event for every node. The
events go into the engine's own event queue, between the events of current changes. So their order
is right, and every subscriber, not only the agent, knows the tree's content afterwards. The work is
done in chunks, between which the tree changes; a chunk may end inside a long node.

No false claims: each chunk reports only pages that are in the tree at that moment, and later
changes are reported by the engine's own events.

Nothing is missed. All pages of a published node are known to the subscribers, so they understand
the engine's own events that store pages behind it. They can't understand an event that stores pages
behind a node not published yet, but those pages are published later, after that node. `_pages_done`
counts the pages already published on the path from the last published node to the next one. This
count stays valid because the path begins at the same node: a split inserts a new node before a node
that keeps its id and its end, and only leaves are removed. A removed node may have been split
before; then what remains of its path is published instead. Pages that are removed and stored again
lie behind known pages, or are still to be published.
"""

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# The time after which a chunk starts no further part. A step of a small model takes several times
# as long.
CHUNK_SECONDS = 0.002
# Pages published between two checks of the clock: 0.3 ms with pages of one token.
PART_PAGES = 64


class Republisher:
    """Publishes the radix tree of one scheduler again."""

    def __init__(self, scheduler: Any, wake: Callable[[], None]):
        self._publisher = scheduler.kv_events_publisher
        self._tree = getattr(scheduler.tree_cache, "tree_core", None)
        self._wake = wake
        # The tree's root when publishing began. A flush replaces the tree's root.
        self._root: Any = None
        # The nodes still to publish, the next one last, and the ids of nodes whose pages are all
        # published.
        self._pending_nodes: list[Any] = []
        self._published_ids: set[int] = set()
        # The pages published on the path from the last published node to the next one.
        self._pages_done = 0
        # Why the tree can't be published; empty if it can.
        self.refusal = _refusal(self._publisher, self._tree)

    @property
    def is_running(self) -> bool:
        """Whether chunks are left to publish."""
        return bool(self._pending_nodes)

    def begin(self) -> None:
        """Begins to publish the tree, or begins again."""
        if self.refusal:
            return
        try:
            self._begin()
        except Exception as error:
            self._give_up(error)

    def _begin(self) -> None:
        # Queued events belong to older changes, which the cleared event must void too.
        self._publisher.publish_kv_events()
        self._tree.kv_events.record_all_cleared()
        self._root, self._published_ids, self._pages_done = self._tree.root_node, set(), 0
        self._pending_nodes = list(self._root.children.values())
        self._publisher.publish_kv_events()

    def publish_chunk(self) -> None:
        """Publishes one chunk. Raises nothing: after an error nothing more is published."""
        if not self._pending_nodes:
            return
        try:
            self._publish_chunk()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.refusal = f"{type(error).__name__}: {error}"
        self._pending_nodes = []
        logging.getLogger(__name__).warning("can't publish the radix tree again: %s", self.refusal)

    def _publish_chunk(self) -> None:
        end = time.perf_counter() + CHUNK_SECONDS
        if self._root is not self._tree.root_node:
            # After a flush everything was stored behind the new root, which is known.
            self._pending_nodes = []
        while self._pending_nodes:
            node = self._pending_nodes.pop()
            if not self._publish_path(self._unpublished_path(node), end):
                self._pending_nodes.append(node)
            if time.perf_counter() >= end:
                break
        self._publisher.publish_kv_events()
        if self._pending_nodes:
            # Otherwise an idle scheduler would sleep.
            self._wake()
        else:
            self._root, self._published_ids = None, set()

    def _unpublished_path(self, node: Any) -> list[Any]:
        """Returns the path from the last published node to this one. If the node was removed, the
        path ends at its last remaining ancestor."""
        path: list[Any] = []
        while (parent := node.parent) is not None and node.id not in self._published_ids:
            # A removed node keeps its attributes, but its former parent no longer links to it.
            if parent.children.get(node.key.child_key(self._tree.page_size)) is node:
                path.append(node)
            node = parent
        return path[::-1]

    def _publish_path(self, path: list[Any], end: float) -> bool:
        """Publishes the pages on the path until `end`. Returns whether all are published."""
        for node in path:
            pages = len(node.hash_value)
            while self._pages_done < pages:
                begin = self._pages_done
                self._pages_done = min(begin + PART_PAGES, pages)
                self._record_part(node, begin, self._pages_done)
                # Checked after the part, so that each chunk publishes at least one.
                if time.perf_counter() >= end:
                    return False
            self._pages_done -= pages
            self._published_ids.add(node.id)
            self._pending_nodes += node.children.values()
        self._pages_done = 0
        return True

    def _record_part(self, node: Any, begin: int, end: int) -> None:
        """Records some of a node's pages, once for each memory that holds them."""
        from sglang.srt.disaggregation.kv_events import StorageMedium

        part = _node_part(node, begin, end, self._tree.page_size)
        if not node.evicted:
            self._tree.kv_events.record_store(part, medium=StorageMedium.GPU)
        if node.backuped:
            self._tree.kv_events.record_store(part, medium=StorageMedium.CPU)


def _node_part(node: Any, begin: int, end: int, page_size: int) -> Any:
    """Returns some of a node's pages as an object with the attributes that the recorder reads."""
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
            f"the tree's core is {type(tree).__name__}, which doesn't expose its nodes;"
            " start the engine with --enable-session-radix-cache for one that does"
        )
    return ""
