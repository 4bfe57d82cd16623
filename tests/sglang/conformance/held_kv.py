"""What KV sessions hold, to the token at both page sizes, and what a flush frees."""

from conformance.engine import Engine, ids
from conformance.groups import in_groups


def ceil(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


@in_groups("page16", "page1")
def test_the_numbers_of_one_session(engine: Engine) -> None:
    page = engine.group.page_size
    session = engine.open()
    engine.turn(session, ids(40, 1), 20).good()
    # The last token of an answer is never computed, so it has no KV.
    engine.until_used(ceil(59, page), "used after the first turn")
    engine.turn(session, ids(40, 2), 20).good()
    engine.until_used(ceil(119, page), "used after the second turn")
    with engine.slow():
        flow = engine.flow(session, ids(40, 3), 200)
        flow.first()
        engine.abort(all=True)
        made = len(flow.end().output)
    engine.until_used(0, "used after the abort")
    reply = engine.turn(session, ids(2, 4), 4).good()
    assert reply.prompt == 122, "prompt tokens after the abort"
    # The abort left all computed KV in the tree, in whole pages, so the 120 tokens of the history
    # are cached. The two new tokens aren't: other tokens followed the history in the aborted turn.
    engine.expect("cached after the abort", reply.cached, 120 // page * page)
    assert made >= 1
    # The whole prompt counts as a first prompt now: its pages are locked, the rest is private.
    engine.until_used(ceil(122 + 4 - 1, page), "used after the turn that followed")
    engine.close(session)
    engine.until_used(0, "used after the close")


@in_groups("page16", "page1")
def test_later_turns_and_outputs_stay_private(engine: Engine) -> None:
    session = engine.open()
    first = engine.turn(session, ids(64, 1), 20).good()
    engine.turn(session, ids(64, 2), 20).good()
    whole = ids(64, 1) + first.output + ids(64, 2)
    page = engine.group.page_size
    beside = engine.turn(None, whole, 1).good()
    engine.expect("cached of a plain request beside the session", beside.cached, 64)
    assert 64 % page == 0, "the first prompt is whole pages"


@in_groups("page16", "page1")
def test_a_first_turn_of_one_token_publishes_nothing(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(64, 1), 1).good()
    engine.expect("cached of its prompt", engine.turn(None, ids(80, 1), 1).good().cached, 0)
    # The turns that follow publish nothing either.
    engine.turn(session, ids(5, 2), 8).good()
    engine.close(session)
    engine.until_used(0)


@in_groups("page16", "page1")
def test_a_session_starts_from_what_the_tree_has(engine: Engine) -> None:
    page = engine.group.page_size
    plain = engine.turn(None, ids(60, 1), 20).good()
    session = engine.open()
    reply = engine.turn(session, ids(60, 1) + plain.output + ids(5, 2), 4).good()
    engine.expect("cached of its first turn", reply.cached, 79 // page * page)
    other = engine.open()
    engine.turn(other, ids(60, 1), 4).good()
    # The shared prefix counts once.
    shared = 60 // page * page if page > 1 else 60
    used = ceil(85 + 3, page) + ceil(60 + 3, page) - shared
    engine.until_used(used, "used by two sessions on one prefix")


@in_groups("page16", "page1")
def test_a_flush_takes_the_kv_and_leaves_the_history(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(40, 1), 20).good()
    answer = engine.flushed()
    assert answer.body.startswith(b"Cache flushed."), answer.body
    engine.until_used(0, "used after the flush")
    reply = engine.turn(session, ids(3, 2), 4).good()
    assert (reply.prompt, reply.cached) == (63, 0), "prompt and cached tokens after the flush"


@in_groups("page16")
def test_a_flush_while_something_runs_is_refused(engine: Engine) -> None:
    with engine.slow():
        flow = engine.flow(None, ids(40, 1), 300)
        flow.first()
        answer = engine.flush()
        assert answer.status == 400, "the status of the flush"
        assert answer.body.startswith(b"Flush cache failed."), answer.body
        engine.sleep_in_forward(0)
        waited = engine.post("/flush_cache?timeout=20")
        assert waited.status == 200, "the status of a flush that waits"
        assert flow.end().good().completion == 300, "tokens of what ran"

