"""Reads answers of `/generate`, from Berth or from the engine, streamed or not."""

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from integration import wire as integration_wire
from soak.engine import chosen_logprobs

ABORTED = 499  # Shown for an aborted turn to which the engine gives no status.
BAD_REQUEST = 400
SMALL_BUFFER_BYTES = 4096  # The kernel's minimum, so that an unread stream backs up.


@dataclass(frozen=True)
class Call:
    """A request, ready to be sent."""

    url: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """An answer: a finished turn, a refusal by Berth, which has a code, or a refusal by the
    engine."""

    status: int
    code: str = ""
    message: str = ""
    finished: bool = False
    aborted: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def outcome(self) -> str:
        """The outcome as the report's table shows it."""
        return "finished" if self.finished else f"{self.status} {self.code or 'engine'}"


def read(status: int, raw: bytes) -> Reply:
    """Reads a whole answer."""
    try:
        answer = json.loads(raw)
    except ValueError:
        return Reply(status, message=raw[:200].decode(errors="replace"))
    if isinstance(answer, dict) and "meta_info" in answer:
        return _turn(status, answer)
    if not isinstance(answer, dict):
        return Reply(status, message=str(answer))
    if status == 200 and "error" in answer:
        # A stream that has begun carries a refusal from before the scheduler as an event.
        status = BAD_REQUEST
    error = answer.get("error", answer)
    error = error if isinstance(error, dict) else {"message": str(error)}
    code = error.get("code")
    # Berth's codes are texts; the engine's own are numbers.
    return Reply(status, code if isinstance(code, str) else "", str(error.get("message"))[:200])


def _turn(status: int, answer: dict[str, Any]) -> Reply:
    meta = answer["meta_info"]
    finish = meta["finish_reason"] or {}
    if finish.get("type") == "abort":
        # A stream has status 200 even if the turn was aborted with an error.
        status = finish.get("status_code") or ABORTED
        return Reply(status, message=str(finish.get("message"))[:200], aborted=True)
    return Reply(
        status,
        finished=finish.get("type") == "length",
        message=f"finish_reason {finish}",
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        output=tuple(answer["output_ids"]),
        logprobs=tuple(chosen_logprobs(meta)),
    )


def post(call: Call, seconds: float) -> Reply:
    answer = integration_wire.post(call.url, call.body, call.headers, seconds)
    return read(answer.status, answer.body)


def stream(call: Call, seconds: float, small_buffer: bool = False) -> integration_wire.Stream:
    """Returns when the head of the answer has arrived. No event may take longer than `seconds`."""
    body = {**call.body, "stream": True}
    if not small_buffer:
        return integration_wire.stream(call.url, body, call.headers, seconds)
    parts = urlsplit(call.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    connection.sock = socket.socket()
    connection.sock.settimeout(seconds)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    connection.sock.connect((parts.hostname, parts.port))
    headers = {"content-type": "application/json", **call.headers}
    connection.request("POST", parts.path, json.dumps(body).encode(), headers)
    return integration_wire.Stream(connection, connection.getresponse())


def read_to_end(stream: integration_wire.Stream, events: Iterator[str]) -> Reply:
    """Reads a stream that has begun to its end. Raises ConnectionError if it is cut off."""
    last = None
    for event in events:
        if event == "[DONE]":
            stream.close()
            return read(stream.status, (last or "{}").encode())
        last = event
    stream.close()
    raise ConnectionError(f"the stream ended without [DONE], after {str(last)[:100]}")
