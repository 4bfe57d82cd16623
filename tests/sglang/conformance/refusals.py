"""The error tables: what the engine refuses, with which message and in which form.

A turn is refused in one of three ways. If the scheduler refuses it, a one-token dummy runs in its
place, and a stream gets a 200 and a junk token. If it is refused before the scheduler, a stream
gets one event that holds the error. The third way is an unhandled exception.
"""

import json
from typing import Any

from conformance.engine import Engine, Flow, Reply, body, ids
from conformance.groups import CONTEXT_TOKENS, INPUT_TOKENS_MAX, in_groups
from integration import wire

OPEN = {"capacity_of_str_len": 1000, "streaming": True}
STILL_OPEN = "Failed to open the session. Check if a session with the same id is still open."
# The token that a refused turn returns when it is streamed.
JUNK_TOKEN = 296


def refused(engine: Engine, request: dict, message: str) -> None:
    """Checks both forms of a refusal: the plain error, and the stream, a 200 with a junk token."""
    plain = engine.generate(request)
    assert (plain.status, plain.error) == (400, message), "the refusal"
    streamed = Flow(wire.stream(f"{engine.url}/generate", {**request, "stream": True})).end()
    finish = {
        "type": "abort", "message": message, "status_code": 400, "err_type": "BadRequestError",
    }
    assert streamed.finish == finish, "the end of the refused stream"
    engine.expect("the junk tokens of the refused stream", len(streamed.output), 1)


def in_session(session: Any, **params: Any) -> dict:
    request = body(ids(5, 9), 4)
    return {**request, "session_params": {"id": session, **params}}


def validation(answer: wire.Answer, what: str) -> None:
    assert answer.status == 400, f"the status of {what}"
    error = answer.json()
    message = error.pop("message")
    expected = {"object": "error", "type": "Bad Request", "param": None, "code": 400}
    assert error == expected, f"the refusal of {what}"
    assert "validation error" in message, f"the refusal of {what}"


@in_groups("page16")
def test_an_open_of_an_open_id(engine: Engine) -> None:
    session = engine.open()
    again = engine.post("/open_session", {**OPEN, "session_id": session})
    found = (again.status, again.json())
    assert found == (400, {"error": {"message": STILL_OPEN}}), "the second open"


@in_groups("page16")
def test_an_open_with_fields_missing_or_ill_typed(engine: Engine) -> None:
    validation(engine.post("/open_session", {"streaming": True}), "an open without a capacity")
    validation(engine.post("/open_session", {**OPEN, "timeout": "abc"}), "a timeout in letters")
    validation(engine.post("/open_session", {**OPEN, "session_id": 7}), "an id that is a number")
    validation(engine.post("/close_session", {}), "a close without an id")


@in_groups("page16")
def test_an_open_with_odd_but_legal_fields(engine: Engine) -> None:
    empty = engine.post("/open_session", {"capacity_of_str_len": 0, "session_id": "", **OPEN})
    assert (empty.status, empty.json()) == (200, ""), "an open of the empty id"
    engine.close("")
    ignored = engine.post("/open_session", {**OPEN, "session_id": "odd", "colour": "red"})
    assert (ignored.status, ignored.json()) == (200, "odd"), "an open with an unknown field"
    engine.close("odd")
    got = wire.request("GET", f"{engine.url}/open_session", {**OPEN, "session_id": "got"})
    assert (got.status, got.json()) == (200, "got"), "an open by GET"
    engine.close("got")


@in_groups("tagged")
def test_a_streaming_open_without_the_flag(engine: Engine) -> None:
    answer = engine.post("/open_session", {**OPEN, "session_id": "s"})
    message = "Streaming sessions are disabled. Please relaunch with --enable-streaming-session."
    assert (answer.status, answer.json()) == (400, {"error": {"message": message}}), "the open"


@in_groups("page16")
def test_a_close_of_what_is_not_open(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(20, 1), 4).good()
    engine.close(session)
    engine.close(session)
    engine.close("never-opened")
    refused(engine, in_session(session), f"Invalid request: session id {session} does not exist")


@in_groups("page16", "page1")
def test_a_turn_in_an_unknown_session(engine: Engine) -> None:
    refused(engine, in_session("nope"), "Invalid request: session id nope does not exist")
    engine.until_used(0)


