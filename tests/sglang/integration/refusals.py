"""Berth refuses what would harm a session or the engine, before it reaches the engine.

Each test ends with a turn whose counts are exact: nothing of what was refused got into the session,
and the engine lives.
"""

from typing import Any

from integration import wire
from integration.fleet import Fleet
from integration.turns import (
    Pinned,
    Turn,
    body,
    chat_body,
    delete_session,
    generate,
    get_session,
    is_running,
    last_turn,
    new_id,
    refusal_code,
    restore_speed,
    run_together,
    sampling,
    slow_engine,
)


def refuse_in_session(fleet: Fleet, cases: dict[str, dict], status: int = 400) -> None:
    """Sends each request as a turn of a pinned session with a history, streamed and not, and
    checks that Berth refuses it."""
    session = Pinned(fleet)
    session.turn("Who goes there?", 10)
    for what, request in cases.items():
        params = {"id": session.id} | request.get("session_params", {})
        for stream in (False, True):
            sent = {**request, "session_params": params, "stream": stream}
            answer = wire.post(f"{fleet.router_url}/generate", sent)
            refusal_code(answer, status, f"{what}, stream {stream}")
    session.turn(" A friend.", 10)
    session.close()


def test_batches_in_a_session(fleet: Fleet) -> None:
    limits = {"sampling_params": sampling(4)}
    refuse_in_session(fleet, {
        "a list of texts": {"text": ["one", "two"], **limits},
        "a list of one text": {"text": ["one"], **limits},
        "a list of lists of ids": {"input_ids": [[1, 2], [3, 4]], **limits},
        "a list of one list of ids": {"input_ids": [[1, 2]], **limits},
    })


def test_several_answers_in_a_session(fleet: Fleet) -> None:
    refuse_in_session(fleet, {
        "n = 2": {"text": "one", "sampling_params": sampling(4, n=2)},
        "a list of parameters": {"text": "one", "sampling_params": [sampling(4), sampling(4)]},
    })


def test_other_keys_of_session_params(fleet: Fleet) -> None:
    def params(**more: Any) -> dict:
        return body("one", 4, session_params=more)

    refuse_in_session(fleet, {
        "offset": params(offset=3),
        "replace": params(replace=True),
        "drop_previous_output": params(drop_previous_output=True),
        "an unknown key": params(bogus=1),
    })


# The last valid id is 319. An id outside the vocabulary ends the engine.
OUTSIDE = ([320], [5000], [-1], [5, 6, 320], [2**31], [2**63], [1.5])


def test_token_ids_outside_the_vocabulary(fleet: Fleet) -> None:
    for ids in OUTSIDE:
        request = {"input_ids": ids, "sampling_params": sampling(4)}
        refusal_code(wire.post(f"{fleet.router_url}/generate", request), 400, f"input_ids {ids}")
    assert generate(fleet, "Still here?", 4).prompt_tokens == 11, "prompt tokens"


def test_token_ids_outside_the_vocabulary_in_a_session(fleet: Fleet) -> None:
    limits = {"sampling_params": sampling(4)}
    refuse_in_session(fleet, {f"input_ids {ids}": {"input_ids": ids, **limits} for ids in OUTSIDE})


def test_token_ids_that_are_no_numbers(fleet: Fleet) -> None:
    # Either Berth or the engine refuses these.
    session = Pinned(fleet)
    session.turn("Who goes there?", 10)
    for ids in (["7"], [None], "7", {"7": 7}):
        params = {"session_params": {"id": session.id}}
        request = {"input_ids": ids, "sampling_params": sampling(4)}
        for what in (request, request | params):
            answer = wire.post(f"{fleet.router_url}/generate", what)
            assert answer.status == 400, f"input_ids {ids!r}: the status of {answer}"
    session.turn(" A friend.", 10)
    session.close()


def test_token_ids_outside_the_vocabulary_in_disguise(fleet: Fleet) -> None:
    hidden = (
        b'{"input_ids":[5],"input_ids":[5000],"sampling_params":{"max_new_tokens":2}}',
        b'{"input_ids":[5],"input\\u005fids":[5000],"sampling_params":{"max_new_tokens":2}}',
        b'{"input_ids":[[5],[5000]],"sampling_params":{"max_new_tokens":2}}',
    )
    for request in hidden:
        refusal_code(wire.post(f"{fleet.router_url}/generate", request), 400, repr(request))
    # The engine accepts a prompt of token ids on this route too.
    for prompt in ([5000], [[5], [5000]]):
        request = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
        answer = wire.post(f"{fleet.router_url}/v1/completions", request)
        refusal_code(answer, 400, f"prompt {prompt}")
    assert generate(fleet, "Still here?", 4).prompt_tokens == 11, "prompt tokens"


