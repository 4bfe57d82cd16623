"""What the tests send to the router, and what they expect of every answer.

The model makes the counts exact: a byte is a token, and an answer is visible ASCII. So the length
of a text is its length in tokens, and a history is its texts and answers joined in order.
"""

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from integration import wire
from integration.fleet import MODEL, Fleet

REPORTED_SECONDS_MAX = 30


@dataclass(frozen=True)
class Turn:
    """An answer of `/generate`."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    text: str
    output_ids: tuple[int, ...]
    finish: str
    rid: str

    @classmethod
    def from_answer(cls, answer: dict) -> "Turn":
        meta = answer["meta_info"]
        return cls(
            meta["prompt_tokens"],
            meta["cached_tokens"],
            meta["completion_tokens"],
            answer["text"],
            tuple(answer["output_ids"]),
            meta["finish_reason"]["type"],
            meta["id"],
        )


def new_id(what: str) -> str:
    """Returns a session id that no other test uses."""
    return f"{what}-{uuid.uuid4().hex[:8]}"


def sampling(tokens: int, **more: Any) -> dict:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def body(text: str, tokens: int, **more: Any) -> dict:
    """Returns a `/generate` request."""
    return {"text": text, "sampling_params": sampling(tokens), **more}


def chat_body(messages: list[dict] | str, tokens: int, **more: Any) -> dict:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    fixed = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": tokens}
    return {**fixed, "messages": messages, **more}


def chat_tokens(messages: list[dict]) -> int:
    """Returns the prompt's length in tokens under the model's chat template."""
    # The template adds to role and content: the begin token, a line end, the end token, a line end.
    said = sum(4 + len((m["role"] + m["content"]).encode()) for m in messages)
    return said + 1 + len("assistant\n")


def finished_turn(answer: wire.Answer) -> Turn:
    assert answer.status == 200, f"the status of {answer}"
    return Turn.from_answer(answer.json())


def last_turn(stream: wire.Stream) -> Turn:
    """Reads the stream to its end, which must be `[DONE]`. Returns the last event before it."""
    assert stream.status == 200, "the stream's status"
    events = list(stream.events())
    assert events and events[-1] == "[DONE]", f"the stream ended without [DONE]: {events[-1:]}"
    return Turn.from_answer(json.loads(events[-2]))


def generate(
    fleet: Fleet, text: str, tokens: int, headers: dict | None = None, **more: Any
) -> Turn:
    request = body(text, tokens, **more)
    return finished_turn(wire.post(f"{fleet.router_url}/generate", request, headers))


def generate_at_engine(fleet: Fleet, text: str, tokens: int) -> Turn:
    """Returns the engine's own answer to the text as one prompt. A session must give the same
    answer."""
    return finished_turn(wire.post(f"{fleet.engine_url}/generate", body(text, tokens)))


class Pinned:
    """A pinned session as a client holds it. Each turn sends only its new text, and is checked:
    the prompt has grown by exactly that text, nothing of the history was computed again, and the
    answer is the one to the full history."""

    def __init__(self, fleet: Fleet, id: str | None = None, **more: Any):
        self.fleet = fleet
        self.id = id or new_id("pinned")
        self.history = ""
        opened = open_session(fleet, session_id=self.id, retention="pinned", **more)
        assert opened["session_id"] == self.id, "the id of the session opened"

    def send(
        self, text: str, tokens: int, stream: bool = False, by_header: bool = False
    ) -> wire.Stream:
        """Sends a turn. Returns its answer while it is still arriving."""
        request, headers = body(text, tokens, stream=stream), {}
        if by_header:
            headers = {"x-berth-session-id": self.id, "x-berth-delta": "1"}
        else:
            request["session_params"] = {"id": self.id}
        return wire.stream(f"{self.fleet.router_url}/generate", request, headers)

    def turn(self, text: str, tokens: int, stream: bool = False, by_header: bool = False) -> Turn:
        answer = self.send(text, tokens, stream, by_header)
        if stream:
            turn = last_turn(answer)
        else:
            raw = answer.rest()
            assert answer.status == 200, f"the status of {raw[:500]!r}"
            turn = Turn.from_answer(json.loads(raw))
        self.check(text, tokens, turn)
        return turn

    def check(self, text: str, tokens: int, turn: Turn) -> None:
        """Checks the turn and adds it to the history."""
        before = len(self.history)
        assert turn.prompt_tokens == before + len(text), (
            "prompt tokens: the history and the new text"
        )
        assert turn.completion_tokens == tokens, "completion tokens"
        if before:
            # The last token of an answer never went through the model itself.
            assert turn.cached_tokens in (before - 1, before), "cached tokens: the full history"
        self.history += text
        assert turn.text == generate_at_engine(self.fleet, self.history, tokens).text, "the answer"
        self.history += turn.text

    def close(self) -> None:
        assert delete_session(self.fleet, self.id).status == 204, "the status of the close"


def open_session(fleet: Fleet, **request: Any) -> dict:
    answer = wire.post(f"{fleet.router_url}/v1/sessions", request)
    assert answer.status == 201, f"the status of {answer}"
    opened = answer.json()
    for key in ("session_id", "worker", "retention", "state"):
        assert key in opened, f"the answer to an open lacks {key!r}: {opened}"
    fleet.opened.append(opened["session_id"])
    return opened


def get_session(fleet: Fleet, id: str, headers: dict | None = None) -> wire.Answer:
    return wire.request("GET", f"{fleet.router_url}/v1/sessions/{id}", headers=headers)


def wait_session(fleet: Fleet, id: str, name: str, expected: Any) -> None:
    """Waits until the router shows `expected` as the session's `name`. The router gets it from the
    session's agent, so it lags."""
    deadline = time.monotonic() + REPORTED_SECONDS_MAX
    while (found := get_session(fleet, id).json().get(name)) != expected:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert found == expected, f"{name} of {id} {REPORTED_SECONDS_MAX} s later"


