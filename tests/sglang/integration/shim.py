"""The shim inside the engine: what it reports is what the engine does.

The engine always runs with the shim. These tests take the place of its agent and talk to the engine
directly, so that nothing else changes the pool. `Listener` checks with every update that the five
parts of the pool sum to its size.
"""

import os
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, version
from pathlib import Path

import pytest

from integration import wire
from integration.fleet import POOL_TOKENS, ROWS, Fleet, start_engine, wait_engine
from integration.listener import Listener, Session, ShimState
from integration.processes import shim_env
from integration.seams import functions_off, written
from integration.turns import (
    Turn, body, finished_turn, new_id, restore_speed, run_together, slow_engine,
)

KNOWN_VERSION = version("sglang")
# The most events that the shim keeps until the agent reads them.
EVENTS_MAX = 256


class Direct:
    """A streaming session opened directly at the engine."""

    def __init__(self, fleet: Fleet, what: str = "shim"):
        self.url = fleet.engine_url
        self.id = new_id(what)
        # The text that the engine holds; and for each turn, that text and the answer to it.
        self.history = ""
        self.turns: list[tuple[str, Turn]] = []
        request = {"capacity_of_str_len": 100_000, "session_id": self.id, "streaming": True}
        assert wire.post(f"{self.url}/open_session", request).json() == self.id, (
            "the session opened"
        )
        fleet.opened.append(self.id)

    def __enter__(self) -> "Direct":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, text: str, tokens: int, rid: str | None = None) -> wire.Answer:
        more = {"session_params": {"id": self.id}} | ({"rid": rid} if rid else {})
        return wire.post(f"{self.url}/generate", body(text, tokens, **more))

    def turn(self, text: str, tokens: int, rid: str | None = None) -> Turn:
        turn = finished_turn(self.send(text, tokens, rid))
        self.history += text
        assert turn.prompt_tokens == len(self.history), (
            "prompt tokens: the history and the new text"
        )
        self.turns.append((self.history, turn))
        self.history += turn.text
        return turn

    def close(self) -> None:
        wire.post(f"{self.url}/close_session", {"session_id": self.id})

    def check_answers(self) -> None:
        """Checks that each answer is the engine's own to the same text. Call it last, because it
        leaves the text in the radix tree."""
        for text, turn in self.turns:
            request = body(text, turn.completion_tokens)
            alone = finished_turn(wire.post(f"{self.url}/generate", request))
            assert turn.output_ids == alone.output_ids, f"the answer to {text[-40:]!r}"


def text_of(tokens: int) -> str:
    """Returns a text of that many tokens that isn't cached."""
    return (uuid.uuid4().hex * tokens)[:tokens]


def whole_pages(fleet: Fleet, tokens: int) -> int:
    return tokens // fleet.page_size * fleet.page_size


