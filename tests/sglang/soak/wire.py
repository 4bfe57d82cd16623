"""What the soak reads of an answer of `/generate`, whoever gave it and however it came."""

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lane import wire as lane_wire
from soak.engine import chosen_logprobs

ABORTED = 499  # Shown for a turn that the engine was told to abort: it has no status for that.
BAD_REQUEST = 400
SMALL_BUFFER_BYTES = 4096  # The least that the kernel grants: a stream that isn't read backs up.


@dataclass(frozen=True)
class Call:
    """A request, ready to be sent."""

    url: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """An answer: of a finished turn, a refusal by Berth (it has a code) or by the engine."""

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
        """For the table."""
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
        # What is refused before it is scheduled is an event of a stream that has begun.
        status = BAD_REQUEST
    error = answer.get("error", answer)
    error = error if isinstance(error, dict) else {"message": str(error)}
    code = error.get("code")
    # The engine's own codes are numbers.
    return Reply(status, code if isinstance(code, str) else "", str(error.get("message"))[:200])


def _turn(status: int, answer: dict[str, Any]) -> Reply:
    meta = answer["meta_info"]
    finish = meta["finish_reason"] or {}
    if finish.get("type") == "abort":
        # An error in a stream comes with status 200.
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
    answer = lane_wire.post(call.url, call.body, call.headers, seconds)
    return read(answer.status, answer.body)


def stream(call: Call, seconds: float, small_buffer: bool = False) -> lane_wire.Stream:
    """Returns when the answer's head is there. No event may take longer than `seconds`."""
    body = {**call.body, "stream": True}
    if not small_buffer:
        return lane_wire.stream(call.url, body, call.headers, seconds)
    parts = urlsplit(call.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    connection.sock = socket.socket()
    connection.sock.settimeout(seconds)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    connection.sock.connect((parts.hostname, parts.port))
    headers = {"content-type": "application/json", **call.headers}
    connection.request("POST", parts.path, json.dumps(body).encode(), headers)
    return lane_wire.Stream(connection, connection.getresponse())


def end_of(stream: lane_wire.Stream, events: Iterator[str]) -> Reply:
    """Reads a stream that has begun to its end. One that is cut off is no answer."""
    last = None
    for event in events:
        if event == "[DONE]":
            stream.close()
            return read(stream.status, (last or "{}").encode())
        last = event
    stream.close()
    raise ConnectionError(f"the stream ended without [DONE], after {str(last)[:100]}")
