"""How sessions end: immediate and deferred closes, timeouts, and what a reopened id finds."""

import time

from conformance.engine import Engine, ids
from conformance.groups import in_groups
from conformance.refusals import in_session

# The reaper pauses for one second; a loaded machine takes several times that.
REAP_SECONDS_MAX = 30


def gone(session: str) -> str:
    return f"Invalid request: session id {session} does not exist"


@in_groups("page16", "page1")
def test_a_close_gives_back_all_but_the_first_prompt(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(64, 1), 20).good()
    engine.turn(session, ids(64, 2), 20).good()
    engine.close(session)
    engine.until_used(0)
    first = engine.turn(None, ids(80, 1), 1).good()
    engine.expect("cached of the first prompt", first.cached, 64)


@in_groups("page16")
def test_a_close_while_a_turn_runs_waits_for_its_end(engine: Engine) -> None:
    session = engine.open()
    with engine.slow():
        flow = engine.flow(session, ids(40, 1), 60)
        flow.first()
        engine.close(session)
        assert len(flow.end().output) == 60, "the turn runs to its end: tokens"
    refused = engine.generate(in_session(session))
    closing = f"Invalid request: close was requested for session {session}"
    engine.expect("straight after the turn", refused.status, 400)
    assert refused.error in (closing, gone(session)), refused.error
    engine.until_used(0)
    engine.until_gone(session)


@in_groups("page16")
def test_a_reopened_id_starts_empty(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(40, 1), 8).good()
    engine.close(session)
    engine.open(session)
    reply = engine.turn(session, ids(40, 2), 8).good()
    assert (reply.prompt, reply.cached) == (40, 0), "prompt and cached tokens of the first turn"


@in_groups("page16")
def test_a_timeout_counts_from_the_start_of_the_turn(engine: Engine) -> None:
    with engine.slow(0.05):
        session = engine.open(timeout=4)
        begin = time.monotonic()
        reply = engine.turn(session, ids(40, 1), 90).good()
        assert time.monotonic() - begin > 4, "the turn was too short to show anything"
    assert reply.completion == 90, "a turn longer than the timeout ends well: tokens"
    engine.until("the timeout has closed it", lambda: _is_gone(engine, session), REAP_SECONDS_MAX)
    engine.until_used(0)


@in_groups("page16")
def test_an_idle_session_times_out(engine: Engine) -> None:
    session = engine.open(timeout=5)
    begin = time.monotonic()
    engine.turn(session, ids(40, 1), 4).good()
    engine.until_used(0, "the pool's use after the timeout", seconds=5 + REAP_SECONDS_MAX)
    assert time.monotonic() - begin > 4, "closed before its time"
    assert _is_gone(engine, session)


@in_groups("page16")
def test_a_timeout_of_zero_closes_at_once(engine: Engine) -> None:
    for timeout in (0, -1):
        session = engine.open(timeout=timeout)
        engine.until("it is closed", lambda: _is_gone(engine, session), REAP_SECONDS_MAX)


def _is_gone(engine: Engine, session: str) -> bool:
    """Whether the session is closed. It needs no turn: the engine refuses to open an id that is
    open."""
    request = {"capacity_of_str_len": 1, "session_id": session, "streaming": True}
    if engine.post("/open_session", request).status != 200:
        return False
    engine.close(session)
    return True
