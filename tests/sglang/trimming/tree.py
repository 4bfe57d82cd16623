"""Models of the engine's radix tree, its recorder of KV events, and an agent that follows them.

They cover what publishing the tree again needs. They follow SGLang's `UnifiedTreeCore` and
`KVCacheEventRecorder`, and `worker-agent/src/kv_events/pages.rs`.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

GPU, CPU = "GPU", "CPU_PINNED"
# The module in which the shim finds the names of the tiers.
MODULE = "sglang.srt.disaggregation.kv_events"
MEDIA = SimpleNamespace(StorageMedium=SimpleNamespace(GPU=GPU, CPU=CPU))


class Key:
    """The tokens of whole pages, and a tenant's salt."""

    def __init__(self, tokens: array, salt: str | None):
        self.token_ids, self.cache_salt = tokens, salt

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice) -> "Key":
        return Key(self.token_ids[part], self.cache_salt)

    def child_key(self, page_size: int) -> Any:
        return (self.cache_salt, tuple(self.token_ids[:page_size]))

    def match(self, other: "Key", page_size: int) -> int:
        pairs = zip(self.token_ids, other.token_ids, strict=False)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(self), len(other)))
        return same // page_size * page_size


@dataclass(eq=False)
class Node:
    """A node of some pages. `hash_value` names pages without a salt, `event_hash_value` pages with
    one."""

    id: int
    parent: "Node | None"
    key: Key
    hash_value: list[str]
    event_hash_value: list[str] | None
    device: bool = False
    host: bool = False
    children: dict[Any, "Node"] = field(default_factory=dict)

    @property
    def evicted(self) -> bool:
        return self.parent is not None and not self.device

    @property
    def backuped(self) -> bool:
        return self.host


class Recorder:
    """The engine's queue of KV events."""

    def __init__(self, page_size: int, cost: Callable[[], None]):
        self._page_size, self._cost = page_size, cost
        self.queue: list[tuple[Any, ...]] = []

    def record_store(self, node: Any, medium: str = GPU) -> None:
        """Records the node page by page. A page that directly follows the last event's pages joins
        it."""
        salted = node.key.cache_salt is not None
        hashes, before = _names(node, salted), None
        if node.parent.parent is not None:
            before = _number(_names(node.parent, salted)[-1])
        assert len(hashes) == len(node.key) // self._page_size
        for name, at in zip(hashes, count(0, self._page_size)):
            self._cost()
            page = tuple(node.key.token_ids[at : at + self._page_size])
            tail = self.queue[-1] if self.queue else ("none",)
            if tail[:2] == ("stored", medium) and before is not None and tail[3][-1][0] == before:
                tail[3].append((_number(name), page))
            else:
                self.queue.append(("stored", medium, before, [(_number(name), page)]))
            before = _number(name)

    def record_remove(self, node: Node, medium: str) -> None:
        names = _names(node, node.key.cache_salt is not None)
        self.queue.append(("removed", medium, [_number(name) for name in names]))

    def record_all_cleared(self) -> None:
        self.queue.append(("cleared",))


def _names(node: Any, salted: bool) -> list[str]:
    return node.event_hash_value if salted else node.hash_value


def _number(name: str) -> int:
    return int(name[:16], 16)


