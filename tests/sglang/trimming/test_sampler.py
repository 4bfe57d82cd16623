"""Tests how the shim reports thousands of sessions, and how it answers the agent's requests."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from berth_shim import demotion, sampler, table, wire

SESSIONS = 2000


class Link:
    """The shim's link, without a socket: keeps the updates that were sent."""

    is_connected, connection_number = True, 1

    def __init__(self) -> None:
        self.commands: list[wire.Command] = []
        self.updates: list[list[Any]] = []
        self.wakes = 0

    @property
    def has_commands(self) -> bool:
        return bool(self.commands)

    def take_commands(self) -> list[wire.Command]:
        taken, self.commands = self.commands, []
        return taken

    def flush(self) -> bool:
        return True

    def send(self, frame: bytes, _connection_number: int) -> None:
        name, *fields = msgspec.msgpack.decode(frame[5:])
        assert name == "Update"
        self.updates.append(fields)

    def wake(self) -> None:
        self.wakes += 1

    def take_updates(self) -> list[list[Any]]:
        taken, self.updates = self.updates, []
        return taken


class Engine:
    """A scheduler with idle streaming sessions, each of which holds 14 tokens and a row."""

    def __init__(self, sessions: int) -> None:
        self.sessions: dict[str, Any] = {}
        self.slots: dict[str, Any] = {}
        for number in range(sessions):
            self.add(f"s{number}")
        pool = 100 * max(1, sessions)
        self.scheduler = SimpleNamespace(
            session_controller=SimpleNamespace(sessions=self.sessions),
            tree_cache=SimpleNamespace(
                page_size=1, session=SimpleNamespace(slots=self.slots), protected_size=lambda: 0
            ),
            pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: SimpleNamespace(
                is_hybrid_swa=False, is_hybrid_ssm=False, full_capacity=pool,
                full_available_size=pool - 14 * len(self.slots), full_evictable_size=0,
            )),
            req_to_token_pool=SimpleNamespace(size=4096, available_size=lambda: 5),
            running_batch=SimpleNamespace(reqs=[]), waiting_queue=[], is_fully_idle=lambda: True,
        )
        self.link = Link()
        no_work = SimpleNamespace(
            can_begin=False, has_answer=False, is_running=False, forget_request=lambda: None,
            begin=lambda: None, advance=lambda: None, publish_chunk=lambda: None,
        )
        no_host = SimpleNamespace(read=lambda: None)
        self.sampler = sampler.Sampler(
            self.scheduler, self.link, None, no_work, no_work, no_host, no_work
        )

    def add(self, id: str) -> None:
        turn = SimpleNamespace(
            origin_input_ids=[0] * 10, output_ids=[0] * 5,
            sampling_params=SimpleNamespace(max_new_tokens=100),
        )
        self.sessions[id] = SimpleNamespace(
            session_id=id, streaming=True, _inflight=False, close_on_finish=False,
            req_nodes={1: SimpleNamespace(req=turn)}, committed_origin_len=10,
        )
        self.slots[id] = SimpleNamespace(kv=SimpleNamespace(
            holds_kv=True, kv_allocated_len=14, kv_committed_len=14, cache_protected_len=0
        ))

    def step(self) -> list[list[Any]]:
        """Lets the scheduler make a pass without work. Returns the updates that the shim sent."""
        if self.sampler.has_work:
            self.sampler.run_commands()
        self.sampler.send_heartbeat()
        self.sampler.sample_idle()
        return self.link.take_updates()

    def settle(self) -> list[list[Any]]:
        """Makes passes until the shim has nothing left to do. Returns all updates."""
        updates = []
        for _ in range(100_000):
            wakes = self.link.wakes
            updates += self.step()
            if self.link.wakes == wakes and not self.sampler.has_work:
                return updates
        raise AssertionError("the shim has never finished")


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves each pass the time for the smallest part of its work."""
    monkeypatch.setattr(sampler, "TABLE_SECONDS", 0)
    monkeypatch.setattr(sampler, "REQUESTS_SECONDS", 0)


@pytest.mark.usefixtures("no_time")
def test_a_full_table_comes_in_parts_and_its_last_one_is_marked() -> None:
    engine = Engine(SESSIONS)
    first = engine.step()
    # The heartbeat is one too.
    assert [len(update[6]) for update in first] == [table.SCAN_PART] * 2, "one part a sample"
    updates = first + engine.settle()
    assert [seq for seq, *_ in updates] == list(range(len(updates)))
    begins, ends = [update[2] for update in updates], [update[3] for update in updates]
    assert begins == [True] + [False] * (len(updates) - 1)
    assert ends == [False] * (len(updates) - 1) + [True]
    ids = [session[0] for update in updates for session in update[6]]
    assert len(ids) == SESSIONS and set(ids) == set(engine.sessions)
    facts = [update[1] for update in updates]
    assert facts[-1] is not None and not any(facts[:-1]), "the sum is wrong before"
    held, uncached = facts[-1][4:6]
    assert (held, uncached) == (14 * SESSIONS, 0)


@pytest.mark.usefixtures("no_time")
def test_what_opens_and_closes_while_the_table_is_read_is_reported_right() -> None:
    engine = Engine(SESSIONS)
    updates = engine.step()
    reported = updates[0][6][0][0]
    unread = next(iter(engine.sessions))
    engine.add("new")
    engine.sampler.report_open("new", True)
    for id in (reported, unread):
        del engine.sessions[id], engine.slots[id]
        engine.sampler.report_close(id)
    known: dict[str, Any] = {}
    for *_, gone, sessions in updates + engine.settle():
        known.update((session[0], session) for session in sessions)
        for id in gone:
            known.pop(id, None)
    assert set(known) == set(engine.sessions)
    assert engine.sampler._table.held_tokens == 14 * len(engine.slots)


def _answers(updates: list[list[Any]], name: str) -> list[list[Any]]:
    return [event[1:] for update in updates for event in update[4] if event[0] == name]


def test_an_inspection_is_answered_after_what_the_engine_got_before() -> None:
    engine = Engine(1)
    engine.settle()
    engine.link.commands += [wire.Inspect(7, "s0"), wire.Inspect(8, "unknown")]
    updates = [engine.step() for _ in range(sampler.INSPECTION_PASSES)]
    assert _answers(sum(updates, []), "Inspected") == []
    # Only now the engine handles the abort, and the turn is not part of the history any more.
    engine.sessions["s0"].committed_origin_len = 3
    known, unknown = _answers(engine.settle(), "Inspected")
    assert (known[0], known[1][0], known[1][-1]) == (7, "s0", 3 + 5)
    assert unknown == [8, None]


@pytest.mark.usefixtures("no_time")
@pytest.mark.parametrize("floods", [False, True])
def test_every_request_is_answered_once_whatever_else_happens(
    monkeypatch: pytest.MonkeyPatch, floods: bool
) -> None:
    engine = Engine(SESSIONS)
    engine.settle()
    monkeypatch.setattr(demotion, "demote", _demote(engine))
    engine.link.commands += [wire.Demote(number, f"s{number}") for number in range(SESSIONS)]
    engine.link.commands += [wire.Inspect(SESSIONS, "s0")]
    updates = []
    for _ in range(300 if floods else 0):
        for _ in range(wire.EVENTS_MAX):
            engine.sampler.report_abort("s1", False)
        updates += engine.step()
    updates += engine.settle()
    demoted = _answers(updates, "Demoted")
    assert sorted(demoted) == [[number, f"s{number}", None] for number in range(SESSIONS)]
    assert [number for number, _ in _answers(updates, "Inspected")] == [SESSIONS]
    assert max(len(update[4]) for update in updates) <= wire.EVENTS_MAX
    assert engine.slots == {}


def _demote(engine: Engine) -> Callable[[Any, str], str]:
    def demote(_scheduler: Any, id: str) -> str:
        del engine.slots[id]
        return ""

    return demote


def test_requests_of_an_earlier_connection_are_forgotten() -> None:
    engine = Engine(1)
    engine.settle()
    engine.link.commands += [wire.Inspect(7, "s0")]
    engine.step()
    engine.link.connection_number += 1
    updates = engine.settle()
    assert updates[0][0] == 0 and updates[0][2], "the new agent gets a full table first"
    assert _answers(updates, "Inspected") == []
