"""What happens when the agent shuts down and when the engine dies. These tests run last."""

import time

import pytest

from integration import wire
from integration.fleet import AGENT_STOP_SECONDS_MAX, ENGINE_STOP_SECONDS_MAX, Fleet
from integration.turns import Pinned, body, chat_body, generate, refusal_code

# A connection to a dead engine on this machine is refused at once. The bound is less than the 10 s
# for which an agent waits for an engine's answer.
ANSWER_SECONDS_MAX = 9


def test_an_agent_that_shuts_down_closes_its_sessions(fleet: Fleet) -> None:
    before = fleet.baseline()
    sessions = [Pinned(fleet) for _ in range(3)]
    for session in sessions:
        session.turn("Stay a while. " * 8, 20)
    generate(fleet, "Tagged.", 8, {"x-berth-session-id": "tagged-at-the-end"})
    assert fleet.pool_used_tokens() > before, "the sessions hold nothing"

    status = fleet.stop_agent()
    assert status == 0, f"the agent's exit status within {AGENT_STOP_SECONDS_MAX} s of TERM"
    assert fleet.wait_pool(before) == before, "the pool's use without the agent"
    answer = wire.post(f"{fleet.router_url}/generate", body("Anyone?", 4), seconds=30)
    assert answer.status == 503, f"the status of a turn that no worker can take ({answer})"

    fleet.restart_agent()
    session = Pinned(fleet)
    session.turn("Hello again.", 10)
    session.turn(" It works.", 10)
    session.close()


@pytest.mark.kills
def test_an_engine_ends_with_its_shim(fleet: Fleet) -> None:
    status = fleet.engine.stop(ENGINE_STOP_SECONDS_MAX)
    assert status == 0, f"the engine's exit status within {ENGINE_STOP_SECONDS_MAX} s of TERM"


@pytest.mark.kills
def test_a_dead_engine_is_answered_for_at_once(fleet: Fleet) -> None:
    session = Pinned(fleet)
    session.turn("Something is wrong.", 10)
    with_engine = session.send(" Quick!", 10)
    with_engine.rest()
    running = _long_turn(fleet)
    fleet.kill_engine()

    begin = time.monotonic()
    try:
        raw = running.rest()
        assert b"[DONE]" not in raw, "a turn that was cut off looks complete"
    except (OSError, wire.http.client.HTTPException):
        pass  # The turn is expected to be cut off.
    _in_time(begin, "the end of the running turn")

    turns = {
        "a plain turn": ("/generate", body("Hello?", 4)),
        "a chat turn": ("/v1/chat/completions", chat_body("Hello?", 4)),
        "a streamed turn": ("/generate", body("Hello?", 4, stream=True)),
    }
    for what, (path, request) in turns.items():
        begin = time.monotonic()
        answer = wire.post(fleet.router_url + path, request, seconds=30)
        _in_time(begin, what)
        assert answer.status == 503, f"the status of {what} ({answer})"
    # The session is lost with the engine, so its client can't be helped by a later retry.
    begin = time.monotonic()
    request = body("Hello?", 4, session_params={"id": session.id})
    answer = wire.post(f"{fleet.router_url}/generate", request, seconds=30)
    _in_time(begin, "a turn of the session")
    assert answer.status in (409, 503), f"the status of a turn of the session ({answer})"
    refusal_code(answer, answer.status, "a turn of the session")


def _long_turn(fleet: Fleet) -> wire.Stream:
    url = f"{fleet.engine_url}/slow_down"
    wire.post(url, {"forward_sleep_time": 0.05})
    stream = wire.stream(f"{fleet.router_url}/generate", body("Long.", 200, stream=True))
    next(stream.events())
    return stream


def _in_time(begin: float, what: str) -> None:
    took = time.monotonic() - begin
    assert took < ANSWER_SECONDS_MAX, f"{what} took {took:.1f} s"
