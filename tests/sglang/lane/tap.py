"""A relay between the agent and the engine that keeps what goes by, so that a test can compare the
bytes on both sides of Berth exactly.

It passes on what it gets as it gets it, and a side's end to the other side. It knows of HTTP only
what it takes to cut a connection's bytes into exchanges afterwards.
"""

import socket
import threading
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Exchange:
    request_line: str
    request_body: bytes
    status: int
    answer_body: bytes


@dataclass
class _Connection:
    client: socket.socket
    engine: socket.socket
    asked: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)


class Tap:
    """Listens on a port of its own from the start to `close`."""

    def __init__(self, engine_url: str):
        parts = urlsplit(engine_url)
        self._engine = (parts.hostname, parts.port)
        self._connections: list[_Connection] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                for side in (connection.client, connection.engine):
                    side.close()

    def exchanges(self, path: str) -> list[Exchange]:
        """All that is complete on that path, in the order of their connections."""
        with self._lock:
            raw = [(bytes(c.asked), bytes(c.answered)) for c in self._connections]
        found = []
        for asked, answered in raw:
            for (ask_head, ask_body), (answer_head, answer_body) in zip(_cut(asked), _cut(answered)):
                line = ask_head.split(b"\r\n", 1)[0].decode()
                if line.split(" ")[1].split("?")[0] == path:
                    status = int(answer_head.split(b" ", 2)[1])
                    found.append(Exchange(line, ask_body, status, answer_body))
        return found

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                engine = socket.create_connection(self._engine)
            except OSError:
                if self._listener.fileno() < 0:
                    return
                client.close()
                continue
            connection = _Connection(client, engine)
            with self._lock:
                self._connections.append(connection)
            for source, target, kept in (
                (client, engine, connection.asked),
                (engine, client, connection.answered),
            ):
                work = threading.Thread(
                    target=self._relay, args=(source, target, kept), daemon=True
                )
                work.start()

    def _relay(self, source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        try:
            while data := source.recv(65536):
                with self._lock:
                    kept += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for side in (source, target):
                try:
                    side.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


def _cut(raw: bytes) -> list[tuple[bytes, bytes]]:
    """The messages of one direction of a connection, as head and body; an unfinished one is left
    out."""
    messages = []
    while raw:
        head, found, raw = raw.partition(b"\r\n\r\n")
        if not found:
            break
        names = dict(
            line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line
        )
        if names.get(b"transfer-encoding") == b"chunked":
            body, raw, whole = _unchunk(raw)
        else:
            length = int(names.get(b"content-length", 0))
            body, raw, whole = raw[:length], raw[length:], len(raw) >= length
        if not whole:
            break
        messages.append((head, body))
    return messages


def _unchunk(raw: bytes) -> tuple[bytes, bytes, bool]:
    body = b""
    while True:
        size, found, rest = raw.partition(b"\r\n")
        if not found:
            return body, b"", False
        length = int(size.split(b";")[0], 16)
        if len(rest) < length + 2:
            return body, b"", False
        body, raw = body + rest[:length], rest[length + 2 :]
        if length == 0:
            return body, raw, True