@in_groups("page16")
def test_a_turn_while_another_runs(engine: Engine) -> None:
    session = engine.open()
    with engine.slow():
        flow = engine.flow(session, ids(20, 1), 200)
        flow.first()
        reply = engine.generate(in_session(session))
        message = "Streaming session already has an active request."
        assert (reply.status, reply.error) == (400, message), "the overlap"
        engine.abort(all=True)
        flow.end()


@in_groups("page16")
def test_a_turn_while_a_close_waits(engine: Engine) -> None:
    session = engine.open()
    with engine.slow():
        flow = engine.flow(session, ids(20, 1), 200)
        flow.first()
        engine.close(session)
        closing = f"Invalid request: close was requested for session {session}"
        refused(engine, in_session(session), closing)
        again = engine.post("/open_session", {**OPEN, "session_id": session})
        assert (again.status, again.json()["error"]["message"]) == (400, STILL_OPEN), "the open"
        engine.abort(all=True)
        flow.end()


@in_groups("page16")
def test_what_streaming_sessions_do_not_support(engine: Engine) -> None:
    session = engine.open()
    first = engine.turn(session, ids(20, 1), 4).good()
    for key, value in (("replace", True), ("drop_previous_output", True), ("offset", 1)):
        refused(
            engine, in_session(session, **{key: value}),
            f"Streaming sessions do not support {key}.",
        )
    after = engine.generate(in_session(session, replace=False, offset=0, rid="anything")).good()
    assert after.prompt == first.prompt + first.completion + 5, "prompt tokens of the turn after"


@in_groups("page16", "page1")
def test_a_history_that_grows_too_long(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(600, 1), 20).good()
    long = {**body(ids(593, 2), 4), "session_params": {"id": session}}
    length = 620 + 593
    refused(
        engine, long,
        f"Input length ({length} tokens) exceeds the maximum allowed length "
        f"({INPUT_TOKENS_MAX} tokens). Use a shorter input or enable --allow-auto-truncate.",
    )
    after = engine.turn(session, ids(5, 3), 4).good()
    assert after.prompt == 625, "prompt tokens of the turn after"
    engine.expect("cached of the turn after", after.cached, 619)


@in_groups("page16")
def test_the_longest_prompt_there_is(engine: Engine) -> None:
    refused(
        engine, body(ids(INPUT_TOKENS_MAX, 1), 1),
        f"Input length ({INPUT_TOKENS_MAX} tokens) exceeds the maximum allowed length "
        f"({INPUT_TOKENS_MAX} tokens). Use a shorter input or enable --allow-auto-truncate.",
    )
    engine.turn(None, ids(INPUT_TOKENS_MAX - 1, 2), 1).good()


@in_groups("page16")
def test_a_delta_longer_than_the_context(engine: Engine) -> None:
    session = engine.open()
    reply = engine.turn(session, ids(1200, 1), 4)
    message = (
        f"The input (1200 tokens) is longer than the model's context length "
        f"({CONTEXT_TOKENS} tokens)."
    )
    assert (reply.status, reply.error) == (400, message), "the refusal"
    before_the_scheduler(engine, body(ids(1200, 1), 4, session), message)
    engine.turn(session, ids(5, 3), 4).good()


def before_the_scheduler(engine: Engine, request: dict, message: str) -> None:
    """Checks a stream whose request never reaches the scheduler: it has one event, an error."""
    answer = engine.post("/generate", {**request, "stream": True})
    events = [line for line in answer.body.decode().split("\n\n") if line]
    assert (answer.status, len(events), events[-1]) == (200, 2, "data: [DONE]"), "the stream"
    error = {
        "message": message, "type": "invalid_request_error", "code": 400, "retryable": False,
    }
    assert json.loads(events[0][5:]) == {"error": error}, "the event"


@in_groups("page16", "tagged")
def test_both_kinds_of_session_at_once(engine: Engine) -> None:
    request = {**in_session("a"), "session_id": "b"}
    message = "session_id and session_params cannot both be set."
    reply = engine.generate(request)
    assert (reply.status, reply.error) == (400, message), "the refusal"
    before_the_scheduler(engine, request, message)


