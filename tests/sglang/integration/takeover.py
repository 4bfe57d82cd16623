"""A killed agent leaves nothing behind, whatever it was doing: the next one closes its sessions.

Each test kills the agent with SIGKILL while a tap holds exactly one step, checks what this leaves
in the engine and in the journal, and starts the next agent. The state of the engine is taken from
its own shim and from `/v1/loads`, not from Berth.
"""

import json
import time

import pytest

from integration import wire
from integration.fleet import ROWS, SETTLE_SECONDS_MAX, Fleet, free_addresses
from integration.processes import answers_200, wait_until
from integration.succession import (
    OURS,
    TAKEOVER_SECONDS_MAX,
    Succession,
    agent_figure,
    check_cut_off,
    succession,
)
from integration.turns import Pinned, body, generate, new_id, refusal_code, slow_engine

# At the slowed engine this answer takes longer than a takeover may.
LONG_TOKENS = 1000
REPORTED_SECONDS_MAX = 30


def idle_session(fleet: Fleet, text: str = "Keep this in mind. " * 10) -> Pinned:
    session = Pinned(fleet)
    session.turn(text, 20)
    return session


def running(agents: Succession) -> None:
    """Waits until the only session has a running turn."""
    agents.listener.wait(
        "a running turn",
        lambda state: state.head.running == 1
        and any(session.in_flight and session.holds_row for session in state.sessions.values()),
    )


