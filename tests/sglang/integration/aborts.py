"""Turns that their clients abort by their own names, through the router."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conformance.engine import Pending
from integration import wire
from integration.fleet import Fleet
from integration.processes import wait_until
from integration.turns import Pinned, Turn, body, chat_body, generate_at_engine, new_id

ENDLESS = 1000


@contextmanager
def slow(fleet: Fleet) -> Iterator[None]:
    wire.post(f"{fleet.engine_url}/slow_down", {"forward_sleep_time": 0.05})
    try:
        yield
    finally:
        wire.post(f"{fleet.engine_url}/slow_down", {"forward_sleep_time": 0})


def abort(fleet: Fleet, **request: Any) -> None:
    answer = wire.post(f"{fleet.router_url}/abort_request", request)
    assert (answer.status, answer.body) == (200, b""), f"the abort {request}"


def later(fleet: Fleet, path: str, request: dict, headers: dict | None = None) -> Pending:
    return Pending(lambda: wire.post(f"{fleet.router_url}{path}", request, headers))


def test_a_turn_is_aborted_by_its_clients_name(fleet: Fleet) -> None:
    before, rid = fleet.baseline(), new_id("mine")
    with slow(fleet):
        stream = wire.stream(
            f"{fleet.router_url}/generate", body("Endless.", ENDLESS, rid=rid, stream=True)
        )
        events = stream.events()
        next(events)
        abort(fleet, rid=rid)
        *_, last, done = events
    assert '"type":"abort"' in last.replace(" ", ""), f"the last event: {last}"
    assert done == "[DONE]", "the stream's end"
    assert fleet.wait_pool(before) == before, "the pool's use after the abort"


def test_each_route_ends_as_the_engine_ends_it(fleet: Fleet) -> None:
    with slow(fleet):
        rid = new_id("route")
        chat = chat_body("Endless.", ENDLESS, rid=rid)
        pending = later(fleet, "/v1/chat/completions", chat)
        fleet_runs(fleet, 1)
        abort(fleet, rid=rid)
        choice = pending.end().json()["choices"][0]
        assert choice["finish_reason"] == "abort", f"the chat: {choice}"

        # The engine's account shows a turn for a moment after its answer.
        fleet.pool_at_rest()
        rid = new_id("route")
        asked = {"model": "tiny", "input": "Endless.", "max_output_tokens": ENDLESS}
        asked |= {"request_id": rid, "temperature": 0}
        pending = later(fleet, "/v1/responses", asked)
        fleet_runs(fleet, 1)
        abort(fleet, rid=rid)
        answer = pending.end()
        assert answer.status in (200, 400, 500), f"the response: {answer}"
        fleet.pool_at_rest()


def test_the_prompts_of_a_list_have_names(fleet: Fleet) -> None:
    names = [new_id("a"), new_id("b")]
    request = body("", ENDLESS, rid=names) | {"text": ["One.", "Two."]}
    with slow(fleet):
        pending = later(fleet, "/generate", request)
        fleet_runs(fleet, 2)
        abort(fleet, rid=names[1])
        fleet_runs(fleet, 1)
        abort(fleet, rid=names)
        finishes = [turn["meta_info"]["finish_reason"]["type"] for turn in pending.end().json()]
    assert finishes == ["abort", "abort"], "how the prompts ended"


def test_a_message_is_cut_off_by_its_request_id(fleet: Fleet) -> None:
    rid = new_id("message")
    # Only the likeliest tokens never end an answer.
    request = {"model": "tiny", "max_tokens": ENDLESS, "stream": True, "temperature": 0}
    request["messages"] = [{"role": "user", "content": "Endless."}]
    with slow(fleet):
        url = f"{fleet.router_url}/v1/messages"
        stream = wire.stream(url, request, {"x-request-id": rid})
        next(stream.events())
        abort(fleet, rid=rid)
        try:
            raw = stream.rest()
        except (OSError, wire.http.client.HTTPException):
            raw = b""
        assert b"message_stop" not in raw, "it was not cut off"
        fleet.pool_at_rest()


def test_a_session_goes_on_after_an_abort(fleet: Fleet) -> None:
    session = Pinned(fleet)
    session.turn("Once upon a time.", 20)
    fleet.pool_at_rest()
    with slow(fleet):
        pending = later(
            fleet, "/generate",
            body(" And then?", ENDLESS, session_params={"id": session.id}, rid="then"),
        )
        fleet_runs(fleet, 1)
        abort(fleet, abort_all=True)
        finish = pending.end().json()["meta_info"]["finish_reason"]
    assert finish["type"] == "abort", f"how the turn ended: {finish}"
    # The engine may roll the aborted turn back to whole pages of the history.
    history, new = session.history, " The end."
    turn = Turn.from_answer(json.loads(session.send(new, 10).rest()))
    assert turn.prompt_tokens == len(history) + len(new), "the history without the aborted turn"
    assert turn.cached_tokens > len(history) - fleet.page_size, "cached tokens"
    assert turn.text == generate_at_engine(fleet, history + new, 10).text, "the answer"
    session.close()


def fleet_runs(fleet: Fleet, requests: int) -> None:
    """Waits until the engine runs so many requests."""
    def runs() -> bool:
        return sum(load["num_running_reqs"] for load in fleet.loads()) == requests

    wait_until(fleet.engine, f"running {requests} requests", runs, 30)
