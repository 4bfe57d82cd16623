"""Turns on a real pair: a prefill and a decode engine with an agent each, behind a router.

The engines hand their KV over by Mooncake over TCP. The conformance suite has what they do without
Berth, and how they end when the other half dies; these tests ask for what clients see.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration import wire
from integration.fleet import CONTEXT_TOKENS, POOL_TOKENS, ROWS, Fleet, binaries, launch_engine
from integration.hand_off import DECODE_FLAGS, PREFILL_FLAGS, pair_env
from integration.processes import free_ports, shim_env, wait_until
from integration.turns import body, chat_body, finished_turn, last_turn, new_id, run_together

# How long an engine waits for the other half of a turn.
WAIT_SECONDS = 20
SETTLED_SECONDS_MAX = 30
SAID = "The harbour is quiet and the boats are home. "

pytestmark = pytest.mark.pairs


@dataclass
class Pair:
    """Each engine with its agent; the decode engine's fleet has the router too."""

    prefill: Fleet
    decode: Fleet
    bootstrap_port: int

    def post(self, path: str, request: dict, headers: dict | None = None) -> wire.Answer:
        return wire.post(f"{self.decode.router_url}{path}", request, headers)

    def direct(self, request: dict, room: int) -> str:
        """Returns the text that the engines answer when both get the request from a client."""
        request = {
            **request, "bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": room,
        }
        _, decoded = run_together(
            lambda: wire.post(f"{self.prefill.engine_url}/generate", request),
            lambda: wire.post(f"{self.decode.engine_url}/generate", request),
        )
        return finished_turn(decoded).text

    def until_nothing_is_held(self) -> None:
        """Waits until neither the engines nor the agents and the router have a turn."""
        def idle() -> bool:
            workers = wire.get(f"{self.decode.router_url}/v1/workers").json()["workers"]
            counts = [
                count for worker in workers
                for count in (worker["turns_in_flight_here"], worker["load"]["turns_running"])
            ]
            loads = [*self.prefill.loads(), *self.decode.loads()]
            held = [load["num_used_tokens"] + load["num_running_reqs"] for load in loads]
            return len(workers) == 2 and not any(counts) and not any(held)

        wait_until(self.decode.router, "free of turns", idle, SETTLED_SECONDS_MAX)


@pytest.fixture(scope="module")
def pair(pytestconfig: pytest.Config, folder: Path) -> Iterator[Pair]:
    programs, page_size = binaries(), pytestconfig.option.page_size
    ports = free_ports(3)
    halves = []
    for mode, port, flags in (
        ("prefill", ports[0], PREFILL_FLAGS), ("decode", ports[1], DECODE_FLAGS)
    ):
        place = folder / mode
        place.mkdir()
        half = Fleet(place, programs, page_size, worker=mode)
        half.engine_url = f"http://127.0.0.1:{port}"
        env = pair_env(WAIT_SECONDS)
        shim = shim_env(half.shim_socket, programs)
        shim["PYTHONPATH"] = f"{shim['PYTHONPATH']}:{env['PYTHONPATH']}"
        half.engine = launch_engine(place, port, [
            "--disaggregation-mode", mode, "--disaggregation-bootstrap-port", str(ports[2]),
            "--page-size", str(page_size), "--max-total-tokens", str(POOL_TOKENS),
            "--context-length", str(CONTEXT_TOKENS), "--max-running-requests", str(ROWS),
            *flags,
        ], {**env, **shim})
        halves.append(half)
    pair = Pair(*halves, ports[2])
    try:
        for half in halves:
            half.wait_engine()
            half.start_agent()
        pair.decode.start_router(pair.prefill)
        pair.decode.wait_placing()
        yield pair
    finally:
        for half in halves:
            half.stop()


def test_the_answer_is_the_engines_own(pair: Pair) -> None:
    request = body(SAID * 12, 24)
    expected = pair.direct(request, room=77)
    plain = pair.post("/generate", request)
    assert finished_turn(plain).text == expected, "a plain answer"
    shown = [plain.headers.get(name) for name in ("x-berth-prefill-worker", "x-berth-worker")]
    assert shown == ["prefill/0", "decode/0"], "who ran the turn"
    url = f"{pair.decode.router_url}/generate"
    streamed = last_turn(wire.stream(url, {**request, "stream": True}))
    assert streamed.text == expected, "a streamed answer"
    pair.until_nothing_is_held()


@pytest.mark.since("0.5.22", "the two engines of a pair take /v1/messages")
def test_the_apis_of_others_answer(pair: Pair) -> None:
    chat = pair.post("/v1/chat/completions", chat_body("Who is in?", 12)).json()
    text = chat["choices"][0]["message"]["content"]
    message = {"messages": [{"role": "user", "content": "Who is in?"}], "max_tokens": 12}
    tail = {"model": "tiny", "temperature": 0}
    answered = pair.post("/v1/messages", {**tail, **message}).json()
    assert answered["usage"]["output_tokens"] > 0, answered
    response = pair.post(
        "/v1/responses", {**tail, "input": "Who is in?", "max_output_tokens": 12, "store": False}
    ).json()
    assert response["status"] in ("completed", "incomplete"), response
    assert len(text) == 12, f"a token is a letter: {chat}"
    pair.until_nothing_is_held()


def test_a_session_stays_on_its_decode_engine_and_finds_its_prefix(pair: Pair) -> None:
    headers, history, cached = {"x-berth-session-id": new_id("pair")}, SAID * 10, []
    for _ in range(3):
        answer = pair.post("/generate", body(history, 16), headers)
        turn = finished_turn(answer)
        assert answer.headers["x-berth-worker"] == "decode/0", "the session's worker"
        cached.append(turn.cached_tokens)
        history += turn.text + " And then? "
    page = pair.decode.page_size
    assert cached[1] >= len(SAID * 10) - page and cached[2] > cached[1], cached


def test_log_probabilities_of_the_prompt_are_in_the_answer(pair: Pair) -> None:
    request = {**body("Two tugs are out.", 4), "return_logprob": True, "logprob_start_len": 0}
    meta = pair.post("/generate", request).json()["meta_info"]
    counts = [len(meta[f"{side}_token_logprobs"]) for side in ("input", "output")]
    assert counts == [len("Two tugs are out."), 4], "of the prompt and of the answer"


def test_a_client_that_leaves_ends_both_halves(pair: Pair) -> None:
    stream = wire.stream(
        f"{pair.decode.router_url}/generate", {**body(SAID, 1500), "stream": True}
    )
    assert json.loads(next(stream.events()))["text"], "the answer has begun"
    stream.vanish()
    pair.until_nothing_is_held()


def test_turns_side_by_side_are_each_answered(pair: Pair) -> None:
    alone = [pair.post("/generate", body(f"Ship {number}. " * 8, 12)) for number in range(6)]
    expected = [finished_turn(answer).text for answer in alone]
    together = run_together(*[
        lambda number=number: pair.post("/generate", body(f"Ship {number}. " * 8, 12))
        for number in range(6)
    ])
    assert [finished_turn(answer).text for answer in together] == expected, "the answers"
    pair.until_nothing_is_held()