def test_an_open_was_not_yet_at_the_engine(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        hold = agents.tap.hold_request("/open_session")
        opened = agents.open()
        agents.kill_agent(hold, journalled=1, inside=0)
        check_cut_off(opened)
        agents.take_over()


def test_an_open_was_not_yet_answered(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        hold = agents.tap.hold_answer("/open_session")
        opened = agents.open()
        agents.kill_agent(hold)
        check_cut_off(opened)
        agents.take_over()


def test_a_session_was_open_without_a_turn(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        Pinned(fleet)
        agents.kill_agent()
        agents.take_over()


def test_a_session_was_idle_with_its_kv(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        session = idle_session(fleet)
        agents.kill_agent()
        [left] = agents.engine_sessions().values()
        assert left.holds_row and left.allocated >= len(session.history) - 1, f"it holds {left}"
        agents.take_over()


def test_sessions_were_tagged(fleet: Fleet) -> None:
    """The engine evicts tagged KV last, so a tag that nobody closes costs all others."""

    def named(agents: Succession, path: str) -> set[str]:
        exchanges = [each for each in agents.tap.exchanges(path) if each.status == 200]
        # Other turns, such as a probe of the fleet's, have no tag.
        return {json.loads(each.request_body).get("session_id", "") for each in exchanges} - {""}

    with succession(fleet) as agents:
        for number in range(5):
            headers = {"x-berth-session-id": new_id("tagged"), "x-berth-retention": "tagged"}
            asked = body(f"Remember the number {number}.", 5)
            answer = wire.post(f"{fleet.router_url}/generate", asked, headers)
            assert answer.status == 200, f"the status of {answer}"
        tags = named(agents, "/generate")
        assert len(tags) == 5 and all(tag.startswith(OURS) for tag in tags), f"the tags: {tags}"
        agents.kill_agent(journalled=0, inside=0)
        agents.start()
        wait_until(
            fleet.agent, "done", lambda: tags <= named(agents, "/close_session"), TAKEOVER_SECONDS_MAX
        )
        agents.check_all_free()


def test_a_turn_was_not_yet_at_the_engine(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        session = idle_session(fleet)
        hold = agents.tap.hold_request("/generate")
        turn = agents.client(_unstreamed_turn, fleet, session)
        agents.kill_agent(hold)
        check_cut_off(turn)
        agents.take_over()


def test_a_streamed_turn_ran(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        session = idle_session(fleet)
        with slow_engine(fleet):
            stream = session.send(" Tell me all.", LONG_TOKENS, stream=True)
            next(stream.events())
            running(agents)
            agents.kill_agent()
            agents.start()
            agents.finish()
        agents.check_all_free()


def test_a_streamed_turn_runs_on(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        agents.tap.hides_ends = True
        session = idle_session(fleet)
        with slow_engine(fleet):
            stream = session.send(" Tell me all.", LONG_TOKENS, stream=True)
            next(stream.events())
            running(agents)
            agents.kill_agent()
            assert agents.listener.state.head.running == 1, "turns that run without an agent"
            agents.start()
            agents.finish()
        agents.check_all_free()


def test_an_unstreamed_turn_ran(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        session = idle_session(fleet)
        with slow_engine(fleet):
            turn = agents.client(_unstreamed_turn, fleet, session)
            running(agents)
            agents.kill_agent()
            check_cut_off(turn)
            agents.start()
            agents.finish()
        agents.check_all_free()


@pytest.mark.since("0.5.22", "an abort in the queue ends its session's turn")
def test_a_turn_was_in_the_engines_queue(fleet: Fleet) -> None:
    with succession(fleet) as agents, slow_engine(fleet, 0.08):
        agents.tap.hides_ends = True
        session = Pinned(fleet)
        # Every row is taken for half a minute by turns that the agents don't know of.
        others = [
            wire.stream(f"{fleet.engine_url}/generate", body(f"{n:02} others", 300, stream=True))
            for n in range(ROWS)
        ]
        agents.listener.wait("full rows", lambda state: state.head.running == ROWS)
        turn = agents.client(_unstreamed_turn, fleet, session)
        agents.listener.wait(
            "the turn in the queue",
            lambda state: state.head.waiting == 1
            and any(s.in_flight and not s.holds_row for s in state.sessions.values()),
        )
        agents.kill_agent()
        check_cut_off(turn)
        agents.start()
        agents.finish()
        head = agents.listener.state.head
        assert (head.running, head.rows_free) == (ROWS, 0), "the others' turns, and free rows"
        for other in others:
            other.vanish()
        agents.check_all_free()


def test_a_close_was_not_yet_at_the_engine(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        session = idle_session(fleet)
        hold = agents.tap.hold_request("/close_session")
        session.close()
        agents.kill_agent(hold)
        agents.take_over()


def test_a_close_was_not_yet_answered(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        session = idle_session(fleet)
        hold = agents.tap.hold_answer("/close_session")
        session.close()
        agents.kill_agent(hold, inside=0)
        agents.take_over()


def test_a_close_was_not_yet_confirmed(fleet: Fleet) -> None:
    """The agent confirms a close by opening the session's id again, so the id is open once more."""
    with succession(fleet) as agents:
        session = idle_session(fleet)
        hold = agents.tap.hold_answer("/open_session")
        session.close()
        agents.kill_agent(hold)
        [left] = agents.engine_sessions().values()
        assert (left.holds_row, left.history) == (False, 0), "what the session's successor holds"
        agents.take_over()


def test_two_sessions_were_at_different_steps(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        agents.tap.hides_ends = True
        session = idle_session(fleet)
        with slow_engine(fleet):
            turn = agents.client(_unstreamed_turn, fleet, session)
            running(agents)
            hold = agents.tap.hold_answer("/open_session")
            opened = agents.open()
            agents.kill_agent(hold, journalled=2, inside=2)
            check_cut_off(turn)
            check_cut_off(opened)
            agents.start()
            agents.finish()
        agents.check_all_free()


def test_the_next_agents_were_killed_too(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        agents.tap.hides_ends = True
        session = idle_session(fleet)
        with slow_engine(fleet):
            turn = agents.client(_unstreamed_turn, fleet, session)
            running(agents)
            agents.kill_agent()
            check_cut_off(turn)
            hold = agents.tap.hold_request("/abort_request")
            agents.start()
            agents.kill_agent(hold)
            assert agents.listener.state.head.running == 1, "turns, before anyone has aborted one"
            for hold, inside in (
                (agents.tap.hold_request("/close_session"), 1),
                (agents.tap.hold_answer("/close_session"), 0),
                # The id is open once more, because the agent opened it to confirm the close.
                (agents.tap.hold_answer("/open_session"), 1),
            ):
                agents.start()
                agents.kill_agent(hold, inside=inside)
        agents.take_over()


def test_the_last_line_was_cut(fleet: Fleet) -> None:
    """An incomplete line of the journal was never acted on. It spoils neither the lines before
    it nor the lines that the next agent writes."""
    with succession(fleet) as agents:
        session = idle_session(fleet)
        for path, kind in (("/generate", "turn"), ("/open_session", "opening")):
            hold = agents.tap.hold_request(path)
            turn = kind == "turn"
            asked = agents.client(_unstreamed_turn, fleet, session) if turn else agents.open()
            agents.kill_agent(hold, journalled=1 if kind == "turn" else 2)
            check_cut_off(asked)
            text = agents.journal.read_text()
            last = text.splitlines()[-1]
            assert last.split(" ")[0] == kind, f"the kind of the journal's last line, {last!r}"
            agents.journal.write_text(text[: -len(last) // 2])
            agents.start()
            agents.finish()
            agents.check_all_free()
            session = idle_session(fleet)
        session.close()


def test_the_engine_was_restarted_too(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        idle_session(fleet)
        agents.kill_agent()
        fleet.kill_engine()
        fleet.start_engine()
        agents.tap.connect_to(fleet.engine_url)
        agents.listener.wait("the new shim", lambda state: state.hello and not state.ended)
        before = len(agents.tap.exchanges("/close_session"))
        agents.start()
        agents.finish()
        fleet.wait_placing()
        after = len(agents.tap.exchanges("/close_session"))
        assert after == before, "closes of sessions that another engine had"
        agents.check_all_free()


def test_the_engine_was_out_of_reach_for_a_moment(fleet: Fleet) -> None:
    """The agent takes its unreachable engine for ended; then the engine is back with all its
    sessions. No agent dies here, and the journal is used all the same."""
    with succession(fleet) as agents:
        closing, left = idle_session(fleet), idle_session(fleet)
        hold = agents.tap.hold_request("/close_session")
        closing.close()
        hold.wait()
        agents.tap.refuse()
        url = f"http://{fleet.agent_admin}/readyz"
        is_without = lambda: wire.get(url).status == 503  # noqa: E731
        wait_until(fleet.agent, "without its engine", is_without, SETTLE_SECONDS_MAX)
        hold.drop()
        assert len(agents.engine_sessions()) == 2, "sessions inside the engine"
        agents.tap.take_again()
        wait_until(fleet.agent, "back at its engine", lambda: answers_200(url), SETTLE_SECONDS_MAX)
        agents.finish()
        answer = wire.post(f"{fleet.router_url}/generate", _another(left))
        code = refusal_code(answer, 409, "a turn of the other session")
        assert code == "session_lost", "the code"
        left.close()
        agents.check_all_free()


def test_a_second_agent_is_kept_off_until_the_first_has_gone(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        session = idle_session(fleet)
        written = agents.journal.read_text()
        second = fleet.launch_agent("second", free_addresses(3), agents.tap.url)
        assert second.wait(SETTLE_SECONDS_MAX) == 1, (
            f"the second agent's exit status\n{second.log_tail()}"
        )
        said = second.log_tail(1)
        assert "another agent is in charge of this engine" in said, f"it said: {said}"
        assert agents.journal.read_text() == written, "the first one's journal"
        session.turn(" Still there?", 10)
        agents.kill_agent()
        agents.take_over()


def test_an_open_during_the_takeover_waits_and_plain_turns_dont(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        idle_session(fleet)
        agents.kill_agent()
        hold = agents.tap.hold_request("/close_session")
        agents.start()
        hold.wait()
        fleet.wait_placing()
        early = agents.client(Pinned, fleet)
        wait_until(
            fleet.agent, "asked for a session", lambda: agent_figure(fleet, "sessions_open") == 1,
            SETTLE_SECONDS_MAX,
        )
        generate(fleet, "Meanwhile?", 6)
        assert agent_figure(fleet, "rows_held") == 1, "rows counted until the close"
        assert len(agents.left_open()) == 1, "sessions that were opened or are yet to be closed"
        assert not early.done(), f"the open didn't wait: {early.exception()}"
        hold.let_go()
        session = early.result()
        session.turn("Thank you.", 10)
        session.close()
        agents.finish()
        agents.check_all_free()


def test_the_old_sessions_are_unknown_and_their_ids_can_be_opened_again(fleet: Fleet) -> None:
    with succession(fleet) as agents:
        sessions = [idle_session(fleet), Pinned(fleet)]
        agents.kill_agent(journalled=2, inside=2)
        agents.start()
        begin = time.monotonic()
        for session in sessions:
            url = f"{fleet.router_url}/generate"
            while (answer := wire.post(url, _another(session))).status == 503:
                refusal_code(answer, 503, "a turn before the router has heard of the new agent")
                assert time.monotonic() < begin + REPORTED_SECONDS_MAX, f"still {answer}"
            assert answer.status in (404, 409), f"the status of a turn of an old session ({answer})"
            refusal_code(answer, answer.status, "a turn of an old session")
        seconds = time.monotonic() - begin
        print(f"    heard {seconds:.2f} s after the new agent was ready", flush=True)
        for session in sessions:
            # If the answer were 200 instead of 201, a client would assume that its history was
            # kept.
            again = Pinned(fleet, session.id)
            again.turn("From the start, then.", 10)
            again.close()
        agents.finish()
        agents.check_all_free()


def _unstreamed_turn(fleet: Fleet, session: Pinned) -> wire.Answer:
    request = body(" Tell me all.", LONG_TOKENS, session_params={"id": session.id})
    return wire.post(f"{fleet.router_url}/generate", request)


def _another(session: Pinned) -> dict:
    return body(" Where were we?", 6, session_params={"id": session.id})
