"""HTTP for the tests: one request, and the exact bytes of its answer or the stream as it arrives.

There is no client library in between, so a test compares what was on the wire.
"""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    status: int
    headers: dict[str, str]  # Names are in lower case.
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)

    def __str__(self) -> str:
        return f"{self.status} {self.body[:500].decode(errors='replace')}"


class Stream:
    """An answer that is still arriving."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse):
        self._connection = connection
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.raw = b""

    def events(self) -> Iterator[str]:
        """Yields the data of the events, in order, `[DONE]` included."""
        while line := self._response.readline():
            self.raw += line
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()

    def rest(self) -> bytes:
        self.raw += self._response.read()
        return self.raw

    def vanish(self) -> None:
        """Resets the connection, as a client that has crashed does."""
        sock = self._connection.sock or self._response.fp.raw._sock
        linger_none = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_none)
        self._response.close()
        self._connection.close()

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def _connect(url: str, seconds: float) -> tuple[http.client.HTTPConnection, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    return connection, path


def _encode(body: Any) -> bytes | None:
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()


def request(
    method: str,
    url: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    seconds: float = 60,
) -> Answer:
    """Sends the body, as JSON unless it is bytes, and reads the whole answer."""
    connection, path = _connect(url, seconds)
    begin = time.monotonic()
    try:
        all_headers = {"content-type": "application/json", **(headers or {})}
        connection.request(method, path, _encode(body), all_headers)
        response = connection.getresponse()
        return Answer(
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
            time.monotonic() - begin,
        )
    finally:
        connection.close()


def post_unread(url: str, body: Any, seconds: float = 60) -> http.client.HTTPConnection:
    """Sends the body, and reads nothing. Returns the connection."""
    connection, path = _connect(url, seconds)
    connection.request("POST", path, _encode(body), {"content-type": "application/json"})
    return connection


def get(url: str, seconds: float = 60) -> Answer:
    return request("GET", url, seconds=seconds)


def post(url: str, body: Any = None, headers: dict[str, str] | None = None, seconds: float = 60) -> Answer:
    return request("POST", url, body, headers, seconds)


def stream(url: str, body: Any, headers: dict[str, str] | None = None, seconds: float = 60) -> Stream:
    """Sends a request, and returns when the head of the answer has arrived."""
    connection, path = _connect(url, seconds)
    all_headers = {"content-type": "application/json", **(headers or {})}
    connection.request("POST", path, _encode(body), all_headers)
    return Stream(connection, connection.getresponse())
