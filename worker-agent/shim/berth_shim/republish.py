"""Publishes the radix tree again as KV events, for an agent that has missed some of the events.

The events pass through the engine's own queue, in order with those of current changes. The first
clears all pages at the subscribers, so every subscriber knows the tree's content afterwards. The
module changes neither the tree nor its KV. The tree may change between two chunks, and a chunk may
end inside a long node.

No event is false: a chunk reports only pages that are in the tree while it runs.

No page is missed. A node is *published* once all its pages are. Subscribers understand the engine's
own events that store pages after a published node. They can't use one after an unpublished node,
but those pages are published later, after that node.

A *pending* node is still to be published. Its *path* has the unpublished nodes from the root down
to it, of whose pages `_pages_done` are published. Changes between two chunks leave this count
valid:
- A split inserts a new node above a node that keeps its id and its end: one node more on the path,
  but the same pages.
- The engine removes only leaves. So the published ancestor stays as long as the pending node does.
- If the pending node itself was removed, a split may have left an upper part of it in the tree.
  Then this part is published.
- A page that was removed and stored again comes after published pages, or its node is pending.
"""

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# After this time, a chunk starts no further part. Even a small model's step takes several times
# as long.
CHUNK_SECONDS = 0.002
# A chunk checks the clock after each part. A part of pages of one token takes 0.3 ms.
PART_PAGES_MAX = 64


class Republisher:
    """Publishes the radix tree of one scheduler again."""

    def __init__(self, scheduler: Any, wake: Callable[[], None], off_reason: str = ""):
        self._publisher = scheduler.kv_events_publisher
        self._tree = getattr(scheduler.tree_cache, "tree_core", None)
        self._wake = wake
        # A flush of the tree replaces the root.
        self._root: Any = None
        # A stack: the next node to publish is at the end of the list.
        self._pending_nodes: list[Any] = []
        self._published_ids: set[int] = set()
        self._pages_done = 0
        # Empty if the tree can be published. The engine may lack what that needs (`off_reason`).
        self.refusal = off_reason or _publishing_refusal(self._publisher, self._tree)

    @property
    def is_running(self) -> bool:
        """Whether a part of the tree is still to be published."""
        return bool(self._pending_nodes)

    def begin(self) -> None:
        """Begins to publish the tree. Starts over if it was already begun."""
        if self.refusal:
            return
        try:
            self._begin()
        except Exception as error:
            self._give_up(error)

    def _begin(self) -> None:
        """Queues the event that clears all pages, and marks the root's children as pending."""
        # The queued events belong to older changes, which the cleared event must void too.
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
        """Stops for good after an error, and logs the error."""
        self.refusal = f"{type(error).__name__}: {error}"
        self._pending_nodes = []
        logging.getLogger(__name__).warning("can't publish the radix tree again: %s", self.refusal)

    def _publish_chunk(self) -> None:
        deadline = time.perf_counter() + CHUNK_SECONDS
        if self._root is not self._tree.root_node:
            # A flush removed all pending nodes. What was stored since, the engine's own events
            # report, and subscribers understand them, because a root needs no event.
            self._pending_nodes = []
        while self._pending_nodes:
            node = self._pending_nodes.pop()
            if not self._publish_path(self._unpublished_path(node), deadline):
                self._pending_nodes.append(node)
            if time.perf_counter() >= deadline:
                break
        self._publisher.publish_kv_events()
        if self._pending_nodes:
            # An idle scheduler must not sleep before the next chunk.
            self._wake()
        else:
            self._root, self._published_ids = None, set()

    def _unpublished_path(self, node: Any) -> list[Any]:
        """Returns the nodes after the node's nearest published ancestor (or the root), down to the
        node. Leaves out nodes that were removed from the tree."""
        path: list[Any] = []
        while (parent := node.parent) is not None and node.id not in self._published_ids:
            # A removed node keeps its link to its parent, but the parent no longer links to it.
            if parent.children.get(node.key.child_key(self._tree.page_size)) is node:
                path.append(node)
            node = parent
        return path[::-1]

    def _publish_path(self, path: list[Any], deadline: float) -> bool:
        """Publishes the path's pages until the deadline. Returns whether that was all."""
        for node in path:
            pages = len(node.hash_value)
            while self._pages_done < pages:
                begin = self._pages_done
                self._pages_done = min(begin + PART_PAGES_MAX, pages)
                self._record_part(node, begin, self._pages_done)
                # After the part, so that each chunk publishes at least one.
                if time.perf_counter() >= deadline:
                    return False
            self._pages_done -= pages
            self._published_ids.add(node.id)
            self._pending_nodes += node.children.values()
        self._pages_done = 0
        return True

    def _record_part(self, node: Any, begin: int, end: int) -> None:
        """Records an event for the pages `begin` to `end` (exclusive) in each memory that holds the
        node, the device's and the host's."""
        from sglang.srt.disaggregation.kv_events import StorageMedium

        part = _node_part(node, begin, end, self._tree.page_size)
        if not node.evicted:
            self._tree.kv_events.record_store(part, medium=StorageMedium.GPU)
        if node.backuped:
            self._tree.kv_events.record_store(part, medium=StorageMedium.CPU)


def _node_part(node: Any, begin: int, end: int, page_size: int) -> Any:
    """Returns pages of the node as what the engine's event recorder reads from a node."""
    hashes, event_hashes = node.hash_value, node.event_hash_value or []
    parent = node.parent
    if begin:
        page_before = slice(begin - 1, begin)
        parent = SimpleNamespace(
            hash_value=hashes[page_before],
            event_hash_value=event_hashes[page_before],
            parent=node,
        )
    return SimpleNamespace(
        key=node.key[begin * page_size : end * page_size],
        hash_value=hashes[begin:end],
        event_hash_value=event_hashes[begin:end] or None,
        parent=parent,
    )


def _publishing_refusal(publisher: Any, tree: Any) -> str:
    """Returns why the tree can't be published again; empty if it can."""
    if not publisher.enable_kv_cache_events:
        return "the engine publishes no KV events"
    if not hasattr(getattr(tree, "kv_events", None), "record_store"):
        return (
            f"the tree's core is {type(tree).__name__}, which doesn't expose its nodes;"
            " start the engine with --enable-session-radix-cache for one that does"
        )
    return ""