def test_malformed_json(fleet: Fleet) -> None:
    session = Pinned(fleet)
    session.turn("Who goes there?", 10)
    headers = {"x-berth-session-id": session.id, "x-berth-delta": "1"}
    for raw in (b"", b"{", b'{"text": "abc', b"nonsense", b'{"text":"a",}', b"\xff\xfe"):
        for path in ("/generate", "/v1/chat/completions"):
            answer = wire.post(fleet.router_url + path, raw)
            assert answer.status == 400, f"{path} {raw!r}: the status of {answer}"
        answer = wire.post(f"{fleet.router_url}/generate", raw, headers)
        refusal_code(answer, 400, f"{raw!r} in a session")
    session.turn(" A friend.", 10)
    session.close()


def test_sessions_that_are_not_there(fleet: Fleet) -> None:
    id = new_id("never")
    refusal_code(get_session(fleet, id), 404, "GET")
    refusal_code(delete_session(fleet, id), 404, "DELETE")


def test_a_session_id_of_more_than_256_bytes(fleet: Fleet) -> None:
    router = fleet.router_url
    for id in ("x" * 257, "ä" * 129):
        opened = wire.post(f"{router}/v1/sessions", {"session_id": id, "retention": "pinned"})
        refusal_code(opened, 400, "POST /v1/sessions")
        answer = wire.post(f"{router}/generate", body("a", 2, session_id=id))
        refusal_code(answer, 400, "session_id")
        in_params = body("a", 2, session_params={"id": id})
        refusal_code(wire.post(f"{router}/generate", in_params), 400, "session_params.id")
    answer = wire.post(f"{router}/generate", body("a", 2), {"x-berth-session-id": "x" * 257})
    refusal_code(answer, 400, "x-berth-session-id")
    # The longest id that is allowed works.
    session = Pinned(fleet, "y" * 256)
    session.turn("Just so.", 4)
    session.close()


def test_a_full_history_on_a_pinned_session(fleet: Fleet) -> None:
    session = Pinned(fleet)
    session.turn("Who goes there?", 10)
    headers = {"x-berth-session-id": session.id}
    completion = {"model": "tiny", "prompt": "Who goes there?", "max_tokens": 4}
    for path, request in (
        ("/v1/chat/completions", chat_body("Who goes there?", 4)),
        ("/v1/completions", completion),
        ("/generate", body("Who goes there?", 4)),
    ):
        refusal_code(wire.post(fleet.router_url + path, request, headers), 409, path)
    session.turn(" A friend.", 10)
    session.close()


def test_a_second_turn_while_one_runs(fleet: Fleet) -> None:
    session = Pinned(fleet)
    session.turn("Who goes there?", 10)
    request = body(" Me too!", 4, session_params={"id": session.id})
    with slow_engine(fleet, 0.1):
        text = " Take your time."
        running = session.send(text, 80, stream=True)
        events = running.events()
        next(events)
        # Without Berth, the engine refuses the second turn and runs the third on the first one's
        # KV.
        for place in ("second", "third", "fourth"):
            answer = wire.post(f"{fleet.router_url}/generate", request)
            refusal_code(answer, 409, f"the {place} turn")
            assert is_running(fleet), f"the {place} turn waited before it was refused"
        restore_speed(fleet)
        session.check(text, 80, last_turn(running))
    session.turn(" A friend.", 10)
    session.close()


def test_a_second_turn_while_one_runs_unstreamed(fleet: Fleet) -> None:
    # Two first turns of a session that reach the engine at once would end it.
    session = Pinned(fleet)
    request = body("Hello.", 100, session_params={"id": session.id})
    with slow_engine(fleet, 0.1):
        answers = run_together(*[lambda: wire.post(f"{fleet.router_url}/generate", request)] * 3)
    assert sorted(answer.status for answer in answers) == [200, 409, 409], "the statuses"
    for answer in answers:
        if answer.status == 200:
            session.check("Hello.", 100, Turn.from_answer(answer.json()))
        else:
            refusal_code(answer, 409, "an overlapping first turn")
    session.turn(" And again.", 10)
    session.close()