def pages_up(fleet: Fleet, tokens: int) -> int:
    return -(-tokens // fleet.page_size) * fleet.page_size


@contextmanager
def listening(fleet: Fleet, deaf: bool = False) -> Iterator[Listener]:
    """Listens for the shim until it has connected, with nothing held in the pool."""
    assert fleet.wait_pool(0) == 0, "tokens held before the test"
    with Listener(fleet.shim_socket, deaf) as listener:
        listener.connected()
        if not deaf:
            listener.wait("the first update", lambda state: state.head)
        yield listener


def abort(fleet: Fleet, rid: str) -> None:
    wire.post(f"{fleet.engine_url}/abort_request", {"rid": rid})


def is_quiet(state: ShimState) -> bool:
    """Whether nothing runs, waits or is uncached."""
    return state.head.running == state.head.waiting == state.head.uncached == 0


def test_the_hello_describes_the_engine(fleet: Fleet) -> None:
    with listening(fleet) as listener:
        hello = listener.state.hello
        assert (hello.inert, hello.unauditable) == ("", ""), "why it doesn't work, or not wholly"
        assert bool(hello.undemotable) == ("demotion" in functions_off()), hello.undemotable
        assert hello.device == "cpu" and hello.page_bytes > 0, f"where the pool lies: {hello}"
        assert (hello.sglang, hello.dp_rank) == (KNOWN_VERSION, 0), "version and rank"
        sizes = (fleet.page_size, POOL_TOKENS, ROWS)
        assert (hello.page_size, hello.total, hello.rows_total) == sizes
        group = os.getpgid(hello.pid)
        assert group == fleet.engine.pid, "the process group of the pid it names"
        [shim, *_] = shim_env(fleet.shim_socket, fleet.bin_dir)["PYTHONPATH"].split(":")
        [folder] = Path(shim).glob("*.dist-info")
        assert hello.shim == Distribution.at(folder).version, "its version, as its metadata has it"


def test_sessions_and_pool_are_reported_to_the_token(fleet: Fleet) -> None:
    with listening(fleet) as listener, Direct(fleet) as session:
        assert listener.event("opened", session.id) == (True,), "opened"
        protected = whole_pages(fleet, 40)
        for turn, (history, rid) in enumerate([(60, "first"), (120, "second")]):
            rid = new_id(rid)
            session.turn(text_of(40), 20, rid)
            assert listener.event("committed", session.id) == (rid, history, False), "committed"
            told = listener.session(session.id, "the end of the turn", lambda s: not s.in_flight)
            kv = written(history)
            expected = Session(True, False, False, kv, kv, protected, history)
            assert told == expected, f"the session after turn {turn + 1}"
            listener.wait("quiet", is_quiet)
            head = listener.state.head
            assert head.held == pages_up(fleet, kv) - protected, (
                "what sessions hold beside the tree"
            )
            assert (head.protected, head.rows_free) == (protected, ROWS - 1), "protected, free rows"
            used = head.total - head.available - head.evictable
            assert used == fleet.wait_pool(used), "used, as the engine's own /v1/loads has it"
        session.close()
        assert listener.event("closed", session.id) == (), "closed"
        listener.wait("free rows", lambda state: state.head.rows_free == ROWS)
        assert listener.state.sessions == {}, "the sessions left"
        assert listener.state.head.held + listener.state.head.protected == 0, "tokens left"
        assert listener.state.head.recounts == 0, "sums that were found wrong"


@pytest.mark.since("0.5.22", "a session has the KV of its first turn while that turn runs")
def test_a_turn_is_in_flight_and_a_close_waits_for_it(fleet: Fleet) -> None:
    with listening(fleet) as listener, Direct(fleet) as session, slow_engine(fleet, 0.1):
        def close_while_it_runs() -> None:
            told = listener.session(
                session.id, "a running turn", lambda s: s.in_flight and s.holds_row
            )
            assert not told.closing, "closing before the close"
            listener.session(session.id, "growth", lambda s: s.allocated > told.allocated)
            assert listener.state.head.running == 1, "running requests"
            session.close()
            listener.session(session.id, "the close that waits", lambda s: s.closing)
            assert ("closed", session.id) not in listener.state.events, "closed during its turn"
            restore_speed(fleet)

        run_together(lambda: session.turn(text_of(40), 200), close_while_it_runs)
        assert listener.event("committed", session.id)[1:] == (240, False), "committed"
        assert listener.event("closed", session.id) == (), "closed after its turn"
        listener.wait("gone", lambda state: session.id not in state.sessions)


@pytest.mark.since("0.5.22", "an abort moves the KV of a running turn into the tree")
def test_an_abort_releases_the_turn(fleet: Fleet) -> None:
    with listening(fleet) as listener, Direct(fleet) as session:
        session.turn(text_of(40), 20)
        with slow_engine(fleet):
            rid = new_id("abort")

            def abort_it() -> None:
                listener.session(session.id, "a running turn", lambda s: s.allocated > 80)
                abort(fleet, rid)

            answer, _ = run_together(lambda: session.send(text_of(20), 400, rid), abort_it)
            assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort", "the turn's end"
        assert listener.event("aborted", session.id) == (True,), "aborted, its KV released"
        told = listener.session(session.id, "the end", lambda s: not s.holds_row)
        assert told == Session(False, False, False, 0, 0, 0, 60), "the session, without the turn"
        listener.wait("quiet", lambda state: is_quiet(state) and state.head.rows_free == ROWS)
        # The abort put the session's KV into the radix tree, so the history is cached.
        turn = session.turn("!?", 4)
        assert turn.cached_tokens == whole_pages(fleet, 60), "cached of the good history"


def test_a_flush_takes_the_kv_and_leaves_the_history(fleet: Fleet) -> None:
    with listening(fleet) as listener, Direct(fleet) as session:
        session.turn(text_of(40), 20)
        listener.wait("quiet", is_quiet)
        fleet.flush()
        told = listener.session(session.id, "the flush", lambda s: not s.holds_row)
        assert told == Session(False, False, False, 0, 0, 0, 60), "the session"
        assert listener.state.head.available == POOL_TOKENS, "free tokens"
        assert listener.state.head.recounts == 0, "sums that were found wrong"


def test_an_agent_may_come_and_go(fleet: Fleet) -> None:
    assert fleet.wait_pool(0) == 0, "tokens held before the test"
    with Direct(fleet) as session:
        session.turn(text_of(40), 20)
        instances = []
        for round in range(2):
            with Listener(fleet.shim_socket) as listener:
                told = listener.session(session.id, "all there is", lambda s: s.holds_row)
                assert told.history == 60 + 20 * round, "its history"
                instances.append(listener.state.hello.instance)
                # Events are reported as they happen, too.
                session.turn(text_of(5), 5)
                assert listener.event("committed", session.id)[1] == 70 + 20 * round, "committed"
            session.turn(text_of(5), 5)
        assert instances[0] == instances[1], "the engine's instance"


def test_an_agent_that_stops_reading_blocks_nothing_and_catches_up(fleet: Fleet) -> None:
    with listening(fleet, deaf=True) as listener, Direct(fleet) as session:
        # More than the socket's buffer takes, and then more events than the shim keeps.
        for _ in range(3):
            finished_turn(session.send(text_of(5), 150))
        for _ in range(2 * EVENTS_MAX):
            Direct(fleet, "brief").close()
        listener.resume_reading()
        state = listener.wait(
            "a loss", lambda state: state.head and state.head.events_lost and state
        )
        listener.session(session.id, "the end", lambda s: s.history == 3 * 155 and not s.in_flight)
        listener.wait("the closed gone", lambda state: list(state.sessions) == [session.id])
        assert state.full_tables > 1, "no full table after the loss"
        # No frame was torn: the sequence numbers went on, and the connection still works.
        session.send(text_of(5), 5)
        listener.session(session.id, "one more turn", lambda s: s.history == 3 * 155 + 10)


@pytest.mark.needs("demotion")
def test_a_demoted_session_keeps_its_history(fleet: Fleet) -> None:
    with listening(fleet) as listener, Direct(fleet) as session:
        assert listener.demote("nobody") == "unknown", "the refusal of an unknown session"
        assert listener.demote(session.id) == "no_kv", "the refusal of a session without KV"
        session.turn(text_of(40), 20)
        told = listener.session(session.id, "the end", lambda s: s.history == 60)
        assert told.committed == written(60), "tokens with KV"
        assert listener.demote(session.id) == "", "the refusal"
        told = listener.session(session.id, "the demotion", lambda s: not s.holds_row)
        assert told == Session(False, False, False, 0, 0, 0, 60), "the demoted session"
        listener.wait("quiet", lambda state: is_quiet(state) and state.head.rows_free == ROWS)
        assert fleet.pool_used_tokens() == 0, "tokens held"
        assert listener.demote(session.id) == "no_kv", "the refusal of the second"
        turn = session.turn(text_of(30), 20)
        assert turn.cached_tokens == whole_pages(fleet, written(60)), "cached: whole pages of history"
        turn = session.turn(text_of(30), 20)
        assert turn.cached_tokens == written(60) + 50, "cached of a turn that was not demoted before"
        session.check_answers()


@pytest.mark.needs("demotion")
def test_only_an_idle_session_is_demoted(fleet: Fleet) -> None:
    with listening(fleet) as listener, Direct(fleet) as session:
        def demote_while_it_runs() -> None:
            running = 45 + 40 + 3
            listener.session(
                session.id, "a running turn", lambda s: s.in_flight and s.allocated > running
            )
            assert listener.demote(session.id) == "in_flight", "the refusal during a turn"
            # A refused overlapping turn clears the flag of the turn that runs: a flaw of SGLang.
            assert session.send("overlap", 1).status == 400, "the status of an overlapping turn"
            listener.session(session.id, "the flag cleared", lambda s: not s.in_flight)
            assert listener.demote(session.id) == "busy", "the refusal without the flag"
            restore_speed(fleet)

        session.turn(text_of(40), 5)
        with slow_engine(fleet, 0.1):
            run_together(lambda: session.turn(text_of(40), 200), demote_while_it_runs)
        listener.wait("quiet", is_quiet)
        assert listener.demote(session.id) == "", "the refusal afterwards"
        session.check_answers()


@pytest.mark.needs("demotion")
@pytest.mark.since("0.5.22", "an abort in the queue ends its session's turn")
def test_a_turn_aborted_in_the_queue_leaves_nothing_to_demote(fleet: Fleet) -> None:
    with listening(fleet) as listener, Direct(fleet) as session:
        session.turn(text_of(40), 20)
        rids = [new_id("plain") for _ in range(ROWS - 1)]

        def abort_all() -> None:
            listener.wait("a queued turn", lambda state: state.head.waiting)
            abort(fleet, "queued-turn")
            assert listener.event("aborted", session.id) == (False,), "aborted, its KV kept"
            for rid in rids:
                abort(fleet, rid)

        def queue_it() -> None:
            listener.wait("no free row", lambda state: state.head.rows_free == 0)
            answer = session.send(text_of(30), 5, "queued-turn")
            assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort", "the turn's end"

        def plain(rid: str) -> wire.Answer:
            return wire.post(f"{fleet.engine_url}/generate", body(text_of(5), 400, rid=rid))

        with slow_engine(fleet):
            run_together(queue_it, abort_all, *(lambda rid=rid: plain(rid) for rid in rids))
        listener.wait("quiet", is_quiet)
        assert listener.demote(session.id) == "", "the refusal"
        turn = session.turn(text_of(30), 20)
        assert turn.cached_tokens == whole_pages(fleet, written(60)), "cached: the history's whole pages"
        session.check_answers()


@pytest.mark.needs("demotion")
def test_fifty_demotions_keep_the_account(fleet: Fleet) -> None:
    with listening(fleet) as listener:
        sessions = [Direct(fleet) for _ in range(5)]
        for round in range(10):
            for place, session in enumerate(sessions):
                before = written(len(session.history)) if session.history else 0
                turn = session.turn(text_of(7 + place + round), 6)
                if before:
                    assert turn.cached_tokens == whole_pages(fleet, before), "cached"
            for session in sessions[round % 5:] + sessions[: round % 5]:
                assert listener.demote(session.id) == "", "the refusal"
            listener.wait(
                "free rows", lambda state: state.head.rows_free == ROWS and is_quiet(state)
            )
            assert fleet.pool_used_tokens() == 0, f"tokens held after round {round}"
        assert listener.state.head.recounts == 0, "sums that were found wrong"
        for session in sessions:
            session.check_answers()
            session.close()
        listener.wait("all closed", lambda state: not state.sessions)


def test_a_sample_costs_the_same_with_200_sessions(fleet: Fleet) -> None:
    with listening(fleet) as listener:
        for others in (0, 200):
            idle = [Direct(fleet, "idle") for _ in range(others)]
            # Give KV to as many sessions as there are rows, less three.
            for other in idle[: ROWS - 3]:
                other.turn(text_of(5), 2)
            with Direct(fleet) as session:
                begin = len(listener.state.heads)
                session.turn(text_of(40), 800)
                listener.session(session.id, "the end", lambda s: s.history == 840)
            # The engine closes a session after it has answered.
            listener.wait("the others alone", lambda state: len(state.sessions) == others)
            heads = listener.resync().heads[begin:]
            cost = sorted(
                (b.samples_ns - a.samples_ns) / (b.samples - a.samples) / 1000
                for a, b in zip(heads, heads[1:]) if b.samples > a.samples
            )
            assert len(cost) > 40, f"only {len(cost)} updates"
            # With pages of one token each step is an update, so these are single samples. With
            # larger pages each value is the mean over the steps of a page.
            print(
                f"    {others} other sessions: median {statistics.median(cost):.0f} us, "
                f"p99 {cost[len(cost) * 99 // 100]:.0f} us a sample", flush=True,
            )
            for other in idle:
                other.close()


def test_a_hook_that_fails_silences_the_shim_and_not_the_engine(fleet: Fleet) -> None:
    """Runs the shim in a process of its own, because no known request makes a hook fail."""
    path = fleet.folder / "failing.sock"
    env = shim_env(path, fleet.bin_dir)
    code = (
        "import sys, types, berth_shim\n"
        "from berth_shim import wire\n"
        "from berth_shim.link import Link\n"
        "shim, batch = berth_shim._Shim(), object()\n"
        "shim._hello = wire.Hello(1, 0, 1, 1, 1, bytes(16), '0.5.23', '0')\n"
        "shim._link = Link([sys.argv[1]], True, wire.encode(shim._hello))\n"
        "shim._link.start()\n"
        "sys.stdin.readline()\n"
        "def fail(batch): raise KeyError('gone in this version')\n"
        "shim._sampler = types.SimpleNamespace(end_step=fail)\n"
        "for _ in range(2): print(shim._around_step(lambda scheduler, batch: 'result', None, batch))\n"
        "sys.stdin.readline()\n"
    )
    with Listener(path) as listener:
        command = [sys.executable, "-B", "-c", code, str(path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env={**os.environ, **env}, **pipes) as process:
            assert listener.wait("hello", lambda state: state.hello).inert == "", "inert at first"
            process.stdin.write("\n")
            process.stdin.flush()
            inert = listener.wait("inert", lambda state: state.hello and state.hello.inert)
            assert inert == "end_step: KeyError: 'gone in this version'", "why it is inert"
            output, _ = process.communicate("\n", timeout=60)
        assert output.split() == ["result", "result"], "what the engine gets from its own function"


# Python runs this file first. SGLang then finds its version module loaded, with another version, and
# the shim needs one more seam for each of two functions.
PLANTED = """
import sys, types
version = types.ModuleType("sglang._version")
version.__version__ = version.version = "0.5.99"
version.__version_tuple__ = version.version_tuple = (0, 5, 99)
sys.modules["sglang._version"] = version
from berth_shim import probe, seams
path = "sglang.srt.mem_cache.common:"
probe.SEAMS += (
    seams.Seam(seams.Kind.CALL, path + "never_was", (), ("demotion",)),
    seams.Seam(seams.Kind.CALL, path + "release_kv_cache", ("other",), ("audit",)),
)
"""


def test_an_unknown_version_works_but_for_what_it_lacks(fleet: Fleet) -> None:
    folder = fleet.folder / "unknown"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(PLANTED)
    path = folder / "shim.sock"
    env = shim_env(path, fleet.bin_dir)
    env["PYTHONPATH"] = f"{folder}:{env['PYTHONPATH']}"
    with Listener(path) as listener:
        engine, url = start_engine(folder, fleet.page_size, env=env, is_forked=False)
        try:
            wait_engine(engine, url)
            hello = listener.wait("hello", lambda state: state.hello)
            assert (hello.sglang, hello.inert) == ("0.5.99", ""), "the version"
            assert "never_was is missing on SGLang 0.5.99" in hello.undemotable
            changed = "release_kv_cache has other parameters on SGLang 0.5.99"
            assert hello.unauditable == changed
            assert hello.unpublishable == "", "what needs neither seam"
            finished_turn(wire.post(f"{url}/generate", body("Hello", 5)))
            listener.wait("an update", lambda state: state.head)
            assert listener.demote("nobody") == hello.undemotable
            log = engine.log.read_text(errors="replace")
            for function in ("demotion", "audit"):
                said = f"a function of Berth's shim is off: function={function} "
                assert log.count(said) == 1, "what the engine's log says"
            assert "function=trimming" not in log
        finally:
            engine.stop(0)