class Tree:
    """The engine's radix tree. Each change records its KV events."""

    def __init__(self, page_size: int, cost: Callable[[], None] = lambda: None):
        self.page_size, self.kv_events = page_size, Recorder(page_size, cost)
        self._ids = count()
        self.reset()

    def reset(self) -> None:
        self.root_node = Node(next(self._ids), None, Key(array("q"), None), [], None)
        self.kv_events.record_all_cleared()

    def nodes(self) -> list[Node]:
        found, at = [self.root_node], 0
        while at < len(found):
            found += found[at].children.values()
            at += 1
        return found[1:]

    def truth(self) -> set[tuple[int, str]]:
        """Returns each resident page with its tier."""
        tiers = ((GPU, lambda node: node.device), (CPU, lambda node: node.host))
        return {
            (_number(name), medium)
            for node in self.nodes() for medium, has in tiers if has(node)
            for name in _names(node, node.key.cache_salt is not None)
        }

    # Changes by turns.

    def match(self, tokens: list[int], salt: str | None) -> tuple[Node, Key]:
        """Returns the node at which the known prefix of `tokens` ends, and the rest of the tokens.
        A node is split if the prefix ends inside it."""
        whole = len(tokens) // self.page_size * self.page_size
        node, key = self.root_node, Key(array("q", tokens[:whole]), salt)
        while len(key) and (child := node.children.get(key.child_key(self.page_size))):
            same = child.key.match(key, self.page_size)
            node = child if same == len(child.key) else self._split(child, same)
            key = key[same : len(key)]
        return node, key

    def insert(self, tokens: list[int], salt: str | None) -> None:
        node, rest = self.match(tokens, salt)
        for back in self._upwards(node):
            if back.evicted:
                back.device = True
                self.kv_events.record_store(back, GPU)
        if len(rest):
            child = Node(next(self._ids), node, rest, *self._hashes(node, rest), device=True)
            node.children[rest.child_key(self.page_size)] = child
            self.kv_events.record_store(child, GPU)

    def _upwards(self, node: Node) -> list[Node]:
        way = []
        while node.parent is not None:
            way.append(node)
            node = node.parent
        return way[::-1]

    def _split(self, child: Node, length: int) -> Node:
        """Splits a node. A new node takes the first tokens; the old node keeps its id."""
        pages = length // self.page_size
        events = child.event_hash_value
        first = Node(
            next(self._ids), child.parent, child.key[:length], child.hash_value[:pages],
            None if events is None else events[:pages], child.device, child.host,
        )
        child.key = child.key[length : len(child.key)]
        child.hash_value = child.hash_value[pages:]
        child.event_hash_value = None if events is None else events[pages:]
        child.parent.children[first.key.child_key(self.page_size)] = first
        child.parent = first
        first.children[child.key.child_key(self.page_size)] = child
        return first

    def _hashes(self, parent: Node, key: Key) -> tuple[list[str], list[str] | None]:
        def chained(before: str) -> Iterator[str]:
            for at in range(0, len(key), self.page_size):
                page = key.token_ids[at : at + self.page_size]
                before = hashlib.sha256(before.encode() + page.tobytes()).hexdigest()
                yield before

        salt = key.cache_salt
        plain = list(chained(parent.hash_value[-1] if parent.hash_value else ""))
        if salt is None:
            return plain, None
        return plain, list(chained(parent.event_hash_value[-1] if parent.parent else salt))

    # Changes by eviction and by the host's memory. Each applies to one of the possible nodes,
    # chosen by `number`.

    def _one(self, number: int, fits: Callable[[Node], bool]) -> Node | None:
        fitting = [node for node in self.nodes() if fits(node)]
        return fitting[number % len(fitting)] if fitting else None

    def evict(self, number: int) -> None:
        """Evicts from the device a node that has no children on the device."""
        node = self._one(number, lambda node: node.device and not any(
            child.device for child in node.children.values()
        ) and (node.host or not node.children))
        if node is not None:
            self.kv_events.record_remove(node, GPU)
            if node.host:
                node.device = False
            else:
                self._remove(node)

    def back_up(self, number: int) -> None:
        node = self._one(number, lambda node: node.device and not node.host and (
            node.parent.parent is None or node.parent.host
        ))
        if node is not None:
            node.host = True
            self.kv_events.record_store(node, CPU)

    def load_back(self, number: int) -> None:
        node = self._one(number, lambda node: node.evicted and (
            node.parent.parent is None or node.parent.device
        ))
        if node is not None:
            node.device = True
            self.kv_events.record_store(node, GPU)

    def forget(self, number: int) -> None:
        """Removes from the host a leaf, or a node that is on the device too."""
        node = self._one(number, lambda node: node.host and (node.device or not node.children))
        if node is not None:
            self.kv_events.record_remove(node, CPU)
            node.host = False
            if not node.device:
                self._remove(node)

    def _remove(self, node: Node) -> None:
        """Removes a node. As in the engine, the node keeps its parent, and a node removed from the
        device still looks resident."""
        assert not node.children
        del node.parent.children[node.key.child_key(self.page_size)]


class Follower:
    """An agent that follows the events, as the agent's `Pages` does. It ignores pages whose
    previous page it doesn't know."""

    def __init__(self) -> None:
        self._pages: dict[int, tuple[int | None, tuple[int, ...], set[str]]] = {}
        self._behind: dict[int, int] = {}

    def hear(self, events: list[tuple[Any, ...]]) -> None:
        for kind, *what in events:
            getattr(self, f"_{kind}")(*what)

    def known(self) -> set[tuple[int, str]]:
        return {(name, tier) for name, (_, _, tiers) in self._pages.items() for tier in tiers}

    def _cleared(self) -> None:
        self._pages, self._behind = {}, {}

    def _stored(self, tier: str, before: int | None, pages: list[tuple[int, tuple]]) -> None:
        if before is not None and before not in self._pages:
            return
        for name, tokens in pages:
            if name not in self._pages:
                self._pages[name] = (before, tokens, set())
                if before is not None:
                    self._behind[before] = self._behind.get(before, 0) + 1
            known, same, tiers = self._pages[name]
            assert (known, same) == (before, tokens), "a page is another one than before"
            tiers.add(tier)
            before = name

    def _removed(self, tier: str, names: list[int]) -> None:
        for name in names:
            if name in self._pages:
                self._pages[name][2].discard(tier)
        for name in reversed(names):
            self._settle(name)

    def _settle(self, name: int | None) -> None:
        """Forgets pages that are in no tier and that no known page follows."""
        while name in self._pages and not self._pages[name][2] and not self._behind.get(name):
            before = self._pages.pop(name)[0]
            if before is not None:
                self._behind[before] -= 1
            name = before