@in_groups("page16")
def test_an_unknown_key_in_session_params(engine: Engine) -> None:
    session = engine.open()
    reply = engine.generate(in_session(session, bogus=1))
    assert (reply.status, reply.body) == (500, "Internal Server Error"), "the answer"
    assert engine.turn(session, ids(7, 3), 4).good().prompt == 7, "prompt tokens of the turn after"


@in_groups("page16")
def test_session_params_that_name_no_session(engine: Engine) -> None:
    for params in ({}, {"id": None}, None):
        reply = engine.generate({**body(ids(7, 1), 4), "session_params": params})
        assert reply.good().prompt == 7, f"prompt tokens with {params}"


@in_groups("page16")
def test_a_batch_in_one_session(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(20, 1), 4).good()
    request = {**body([], 200, session), "text": ["abc", "defgh"]}
    del request["input_ids"]
    with engine.slow():
        reply = engine.generate(request)
        message = "Streaming session already has an active request."
        assert (reply.status, reply.error) == (400, message), "the answer to the batch"
        # The first prompt of the batch ran all the same, and is aborted when the refusal comes
        # back.
        engine.until_idle()
    after = engine.turn(session, ids(5, 3), 4).good()
    assert after.prompt == 24 + 5, "prompt tokens of the turn after"


@in_groups("page16")
def test_an_empty_turn(engine: Engine) -> None:
    session = engine.open()
    refused(
        engine, body([], 4, session),
        "A session request must contain input tokens after restoring history.",
    )
    engine.turn(session, ids(20, 1), 4).good()
    reply = engine.turn(session, [], 4).good()
    assert (reply.prompt, reply.cached) == (24, 23), "prompt and cached tokens of an empty turn"
    without = engine.turn(None, [], 4)
    message = "input_ids cannot be empty."
    assert (without.status, without.error) == (400, message), "an empty prompt without a session"


@in_groups("page16")
def test_more_output_than_the_context_holds(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(600, 1), 4).good()
    # The check counts the request's own tokens only; with the history they exceed the context by
    # far.
    engine.turn(session, ids(20, 2), CONTEXT_TOKENS - 20).good()
    asked = CONTEXT_TOKENS - 19
    message = (
        f"Requested token count exceeds the model's maximum context length of {CONTEXT_TOKENS} "
        f"tokens. You requested a total of {asked + 20} tokens: 20 tokens from the input messages "
        f"and {asked} tokens for the completion. Please reduce the number of tokens in the input "
        f"messages or the completion to fit within the limit."
    )
    reply = engine.turn(None, ids(20, 3), asked)
    assert (reply.status, reply.error) == (400, message), "the refusal"
    before_the_scheduler(engine, body(ids(20, 3), asked), message)


@in_groups("page16")
def test_the_openai_routes_drop_session_params(engine: Engine) -> None:
    request = {
        "model": "tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": True,
        "session_params": {"id": "nope", "bogus": 1},
    }
    chat = engine.post(
        "/v1/chat/completions", {**request, "messages": [{"role": "user", "content": "hi"}]}
    )
    assert chat.status == 200, "the status of a chat"
    completion = engine.post("/v1/completions", {**request, "prompt": "abc"})
    assert completion.status == 200, "the status of a completion"
    assert completion.json()["usage"]["prompt_tokens"] == 3, "prompt tokens: no history"


@in_groups("page16")
def test_a_queued_abort_has_no_status_keys(engine: Engine) -> None:
    with engine.slow(0.2):
        running = [engine.pending(None, ids(10, salt), 200) for salt in range(8)]
        engine.until("all rows are taken", lambda: engine.load()["num_running_reqs"] == 8)
        queued = engine.pending(None, ids(10, 9), 10, rid="queued-one")
        engine.until_queued(1)
        engine.abort("queued-one")
        reply = queued.end()
        engine.abort(all=True)
        ended = [flow.end() for flow in running]
    assert (reply.status, reply.output) == (200, []), "the queued request's answer"
    assert reply.finish == {"type": "abort", "message": "Abort in waiting queue"}, "how it ended"
    for one in ended:
        _aborted(one)


def _aborted(reply: Reply) -> None:
    assert reply.status == 200, "the status of an aborted turn"
    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert reply.finish == finish, "how a running request ended"
