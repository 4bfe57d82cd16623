"""Tests publishing the tree again in chunks, while the tree changes between two chunks.

The agent never knows a page that isn't resident. After the last chunk it knows every page that is.
No chunk takes long.
"""

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from berth_shim import republish
from berth_shim.republish import CHUNK_SECONDS, Republisher
from hypothesis import event, given, settings
from hypothesis import strategies as st

from .tree import MEDIA, MODULE, Follower, Key, Tree

PROMPTS = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=14), st.sampled_from([None, None, "salt"])
)
NUMBERS = st.integers(0, 20)
CHANGES = st.one_of(
    st.tuples(st.just("insert"), PROMPTS),
    st.tuples(st.just("match"), PROMPTS),
    st.tuples(st.sampled_from(["evict", "evict", "back_up", "load_back", "forget"]), NUMBERS),
)
OURS = st.sampled_from([("chunk", 0), ("chunk", 0), ("reset", 0), ("begin", 0)])
STEPS = st.one_of(CHANGES, OURS)


class Clock:
    """A clock that advances with the work that is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


class Harness:
    """A scheduler with a tree, and an agent that has missed all of the tree's events."""

    def __init__(self, page_size: int, page_seconds: float) -> None:
        self.clock, self.agent, self.woken = Clock(), Follower(), 0
        self.tree = Tree(page_size, lambda: self.clock.take(page_seconds))
        publisher = SimpleNamespace(
            enable_kv_cache_events=True, publish_kv_events=self.publish,
        )
        scheduler = SimpleNamespace(
            kv_events_publisher=publisher, tree_cache=SimpleNamespace(tree_core=self.tree)
        )
        self.republisher = Republisher(scheduler, self._wake)
        assert not self.republisher.refusal

    def _wake(self) -> None:
        self.woken += 1

    def publish(self) -> None:
        events, self.tree.kv_events.queue = self.tree.kv_events.queue, []
        self.agent.hear(events)

    def step(self, what: str, how: object) -> None:
        if what == "begin":
            self.republisher.begin()
        elif what == "chunk":
            self.chunk()
        elif what == "reset":
            self.tree.reset()
        elif what in ("insert", "match"):
            getattr(self.tree, what)(*how)
        else:
            getattr(self.tree, what)(how)

    def chunk(self) -> float:
        """Publishes a chunk. Returns the seconds that it took."""
        begin, woken = self.clock.now, self.woken
        self.republisher.publish_chunk()
        assert not self.republisher.refusal, self.republisher.refusal
        assert self.woken - woken == self.republisher.is_running, "an idle scheduler must be woken"
        return self.clock.now - begin

    def finish(self) -> list[float]:
        """Publishes the remaining chunks. Returns the seconds that each took."""
        chunks = []
        while self.republisher.is_running:
            chunks.append(self.chunk())
        return chunks


NewHarness = Callable[..., Harness]


@pytest.fixture(autouse=True, scope="module")
def media() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, MODULE, MEDIA)
        yield


@pytest.fixture
def new_harness(monkeypatch: pytest.MonkeyPatch) -> NewHarness:
    """A function that returns a harness, by whose clock the republisher takes the time."""

    def new(page_size: int, page_seconds: float = 0.0) -> Harness:
        harness = Harness(page_size, page_seconds)
        monkeypatch.setattr(republish, "time", harness.clock)
        return harness

    return new


def test_the_rest_of_a_node_that_was_split_and_evicted_is_published(
    new_harness: NewHarness,
) -> None:
    harness = new_harness(1)
    harness.tree.insert([1] * 100, None)
    harness.republisher.begin()
    harness.tree.insert([1] * 50 + [2] * 50, None)
    [first] = harness.tree.root_node.children.values()
    [old, _] = first.children.values()
    harness.tree.evict(0)
    assert old not in harness.tree.nodes()
    harness.finish()
    assert len(harness.agent.known()) == 100


def test_published_pages_of_a_removed_node_dont_count_for_the_next(new_harness: NewHarness) -> None:
    harness = new_harness(1, CHUNK_SECONDS)
    harness.tree.insert([2] * 100, None)
    harness.tree.insert([1] * 100, None)
    harness.republisher.begin()
    harness.chunk()
    harness.tree.insert([1] * 10 + [3] * 20, None)
    first = next(one for one in harness.tree.nodes() if len(one.hash_value) == 10)
    old = next(one for one in first.children.values() if len(one.hash_value) == 90)
    harness.tree.evict(1)
    assert old not in harness.tree.nodes()
    harness.finish()
    harness.publish()
    assert harness.agent.known() == harness.tree.truth()


def test_no_chunk_takes_longer_than_its_time_and_a_part(new_harness: NewHarness) -> None:
    page_seconds = 5e-6
    for page_size in (1, 16):
        harness = new_harness(page_size, page_seconds)
        harness.tree.insert([*range(128_000)], None)
        harness.publish()
        harness.agent = Follower()
        harness.republisher.begin()
        chunks = harness.finish()
        assert max(chunks) < CHUNK_SECONDS * 1.25
        assert min(chunks[:-1]) > CHUNK_SECONDS - page_seconds
        assert harness.agent.known() == harness.tree.truth()


def test_a_chunk_makes_progress_even_if_finding_its_node_takes_longer(
    new_harness: NewHarness,
) -> None:
    harness = new_harness(1)
    harness.tree.insert([1] * 200, None)
    harness.republisher.begin()
    child_key = Key.child_key

    def slow(key: Key, page_size: int) -> object:
        harness.clock.take(CHUNK_SECONDS)
        return child_key(key, page_size)

    with patch.object(Key, "child_key", slow):
        chunks = 0
        while harness.republisher.is_running:
            harness.chunk()
            chunks += 1
            assert chunks < 10, "no progress"
    assert len(harness.agent.known()) == 200


def test_one_long_node_is_one_run_of_pages(new_harness: NewHarness) -> None:
    """A separate event for each part would cost the agent more than the pages themselves."""
    harness = new_harness(1)
    harness.tree.insert([*range(500)], None)
    harness.tree.kv_events.queue.clear()
    heard: list = []
    with patch.object(harness.agent, "hear", heard.extend):
        harness.republisher.begin()
        harness.finish()
    assert [kind for kind, *_ in heard] == ["cleared", "stored"]


@settings(max_examples=1500)
@given(
    before=st.lists(CHANGES, max_size=12),
    between=st.lists(STEPS, max_size=30),
    page_size=st.integers(1, 2),
    part_pages=st.integers(1, 3),
    chunk_pages=st.integers(1, 4),
)
def test_the_agent_knows_what_is_resident(
    before, between, page_size, part_pages, chunk_pages
) -> None:
    harness = Harness(page_size, CHUNK_SECONDS / chunk_pages)
    with (
        patch.object(republish, "time", harness.clock),
        patch.object(republish, "PART_PAGES_MAX", part_pages),
    ):
        for step in before:
            harness.step(*step)
        # The agent has missed all events until now.
        harness.publish()
        harness.agent = Follower()
        harness.republisher.begin()
        event(f"nodes at first: {len(harness.tree.nodes()) // 3 * 3}")
        for step in between:
            harness.step(*step)
            harness.publish()
            known = harness.agent.known()
            assert known <= harness.tree.truth(), "a false claim"
        harness.finish()
    assert harness.agent.known() == harness.tree.truth()