def delete_session(fleet: Fleet, id: str, headers: dict | None = None) -> wire.Answer:
    return wire.request("DELETE", f"{fleet.router_url}/v1/sessions/{id}", headers=headers)


def clean_up(fleet: Fleet) -> None:
    """Cleans up after a failed test, so that it makes no other test fail: the engine is fast
    again, and the test's sessions are closed."""
    try:
        wire.post(f"{fleet.engine_url}/slow_down", {"forward_sleep_time": 0}, seconds=5)
        for id in fleet.opened:
            wire.request("DELETE", f"{fleet.router_url}/v1/sessions/{id}", seconds=5)
            # Some tests open their sessions at the engine itself.
            wire.post(f"{fleet.engine_url}/close_session", {"session_id": id}, seconds=5)
    except OSError:
        pass  # A process that has ended holds nothing.


def refusal_code(answer: wire.Answer, status: int, what: str) -> str:
    """Checks that the refusal is Berth's own, by its form. Returns its code."""
    assert answer.status == status, f"the status of {what} ({answer})"
    error = answer.json().get("error")
    assert isinstance(error, dict), f"{what}: no error object in {answer}"
    for key in ("message", "type", "code"):
        assert isinstance(error.get(key), str) and error[key], f"{what}: no {key} in {answer}"
    code = error["code"]
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", code), f"{what}: the code is {code!r}"
    return code


@contextmanager
def slow_engine(fleet: Fleet, seconds: float = 0.03) -> Iterator[None]:
    """Makes every step of the engine `seconds` longer, so that a turn lasts long enough to act
    during it."""
    url = f"{fleet.engine_url}/slow_down"
    assert wire.post(url, {"forward_sleep_time": seconds}).status == 200, "slow_down"
    try:
        yield
    finally:
        restore_speed(fleet)


def restore_speed(fleet: Fleet) -> None:
    """Makes the engine fast again, once the test has done what needed a running turn."""
    url = f"{fleet.engine_url}/slow_down"
    assert wire.post(url, {"forward_sleep_time": 0}).status == 200, "slow_down off"


def is_running(fleet: Fleet) -> bool:
    """Returns whether a request runs in the engine, by the engine's own account."""
    return any(load["num_running_reqs"] for load in fleet.loads())


def run_together(*calls: Callable[[], Any]) -> list[Any]:
    """Runs the calls side by side, started together. Returns their results in order, or raises
    the first error."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []
    begin = threading.Barrier(len(calls))

    def work(place: int) -> None:
        try:
            begin.wait(60)
            results[place] = calls[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a turn hangs"
    if errors:
        raise errors[0]
    return results
