"""Turns that don't end by themselves: aborts, running and queued, and clients that disconnect."""

import json
import socket
import time

from conformance.engine import Engine, Reply, body, ids
from conformance.groups import ROWS, in_groups
from conformance.refusals import in_session

# Seconds between the engine's checks whether the client of an unstreamed turn is still connected.
POLL_SECONDS = 4


@in_groups("page16", "page1")
def test_an_abort_puts_the_whole_session_into_the_tree(engine: Engine) -> None:
    page = engine.group.page_size
    session = engine.open()
    first = engine.turn(session, ids(40, 1), 20).good()
    with engine.slow():
        flow = engine.flow(session, ids(40, 2), 200, rid="runs-now")
        flow.first()
        engine.abort("runs-now")
        ended = flow.end()
    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert ended.finish == finish, "how the turn ended"
    engine.until_used(0, "used after the abort")
    # Every request can use this KV now, including the first turn's output and the aborted prompt.
    chain = ids(40, 1) + first.output + ids(40, 2) + [7]
    plain = engine.turn(None, chain, 1).good()
    engine.expect("cached of a plain request on the chain", plain.cached, 100 // page * page)
    again = engine.turn(session, ids(40, 3), 4).good()
    assert again.prompt == 100, "prompt tokens: the aborted turn left no trace"
    engine.expect("cached of the next turn", again.cached, 60 // page * page)


@in_groups("page16")
def test_an_abort_of_the_first_turn(engine: Engine) -> None:
    session = engine.open()
    with engine.slow():
        flow = engine.flow(session, ids(40, 1), 200, rid="first-turn")
        flow.first()
        engine.abort("first-turn")
        assert flow.end().finish["type"] == "abort", "how the turn ended"
    engine.until_used(0, "used after the abort")
    reply = engine.turn(session, ids(10, 2), 4).good()
    assert (reply.prompt, reply.cached) == (10, 0), (
        "prompt and cached tokens: it starts from nothing"
    )


@in_groups("page16", "page1")
def test_an_abort_in_the_queue_keeps_the_slot(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(40, 1), 20).good()
    with engine.slow(0.2):
        flows = [engine.flow(None, ids(10, 10 + n), 200) for n in range(ROWS - 1)]
        for flow in flows:
            flow.first()
        queued = engine.pending(session, ids(40, 2), 20, rid="waits")
        engine.until_queued(1)
        engine.abort("waits")
        reply = queued.end()
        engine.abort(all=True)
        for flow in flows:
            flow.end()
    assert reply.finish["message"] == "Abort in waiting queue", "how the queued turn ended"
    after = engine.turn(session, ids(5, 3), 4).good()
    assert (after.prompt, after.cached) == (65, 59), "prompt and cached tokens: the slot is kept"


@in_groups("page16")
def test_an_abort_finds_ids_by_their_beginning(engine: Engine) -> None:
    with engine.slow():
        flows = [engine.flow(None, ids(10, n), 300, rid=rid) for n, rid in enumerate(("a1", "a12"))]
        for flow in flows:
            flow.first()
        # No request has exactly this id, so the abort never reaches the scheduler.
        engine.abort("a")
        engine.abort("")
        running = engine.flow(None, ids(10, 3), 2).end()
        assert running.completion == 2, "tokens of a request made meanwhile"
        engine.abort("a1")
        ends = [flow.end().finish["type"] for flow in flows]
    engine.expect("how a1 and a12 ended", ends, ["abort", "abort"])


@in_groups("page16")
def test_a_streaming_client_that_goes_away(engine: Engine) -> None:
    def noticed_before_a_poll() -> bool:
        """Returns whether the turn ended sooner than the engine's poll could have ended it. On a
        stalled machine it may end later, so the test tries again."""
        session = engine.open()
        engine.turn(session, ids(40, 1), 20).good()
        with engine.slow():
            flow = engine.flow(session, ids(40, 2), 400)
            flow.first()
            begin = time.monotonic()
            flow.vanish()
            engine.until("the turn is gone", lambda: engine.load()["num_running_reqs"] == 0)
            gone = time.monotonic() - begin
        engine.until_used(0, "used after the disconnect")
        assert next_turn(engine, session).prompt == 65, "prompt tokens: the turn left no trace"
        engine.close(session)
        engine.until_gone(session)
        return gone < POLL_SECONDS - 1

    engine.until("a client's end is noticed before a poll", noticed_before_a_poll)


def next_turn(engine: Engine, session: str) -> Reply:
    """Repeats a turn until it is no longer refused because the previous turn still runs."""

    def turn() -> Reply | None:
        reply = engine.generate(in_session(session))
        return reply if reply.status == 200 else None

    return engine.until("the session takes turns again", turn).good()


def leave_unread(engine: Engine, session: str, tokens: int) -> socket.socket:
    """Sends an unstreamed turn and doesn't read the answer. The caller closes the returned
    socket."""
    raw = json.dumps(body(ids(40, 2), tokens, session)).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    sock = socket.create_connection(("127.0.0.1", engine.port))
    sock.sendall(head.encode() + raw)
    begin = time.monotonic()

    def has_begun() -> bool:
        # A machine that stalls may not see it run.
        is_long_ago = time.monotonic() - begin > POLL_SECONDS
        return is_long_ago or engine.load()["num_running_reqs"] == 1

    engine.until("the turn runs", has_begun)
    return sock


@in_groups("page16")
def test_an_unstreamed_turn_that_ends_before_the_poll_counts(engine: Engine) -> None:
    def ended_in_time() -> str | None:
        """Returns the session, or None if the machine stalled and the poll may have come first."""
        session = engine.open()
        engine.turn(session, ids(40, 1), 20).good()
        begin = time.monotonic()
        with engine.slow(0.02):
            leave_unread(engine, session, 60).close()
            engine.until_idle()
        if time.monotonic() - begin < POLL_SECONDS:
            return session
        engine.close(session)
        return None

    session = engine.until("a turn ends before the poll", ended_in_time, seconds=60)
    # 40 + 20 + 40 + 60 tokens of history and 5 new ones. The client never read those 60.
    assert next_turn(engine, session).prompt == 165, "prompt tokens: the turn is in the history"


@in_groups("page16")
def test_an_unstreamed_turn_is_aborted_at_the_poll(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(40, 1), 20).good()
    with engine.slow(0.05):
        begin = time.monotonic()
        leave_unread(engine, session, 400).close()
        engine.until("the turn is gone", lambda: engine.load()["num_running_reqs"] == 0)
        gone = time.monotonic() - begin
    # Without the abort the turn takes 20 s.
    assert POLL_SECONDS - 1 < gone < 4 * POLL_SECONDS, f"noticed after {gone:.1f} s"
    engine.until_used(0, "used after the disconnect")
    assert next_turn(engine, session).prompt == 65, "prompt tokens: the turn left no trace"
