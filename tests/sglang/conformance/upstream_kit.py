"""What SGLang's own test kit for streaming sessions asserts; K1 to K16 number its assertions."""

from typing import Any

from conformance.engine import Engine, Reply, body, ids
from conformance.groups import in_groups
from integration.turns import run_together

BOS = 256
LOGPROB_MODES: tuple[dict, ...] = (
    {},
    {"return_logprob": True},
    {"return_logprob": True, "logprob_start_len": 0},
)


def healthy(engine: Engine) -> None:
    assert engine.get("/health").status == 200, "the status of /health"


@in_groups("page16")
def test_k1_an_open_answers_with_the_id(engine: Engine) -> None:
    request = {"capacity_of_str_len": 1000, "streaming": True}
    named = engine.post("/open_session", {**request, "session_id": "k1"})
    assert (named.status, named.json()) == (200, "k1"), "an open under a given id"
    made = engine.post("/open_session", request)
    assert made.status == 200, "the status of an open without an id"
    id = made.json()
    assert isinstance(id, str) and len(id) == 32, f"not an id: {id!r}"
    engine.turn(id, ids(8, 1), 2).good()
    engine.close(id)
    engine.close("k1")


@in_groups("page16")
def test_k2_a_close_answers_with_nothing(engine: Engine) -> None:
    engine.close(engine.open())


@in_groups("page16", "page1")
def test_k3_k4_k5_each_turn_inherits_the_kv_of_the_last(engine: Engine) -> None:
    session = engine.open()
    prompt, history, rid = ids(40, 1), 0, None
    for place in range(3):
        reply = engine.generate({
            **body(prompt, 12), "session_params": {"id": session, "rid": rid},
        }).good()
        assert reply.prompt == history + len(prompt), f"turn {place}: prompt tokens"
        assert reply.completion == 12, f"turn {place}: completion tokens"
        assert reply.finish == {"type": "length", "length": 12}, f"turn {place}: the end"
        # The KV of the last token is never computed in a turn that ends by its length limit.
        engine.expect(f"turn {place}: cached", reply.cached, max(history - 1, 0))
        history += len(prompt) + 12
        prompt, rid = ids(10, 2 + place), reply.meta["id"]


@in_groups("page16")
def test_k6_concurrent_sessions_leak_nothing(engine: Engine) -> None:
    for round in range(9):
        more = LOGPROB_MODES[round % 3]
        sessions = [engine.open() for _ in range(6)]
        for turn in range(5):
            calls = [
                lambda s=session, salt=10 * place + turn: engine.turn(s, ids(10, salt), 6, **more)
                for place, session in enumerate(sessions)
            ]
            for reply in run_together(*calls):
                assert reply.good().prompt == turn * 16 + 10, "prompt tokens"
        for session in sessions:
            engine.close(session)
    engine.until_used(0)
    healthy(engine)


@in_groups("retract")
def test_k7_sessions_and_plain_requests_under_stress(engine: Engine) -> None:
    sessions = [engine.open() for _ in range(8)]
    for turn in range(6):
        calls = [
            lambda s=session, salt=20 * place + turn: engine.turn(s, ids(220, salt), 16)
            for place, session in enumerate(sessions)
        ]
        calls += [
            lambda salt=200 + plain: engine.turn(None, ids(200, salt), 16) for plain in range(4)
        ]
        for reply in run_together(*calls):
            reply.good()
    for session in sessions:
        engine.close(session)
    for plain in range(3):
        engine.turn(None, ids(30, 240 + plain), 4).good()
    engine.until_used(0)
    healthy(engine)


def abort_all_of(engine: Engine, session: str, prompt: list[int]) -> Reply:
    """Runs a turn far longer than the test, aborts everything, and returns the turn's last
    event."""
    with engine.slow():
        flow = engine.flow(session, prompt, 900)
        assert flow.first().finish is None, "the end of a turn that runs"
        engine.abort(all=True)
        reply = flow.end()
    assert reply.finish["type"] == "abort", "how the aborted turn ended"
    return reply


@in_groups("page16", "page1")
def test_k8_k9_an_aborted_turn_leaves_no_trace(engine: Engine) -> None:
    session = engine.open()
    first = engine.turn(session, ids(40, 1), 20).good()
    abort_all_of(engine, session, ids(30, 2))
    third = engine.turn(session, [BOS, *ids(11, 3)], 4).good()
    # The engine removes the begin token of a later turn.
    assert third.prompt == first.prompt + first.completion + 11, "prompt tokens after the abort"
    healthy(engine)


@in_groups("page16", "page1")
def test_k10_an_aborted_first_turn_leaves_an_empty_session(engine: Engine) -> None:
    session = engine.open()
    abort_all_of(engine, session, ids(40, 1))
    second = engine.turn(session, [BOS, *ids(11, 2)], 4).good()
    assert second.prompt == 12, "prompt tokens: nothing inherited, the begin token kept"
    third = engine.turn(session, ids(5, 3), 4).good()
    assert third.prompt == 12 + 4 + 5, "prompt tokens of the turn after"
    healthy(engine)


@in_groups("page16")
def test_k11_a_refused_turn_keeps_the_slot(engine: Engine) -> None:
    session = engine.open()
    first = engine.turn(session, ids(40, 1), 20).good()
    refused = engine.generate({
        **body(ids(5, 2), 4), "session_params": {"id": session, "offset": 1},
    })
    assert refused.status == 400, "the status of a turn with an offset"
    third = engine.turn(session, ids(7, 3), 4).good()
    assert third.prompt == first.prompt + first.completion + 7, "prompt tokens"
    engine.expect("cached", third.cached, first.prompt + first.completion - 1)
    healthy(engine)


@in_groups("page256")
def test_k13_to_k16_aborts_under_chunked_prefill(engine: Engine) -> None:
    sessions = [engine.open() for _ in range(4)]
    for session in sessions:
        engine.turn(session, ids(8, 1), 4).good()
    for round in range(8):
        _k13_turns(engine, sessions, round)
        _k14_too_long(engine, sessions)
        recovery = [lambda s=s: engine.turn(s, ids(6, 3), 4) for s in sessions]
        for reply in run_together(*recovery):
            assert reply.good().cached > 0, f"the history was computed again: {reply}"
    healthy(engine)
    for session in sessions:
        engine.close(session)
    for plain in range(3):
        engine.turn(None, ids(30, 20 + plain), 4).good()
    engine.until_used(0)
    healthy(engine)


def _k13_turns(engine: Engine, sessions: list[str], round: int) -> None:
    calls: list[Any] = [lambda s=s: engine.turn(s, ids(6, 2), 4) for s in sessions]
    calls += [lambda salt=salt: engine.turn(None, ids(40, salt), 4) for salt in (30, 31)]
    for reply in run_together(*calls):
        reply.good()


def _k14_too_long(engine: Engine, sessions: list[str]) -> None:
    for reply in run_together(*[lambda s=s: engine.turn(s, ids(600, 4), 4) for s in sessions]):
        engine.expect("the status of a turn that is too long", reply.status, 400)
        words = ("maximum allowed length", "context length")
        assert any(word in reply.error for word in words), f"the refusal: {reply.error!r}"
