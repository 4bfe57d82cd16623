"""How the engine gets stuck: rows run out, KV runs out, or one request blocks all behind it."""

from conformance.engine import Engine, ids
from conformance.groups import ROWS, in_groups
from conformance.refusals import in_session


def fill_rows(engine: Engine, count: int) -> list[str]:
    sessions = [engine.open() for _ in range(count)]
    for salt, session in enumerate(sessions):
        engine.turn(session, ids(20, 1 + salt), 4).good()
    return sessions


def stuck(engine: Engine, waiting: int) -> None:
    """Checks the signs of a wedge: `waiting` requests wait, none runs, and all looks healthy."""
    engine.until_queued(waiting)
    assert engine.load()["num_running_reqs"] == 0, "running requests"
    assert engine.get("/health").status == 200, "the status of /health"
    assert engine.get("/ready").status == 200, "the status of /ready"
    # The probe of `/health` has taken a second; a turn of four tokens would have ended long ago.
    engine.until_queued(waiting)
    assert engine.load()["num_running_reqs"] == 0, "running requests a second later"


@in_groups("page16")
def test_one_free_row_is_enough(engine: Engine) -> None:
    sessions = fill_rows(engine, ROWS - 1)
    for session in sessions:
        engine.turn(session, ids(5, 30), 4).good()
    engine.turn(None, ids(5, 31), 4).good()


@in_groups("page16", "page1")
def test_sessions_on_every_row_wedge_even_themselves(engine: Engine) -> None:
    sessions = fill_rows(engine, ROWS)
    # The turns enter the queue one by one: the first in the queue gets the first free row.
    own = engine.pending(sessions[0], ids(5, 30), 4)
    engine.until_queued(1)
    plain = engine.pending(None, ids(5, 31), 4)
    engine.until_queued(2)
    fresh = engine.open()
    first = engine.pending(fresh, ids(5, 32), 4)
    engine.until_queued(3)
    # A turn that will be refused gets no answer either.
    refused = engine.pending("nobody", ids(5, 33), 4)
    stuck(engine, 4)
    assert not any(turn.done() for turn in (own, plain, first, refused)), "something was answered"
    # The way out: each close frees a row, and the queue moves on until the rows are full again.
    engine.close(sessions[1])
    assert own.end().good().prompt == 29, "prompt tokens of the session's own turn"
    plain.end().good()
    first.end().good()
    engine.close(sessions[2])
    assert refused.end().status == 400, "the status of the refused turn"


@in_groups("page16", "page1")
def test_a_full_pool_wedges_and_a_close_while_queued_frees_nothing(engine: Engine) -> None:
    sessions = [engine.open() for _ in range(4)]
    for salt, session in enumerate(sessions):
        engine.turn(session, ids(450, 1 + salt), 20).good()
    # The last token of a turn has no KV.
    page = engine.group.page_size
    held = 4 * (-(-469 // page) * page)
    engine.until_used(held, "held by the sessions")
    turns = [
        engine.pending(session, ids(100, 10 + n), 80, rid=f"queued-{n}")
        for n, session in enumerate(sessions)
    ]
    stuck(engine, 4)
    load = engine.load()
    # Every queued turn of a session counts with its full history.
    engine.expect("tokens held and waiting", load["num_total_tokens"], held + 4 * (470 + 100))
    engine.close(sessions[0])
    refused = engine.pending(sessions[0], ids(5, 20), 4)
    stuck(engine, 5)
    assert engine.used() == held, "used after the close of a session whose turn waits"
    # To abort the queued turn and then close the session works.
    engine.abort("queued-0")
    message = turns[0].end().finish["message"]
    assert message == "Abort in waiting queue", "how the queued turn ended"
    for turn in turns[1:]:
        turn.end().good()
    assert refused.end().status == 400, "the status of the turn in the closing session"
    engine.until_gone(sessions[0])


@in_groups("page16", "page1")
def test_one_request_that_does_not_fit_blocks_all_behind_it(engine: Engine) -> None:
    sessions = [engine.open() for _ in range(3)]
    for salt, session in enumerate(sessions):
        engine.turn(session, ids(450, 1 + salt), 20).good()
    big = engine.pending(None, ids(600, 10), 300, rid="too-big")
    engine.until_queued(1)
    small = engine.pending(sessions[0], ids(5, 11), 4)
    stuck(engine, 2)
    assert not small.done(), "the small turn went past the big one"
    engine.abort("too-big")
    assert big.end().finish["message"] == "Abort in waiting queue", "how the big one ended"
    assert small.end().good().prompt == 475, "prompt tokens of the small turn"


@in_groups("page16", "page1")
def test_admission_needs_more_than_the_exact_room(engine: Engine) -> None:
    """Checks that a request is admitted only if its input, its output and a page leave room
    over."""
    page, pool = engine.group.page_size, engine.group.pool_tokens
    for salt, (prompt, tokens) in enumerate(((1000, 9), (500, 13))):
        engine.turn(engine.open(), ids(prompt, salt), tokens).good()
    held = 1008 + 512
    engine.until_used(held, "used by the sessions, in whole pages")
    exact = pool - held - page - 100
    over = engine.pending(None, ids(100, 2), exact, rid="just-too-much")
    stuck(engine, 1)
    engine.abort("just-too-much")
    over.end()
    assert engine.turn(None, ids(100, 3), exact - 1).good().completion == exact - 1, "tokens"


@in_groups("page16")
def test_a_refused_turn_waits_like_any_other(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(40, 1), 4).good()
    with engine.slow(0.2):
        flows = [engine.flow(None, ids(10, 10 + n), 200) for n in range(ROWS - 1)]
        for flow in flows:
            flow.first()
        waiting = engine.pending(None, ids(10, 30), 4)
        refused = engine.generate_later(in_session(session, replace=True))
        engine.until_queued(2)
        assert not refused.done(), "the refusal overtook the queue"
        engine.abort(all=True)
        for flow in flows:
            flow.end()
        waiting.end()
        reply = refused.end()
    engine.expect("the refused turn is aborted with the queue", reply.status, 200)


@in_groups("page16")
def test_a_request_that_does_not_fit_shuts_the_queue_until_one_has_left(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(900, 1), 100).good()
    with engine.slow():
        flow = engine.flow(None, ids(100, 2), 150)
        flow.first()
        big = engine.pending(None, ids(900, 3), 100, rid="too-big")
        engine.until_queued(1)
        engine.abort("too-big")
        big.end()
        # The small request would fit and is first in the queue, and still it waits.
        small = engine.pending(None, ids(10, 4), 1)
        engine.until_queued(1)
        flow.end()
        ended = small.end().good()
    waited = ended.meta["e2e_latency"]
    engine.expect("the small one waited for what ran", waited > 20 * 0.03, True)
