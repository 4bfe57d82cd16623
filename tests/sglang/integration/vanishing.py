"""A client that vanishes during a turn leaves its session usable, and on the right context.

The engine rolls an aborted turn back, or keeps it whole if it had ended before the abort came. Both
are right and nothing else is. The answer must be the one to the history that the token count
implies.
"""

import json
import time

from integration import wire
from integration.fleet import Fleet
from integration.turns import (
    Pinned, Turn, body, generate_at_engine, restore_speed, slow_engine, wait_session,
)

LOST_TEXT = " Say much."
LOST_TOKENS = 100
# A lost turn takes ten seconds. It must not end by itself before the abort comes.
LOST_STEP_SECONDS = 0.1
# An abort takes effect at the end of the running step.
FREE_SECONDS_MAX = 60


def next_turn(fleet: Fleet, session: Pinned, text: str = " What was I saying?") -> None:
    """Sends the turn after the lost one. Berth answers 409 until the engine has ended the lost
    turn."""
    request = body(text, 10, session_params={"id": session.id})
    deadline = time.monotonic() + FREE_SECONDS_MAX
    while True:
        answer = wire.post(f"{fleet.router_url}/generate", request)
        if answer.status != 409 or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert answer.status == 200, f"the status of the next turn ({answer})"
    restore_speed(fleet)
    turn = Turn.from_answer(answer.json())

    kept = session.history + LOST_TEXT
    kept += generate_at_engine(fleet, kept, LOST_TOKENS).text
    legal = {len(history + text): history for history in (session.history, kept)}
    assert turn.prompt_tokens in legal, "prompt tokens"
    whole = legal[turn.prompt_tokens] + text
    assert turn.text == generate_at_engine(fleet, whole, 10).text, "the answer"
    session.history = whole + turn.text
    session.turn(" Go on.", 10)
    session.close()


def test_in_a_stream(fleet: Fleet) -> None:
    before = fleet.baseline()
    session = Pinned(fleet)
    session.turn("Listen to me.", 10)
    with slow_engine(fleet, LOST_STEP_SECONDS):
        stream = session.send(LOST_TEXT, LOST_TOKENS, stream=True)
        events = stream.events()
        seen = [json.loads(next(events)) for _ in range(3)]
        stream.vanish()
        next_turn(fleet, session)
    assert seen[0]["output_ids"], "the stream had begun"
    assert fleet.wait_pool(before) == before, "the pool's use"


def test_in_the_first_turns_stream(fleet: Fleet) -> None:
    session = Pinned(fleet)
    with slow_engine(fleet, LOST_STEP_SECONDS):
        stream = session.send(LOST_TEXT, LOST_TOKENS, stream=True)
        next(stream.events())
        stream.vanish()
        next_turn(fleet, session, "Am I new here?")


def test_again_and_again(fleet: Fleet) -> None:
    session = Pinned(fleet)
    session.turn("Listen to me.", 10)
    with slow_engine(fleet, LOST_STEP_SECONDS):
        for _ in range(4):
            deadline = time.monotonic() + FREE_SECONDS_MAX
            while (stream := session.send(LOST_TEXT, LOST_TOKENS, stream=True)).status == 409:
                assert time.monotonic() < deadline, "the session stays busy"
                stream.close()
                time.sleep(0.05)
            assert stream.status == 200, "the stream's status"
            next(stream.events())
            stream.vanish()
        next_turn(fleet, session)


def test_while_waiting_for_an_unstreamed_answer(fleet: Fleet) -> None:
    session = Pinned(fleet)
    session.turn("Listen to me.", 10)
    with slow_engine(fleet, LOST_STEP_SECONDS):
        request = body(LOST_TEXT, LOST_TOKENS, session_params={"id": session.id})
        try:
            wire.post(f"{fleet.router_url}/generate", request, seconds=0.5)
            raise AssertionError("the answer came before the client could leave")
        except TimeoutError:
            pass
        next_turn(fleet, session)


def test_before_anything_was_answered(fleet: Fleet) -> None:
    session = Pinned(fleet)
    session.turn("Listen to me.", 10)
    request = body(LOST_TEXT, LOST_TOKENS, session_params={"id": session.id}, stream=True)
    with slow_engine(fleet, 0.2):
        leaving = wire.post_unread(f"{fleet.router_url}/generate", request)
        wait_session(fleet, session.id, "turns_running", 1)
        leaving.close()
        # A fast engine could run the whole turn before the abort comes. Then the client lacks a
        # turn that the engine has, and is rightly refused.
        wait_session(fleet, session.id, "turns_running", 0)
    next_turn(fleet, session)
