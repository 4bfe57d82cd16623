"""Ordinary requests that kill the engine, and how its port behaves while the engine dies."""

import contextlib
import socket
import time

import pytest

from conformance.engine import Engine, Flow, body, ids
from conformance.groups import ROWS, in_groups
from conformance.refusals import in_session

# Seconds for which the engine collects diagnostics before it exits.
DYING_SECONDS = 5
DEAD_SECONDS_MAX = 60


def dies(engine: Engine, flow: Flow | None) -> None:
    """Checks how the engine dies. For about `DYING_SECONDS` it accepts connections and answers
    nothing, then its port refuses connections. A running stream ends without [DONE]."""
    lived = time.monotonic()

    def is_silent() -> bool:
        nonlocal lived
        asked = time.monotonic()
        # One unanswered request proves nothing: a machine that stalls looks dead too.
        if not any(_answers(engine) for _ in range(3)):
            return True
        lived = asked
        return False

    engine.until("no answer any more", is_silent)
    answered = _last_word(engine)
    # A longer time means that the machine stalled, and the engine may have exited meanwhile.
    if time.monotonic() - lived < DYING_SECONDS:
        engine.expect("what a dying engine answers", answered, None)
    assert engine.process is not None
    assert engine.process.wait(DEAD_SECONDS_MAX) is not None, "it lives on"
    lasted = time.monotonic() - lived
    engine.expect("the port lingers for a while", lasted > DYING_SECONDS - 0.5, True)
    try:
        socket.create_connection(("127.0.0.1", engine.port), timeout=2).close()
        refused = False
    except OSError:
        refused = True
    assert refused, "connections are accepted afterwards"
    if flow:
        events = flow.rest()
        assert "[DONE]" not in events, "the running stream ended properly"
        finished = [event for event in events if '"finish_reason":null' not in event]
        assert finished == [], "events with a finish_reason"


@in_groups("page16")
@pytest.mark.kills
def test_two_first_turns_in_one_batch(engine: Engine) -> None:
    session = engine.open()
    # No pass ends between two arrivals, so that all begin in one.
    engine.sleep_in_forward(1)
    # Equal lengths free all rows in the same pass, so the next batch holds both turns.
    busy = [engine.pending(None, ids(10, 10 + n), 120) for n in range(ROWS)]
    engine.until("all rows are taken", lambda: engine.load()["num_running_reqs"] == ROWS)
    both = [engine.pending(session, ids(20, 30 + n), 4) for n in range(2)]
    engine.until_queued(2)
    engine.sleep_in_forward(0.03)
    dies(engine, None)
    for turn in busy:
        # Its answer may have been on its way when the engine died.
        with contextlib.suppress(OSError):
            turn.end(30).good()
    for turn in both:
        try:
            reply = turn.end(30)
        except OSError:
            continue
        raise AssertionError(f"a turn was answered: {reply}")


@in_groups("page1")
@pytest.mark.kills
def test_a_refused_overlap_and_then_a_close(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(40, 1), 20).good()
    engine.sleep_in_forward(0.02)
    flow = engine.flow(session, ids(40, 2), 200)
    flow.first()
    assert engine.generate(in_session(session)).status == 400, "the status of the overlap"
    engine.close(session)
    # The refused overlap cleared the flag of the running turn, so the close frees its KV. The turn
    # runs on without it, and the engine dies when the turn ends.
    dies(engine, flow)


@in_groups("page256")
@pytest.mark.kills
def test_a_token_outside_the_vocabulary(engine: Engine) -> None:
    engine.sleep_in_forward(0.03)
    flow = engine.flow(None, ids(10, 1), 300)
    flow.first()
    doomed = engine.generate_later(body([5000], 4))
    dies(engine, flow)
    try:
        reply = doomed.end(30)
    except OSError:
        return
    raise AssertionError(f"the request was answered: {reply}")


def _last_word(engine: Engine) -> bytes | str | None:
    """Returns what the engine sends within a second: the first byte, `b""` for the connection's
    end, the text of an error, or None for nothing."""
    try:
        with socket.create_connection(("127.0.0.1", engine.port), timeout=2) as sock:
            sock.settimeout(1)
            sock.sendall(b"GET /v1/loads HTTP/1.1\r\nhost: engine\r\n\r\n")
            return sock.recv(1)
    except TimeoutError:
        return None
    except OSError as error:
        return str(error)


def _answers(engine: Engine) -> bool:
    try:
        return engine.get("/v1/loads", seconds=1).status == 200
    except OSError:
        return False
