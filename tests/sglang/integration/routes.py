"""Sends a full prompt by any of the engine's routes, streamed or not, and reads the answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from integration import wire
from integration.fleet import MODEL
from integration.trim_listener import ROOM

HEADER = "x-override-berth-trim"


@dataclass(frozen=True)
class Reply:
    # The engine gives no token counts for an empty message that is streamed; they are 0 then.
    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int


def mark(session: str, tokens_max: int = ROOM) -> dict[str, str]:
    """Returns the header that lets the shim trim a prompt to what the session doesn't have yet."""
    return {HEADER: f"{tokens_max} {session}"}


def send(
    url: str, api: str, body: dict, session: str | None = None, stream: bool = False,
    tokens_max: int = ROOM,
) -> Reply:
    """Sends the body by this route with greedy sampling. If a session is given, the prompt may
    be trimmed."""
    path, read = ROUTES[api]
    headers = mark(session, tokens_max) if session else {}
    fixed: dict[str, Any] = {"stream": stream}
    if api != "generate":
        fixed |= {"model": MODEL, "temperature": 0}
    if stream and api in ("chat", "completions"):
        fixed["stream_options"] = {"include_usage": True}
    if not stream:
        answer = wire.post(f"{url}{path}", fixed | body, headers)
        assert answer.status == 200, f"the status of {answer}"
        return read([answer.json()])
    streamed = wire.stream(f"{url}{path}", fixed | body, headers)
    assert streamed.status == 200, "the stream's status"
    events = [json.loads(event) for event in streamed.events() if event != "[DONE]"]
    for event in events:
        assert "error" not in event, f"an error in the stream: {event}"
    return read(events)


def _generate(events: list[dict]) -> Reply:
    last = events[-1]
    meta = last["meta_info"]
    counts = meta["prompt_tokens"], meta["cached_tokens"]
    return Reply(last["text"], meta["finish_reason"]["type"], *counts)


def _openai(events: list[dict], text_of: Callable[[dict], str | None]) -> Reply:
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(text_of(choice) or "" for choice in choices)
    [finish] = {choice["finish_reason"] for choice in choices if choice["finish_reason"]}
    usage = events[-1]["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return Reply(text, finish, usage["prompt_tokens"], details.get("cached_tokens", 0))


def _completions(events: list[dict]) -> Reply:
    return _openai(events, lambda choice: choice["text"])


def _chat(events: list[dict]) -> Reply:
    return _openai(
        events, lambda choice: (choice.get("message") or choice["delta"]).get("content")
    )


def _messages(events: list[dict]) -> Reply:
    if "content" in events[0]:
        [message] = events
        text = "".join(part.get("text", "") for part in message["content"])
        usage, finish = message["usage"], message["stop_reason"]
    else:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        text = "".join(delta.get("text", "") for delta in deltas)
        last = next(event for event in events if event["type"] == "message_delta")
        first = next(event for event in events if event["type"] == "message_start")
        usage = first["message"]["usage"] | {k: v for k, v in last["usage"].items() if v}
        finish = last["delta"]["stop_reason"]
    cached = usage.get("cache_read_input_tokens") or 0
    return Reply(text, finish, usage["input_tokens"] + cached, cached)


def _responses(events: list[dict]) -> Reply:
    # In a stream, the last event holds the whole response.
    response = events[-1].get("response") or events[-1]
    parts = [part for item in response["output"] for part in item.get("content") or []]
    text = "".join(part.get("text", "") for part in parts)
    usage = response["usage"]
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    prompt = usage.get("input_tokens", usage.get("prompt_tokens"))
    return Reply(text, response["status"], prompt, details.get("cached_tokens", 0))


ROUTES: dict[str, tuple[str, Callable[[list[dict]], Reply]]] = {
    "generate": ("/generate", _generate),
    "completions": ("/v1/completions", _completions),
    "chat": ("/v1/chat/completions", _chat),
    "messages": ("/v1/messages", _messages),
    "responses": ("/v1/responses", _responses),
}
