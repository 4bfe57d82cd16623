"""Responses that the engine stores, and aborts of the prompts of a list.

The router finds a stored response by the id that the agent has given it.
"""

from typing import Any

from conformance.engine import Engine, ids, new_id, sampling
from conformance.groups import in_groups
from integration import wire

MODEL = "tiny"


def respond(engine: Engine, **more: Any) -> wire.Answer:
    request = {"model": MODEL, "input": "hello", "max_output_tokens": 8, "temperature": 0}
    return engine.post("/v1/responses", {**request, **more})


def error(answer: wire.Answer) -> tuple[int, str | None]:
    """Returns the status and the parameter that a refusal names."""
    return answer.status, answer.json()["error"]["param"]


@in_groups("stored")
def test_a_response_is_stored_under_the_id_that_the_request_has(engine: Engine) -> None:
    id = new_id("resp_a")
    made = respond(engine, request_id=id)
    assert (made.status, made.json()["id"]) == (200, id), "the answer"
    found = engine.get(f"/v1/responses/{id}")
    assert (found.status, found.json()["id"]) == (200, id), "the stored response"
    assert found.json()["output"] == made.json()["output"], "the stored output"
    cancelled = engine.post(f"/v1/responses/{id}/cancel")
    status = made.json()["status"]
    assert (cancelled.status, cancelled.json()["status"]) == (200, status), "it has ended"


@in_groups("stored")
def test_a_streamed_response_is_stored_too(engine: Engine) -> None:
    id = new_id("resp_s")
    request = {"model": MODEL, "input": "hello", "max_output_tokens": 8, "request_id": id}
    stream = wire.stream(f"{engine.url}/v1/responses", {**request, "stream": True})
    assert stream.status == 200 and list(stream.events()), "the stream"
    assert engine.get(f"/v1/responses/{id}").json()["id"] == id, "the stored response"


@in_groups("stored")
def test_a_turn_continues_its_previous_response(engine: Engine) -> None:
    id = new_id("resp_p")
    first = respond(engine, request_id=id).json()["usage"]["input_tokens"]
    next = respond(engine, previous_response_id=id)
    assert next.status == 200, f"the status of {next}"
    assert next.json()["usage"]["input_tokens"] > first + 8, "the conversation is before it"


@in_groups("stored")
def test_what_is_not_stored_is_not_found(engine: Engine) -> None:
    id = new_id("resp_n")
    assert respond(engine, request_id=id, store=False).status == 200, "the turn"
    assert error(engine.get(f"/v1/responses/{id}")) == (404, "response_id"), "retrieve"
    assert error(engine.post(f"/v1/responses/{id}/cancel")) == (404, "response_id"), "cancel"
    assert error(respond(engine, previous_response_id=id)) == (404, "response_id"), "continue"
    assert error(engine.get("/v1/responses/other")) == (400, "response_id"), "another id"
    assert error(respond(engine, background=True, store=False)) == (400, "store"), "background"


@in_groups("stored")
def test_a_response_in_the_background_runs_on_after_its_answer(engine: Engine) -> None:
    id = new_id("resp_b")
    with engine.slow():
        made = respond(engine, request_id=id, background=True, max_output_tokens=400)
        assert (made.status, made.json()["status"]) == (200, "queued"), "the answer"
        path = f"/v1/responses/{id}"
        running = engine.get(path).json()["status"]
        assert running in ("queued", "in_progress"), "while it runs"
        cancelled = engine.post(f"{path}/cancel")
        assert (cancelled.status, cancelled.json()["status"]) == (200, "cancelled"), "the cancel"
    engine.until_idle()
    assert engine.get(path).json()["status"] == "cancelled", "it stays so"


@in_groups("page16")
def test_without_a_store_the_engine_names_the_flag(engine: Engine) -> None:
    assert respond(engine).status == 200, "a turn"
    for answer, param in (
        (engine.get("/v1/responses/resp_1"), "response_id"),
        (engine.post("/v1/responses/resp_1/cancel"), "response_id"),
        (respond(engine, previous_response_id="resp_1"), "previous_response_id"),
        (respond(engine, background=True), "background"),
    ):
        assert error(answer) == (400, param), f"the refusal of {param}"
        assert "--enable-response-store" in answer.json()["error"]["message"], param
    assert engine.post("/v1/responses/resp_1/input_items").status in (404, 405), "no such route"


@in_groups("page16")
def test_each_prompt_of_a_list_is_aborted_by_its_own_id(engine: Engine) -> None:
    base = new_id("batch")
    request = {"input_ids": [ids(10, 1), ids(10, 2)], "sampling_params": sampling(400), "rid": base}
    with engine.slow():
        pending = engine.generate_later(request)
        engine.until("both run", lambda: engine.load()["num_running_reqs"] == 2)
        # The engine has no request of this id, only one for each prompt.
        engine.abort(base)
        engine.abort(f"{base}_1")
        engine.until("one runs", lambda: engine.load()["num_running_reqs"] == 1)
        assert not pending.done(), "the first prompt's answer is awaited"
        engine.abort(f"{base}_0")
        reply = pending.end()
    finishes = [answer["meta_info"]["finish_reason"]["type"] for answer in reply.body]
    assert finishes == ["abort", "abort"], "how the prompts ended"
