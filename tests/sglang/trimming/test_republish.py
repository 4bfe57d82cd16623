"""Tests publishing the tree again in chunks, while the tree changes between two chunks.

The agent never knows a page that isn't resident. After the last chunk it knows every page that is.
No chunk takes long.
"""

import sys
import unittest
from types import SimpleNamespace
from unittest.mock import patch

from berth_shim import republish
from berth_shim.republish import PIECE_SECONDS, Republisher
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
OURS = st.sampled_from([("piece", 0), ("piece", 0), ("reset", 0), ("begin", 0)])
STEPS = st.one_of(CHANGES, OURS)


class Clock:
    """A clock that advances with the work that is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


class House:
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
        elif what == "piece":
            self.piece()
        elif what == "reset":
            self.tree.reset()
        elif what in ("insert", "match"):
            getattr(self.tree, what)(*how)
        else:
            getattr(self.tree, what)(how)

    def piece(self) -> float:
        """Publishes a chunk. Returns the seconds that it took."""
        begin, woken = self.clock.now, self.woken
        self.republisher.go_on()
        assert not self.republisher.refusal, self.republisher.refusal
        assert self.woken - woken == self.republisher.runs, "an idle scheduler sleeps on"
        return self.clock.now - begin

    def finish(self) -> list[float]:
        """Publishes the remaining chunks. Returns the seconds that each took."""
        pieces = []
        while self.republisher.runs:
            pieces.append(self.piece())
        return pieces


class TestRepublish(unittest.TestCase):
    def setUp(self) -> None:
        self.enterContext(patch.dict(sys.modules, {MODULE: MEDIA}))

    def house(self, page_size: int, page_seconds: float = 0.0) -> House:
        house = House(page_size, page_seconds)
        self.enterContext(patch.object(republish, "time", house.clock))
        return house

    @settings(max_examples=1500, deadline=None)
    @given(
        before=st.lists(CHANGES, max_size=12),
        between=st.lists(STEPS, max_size=30),
        page_size=st.integers(1, 2),
        part_pages=st.integers(1, 3),
        piece_pages=st.integers(1, 4),
    )
    def test_the_agent_knows_what_is_resident(
        self, before, between, page_size, part_pages, piece_pages
    ) -> None:
        house = House(page_size, PIECE_SECONDS / piece_pages)
        with (
            patch.object(republish, "time", house.clock),
            patch.object(republish, "PART_PAGES", part_pages),
        ):
            for step in before:
                house.step(*step)
            # The agent has missed all events until now.
            house.publish()
            house.agent = Follower()
            house.republisher.begin()
            event(f"nodes at first: {len(house.tree.nodes()) // 3 * 3}")
            for step in between:
                house.step(*step)
                house.publish()
                self.assertLessEqual(house.agent.knows(), house.tree.truth(), "said, and not so")
            house.finish()
        self.assertEqual(house.agent.knows(), house.tree.truth())

    def test_what_is_left_of_a_node_that_was_split_and_then_evicted_is_not_left_out(self) -> None:
        house = self.house(1)
        house.tree.insert([1] * 100, None)
        house.republisher.begin()
        house.tree.insert([1] * 50 + [2] * 50, None)
        [first] = house.tree.root_node.children.values()
        [old, _] = first.children.values()
        house.tree.evict(0)
        self.assertNotIn(old, house.tree.nodes())
        house.finish()
        self.assertEqual(len(house.agent.knows()), 100)

    def test_pages_done_of_a_node_that_has_gone_are_not_done_of_the_next(self) -> None:
        house = self.house(1, PIECE_SECONDS)
        house.tree.insert([2] * 100, None)
        house.tree.insert([1] * 100, None)
        house.republisher.begin()
        house.piece()
        house.tree.insert([1] * 10 + [3] * 20, None)
        first = next(one for one in house.tree.nodes() if len(one.hash_value) == 10)
        old = next(one for one in first.children.values() if len(one.hash_value) == 90)
        house.tree.evict(1)
        self.assertNotIn(old, house.tree.nodes())
        house.finish()
        house.publish()
        self.assertEqual(house.agent.knows(), house.tree.truth())

    def test_no_piece_takes_longer_than_its_time_and_a_part(self) -> None:
        page_seconds = 5e-6
        for page_size in (1, 16):
            house = self.house(page_size, page_seconds)
            house.tree.insert([*range(128_000)], None)
            house.publish()
            house.agent = Follower()
            house.republisher.begin()
            pieces = house.finish()
            self.assertLess(max(pieces), PIECE_SECONDS * 1.25)
            self.assertGreater(min(pieces[:-1]), PIECE_SECONDS - page_seconds)
            self.assertEqual(house.agent.knows(), house.tree.truth())

    def test_a_piece_gets_on_where_the_way_to_its_node_alone_takes_longer(self) -> None:
        house = self.house(1)
        house.tree.insert([1] * 200, None)
        house.republisher.begin()
        child_key = Key.child_key

        def slow(key: Key, page_size: int) -> object:
            house.clock.take(PIECE_SECONDS)
            return child_key(key, page_size)

        with patch.object(Key, "child_key", slow):
            pieces = 0
            while house.republisher.runs:
                house.piece()
                pieces += 1
                self.assertLess(pieces, 10, "it gets nowhere")
        self.assertEqual(len(house.agent.knows()), 200)

    def test_one_long_node_comes_as_one_run_of_pages(self) -> None:
        """A separate event for each part would cost the agent more than the pages themselves."""
        house = self.house(1)
        house.tree.insert([*range(500)], None)
        house.tree.kv_events.queue.clear()
        heard: list = []
        with patch.object(house.agent, "hear", heard.extend):
            house.republisher.begin()
            house.finish()
        self.assertEqual([kind for kind, *_ in heard], ["cleared", "stored"])
