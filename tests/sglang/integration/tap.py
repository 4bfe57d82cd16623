"""A relay between the agent and the engine that records all bytes and can hold a message.

A test can compare the bytes on both sides of Berth exactly, and act while a request or an answer is
held.

The relay forwards data as it arrives, and the end of one side to the other side. It knows only as
much of HTTP as it needs to see where a message begins, and to split a connection's bytes into
exchanges afterwards.
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
    # The path of the newest request.
    path: str = ""


class Hold:
    """Holds the next request to a path, or the next answer from it, until the test decides."""

    def __init__(self, path: str, answer: bool):
        self.path = path
        self.answer = answer
        self._came = threading.Event()
        self._decided = threading.Event()
        self._passes = False

    def wait(self, seconds: float = 60) -> None:
        """Waits until the message has come."""
        what = "answer from" if self.answer else "request to"
        assert self._came.wait(seconds), f"no {what} {self.path} within {seconds} s"

    def has_come(self) -> bool:
        return self._came.is_set()

    def let_go(self) -> None:
        self._decide(passes=True)

    def drop(self) -> None:
        """Drops the message and ends its connection."""
        self._decide(passes=False)

    def _decide(self, passes: bool) -> None:
        if not self._decided.is_set():
            self._passes = passes
            self._decided.set()

    def mark_used(self) -> None:
        """Notes that the message has come. Called by the relay."""
        self._came.set()

    def keep(self) -> bool:
        """Waits for the test's decision, and returns whether to forward the message. Called by
        the relay."""
        self._decided.wait()
        return self._passes


class Tap:
    """Listens on a port of its own from its creation to `close`. While `hides_ends` is set, the
    engine isn't told that the agent has gone, so its turns run on."""

    def __init__(self, engine_url: str):
        self.connect_to(engine_url)
        self.hides_ends = False
        self._connections: list[_Connection] = []
        self._holds: list[Hold] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._begin_to_accept()
        self._port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def connect_to(self, engine_url: str) -> None:
        """Sets the engine to which new connections lead."""
        parts = urlsplit(engine_url)
        self._engine = (parts.hostname, parts.port)

    def hold_request(self, path: str) -> Hold:
        return self._hold(Hold(path, answer=False))

    def hold_answer(self, path: str) -> Hold:
        return self._hold(Hold(path, answer=True))

    def _hold(self, hold: Hold) -> Hold:
        with self._lock:
            self._holds.append(hold)
        return hold

    def let_all_go(self) -> None:
        """Lets all held messages go, and forgets all holds."""
        with self._lock:
            for hold in self._holds:
                hold.let_go()
            self._holds.clear()

    def close(self) -> None:
        self.let_all_go()
        self.refuse()
        self._listener.close()

    def refuse(self) -> None:
        """Ends every connection and accepts no more, as if the engine had gone."""
        # Without the shutdown, a thread that waits in `accept` would keep the socket open.
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # It accepts no more.
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                for side in (connection.client, connection.engine):
                    try:
                        side.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass  # It has ended already.
        # Bound, so that nothing else gets the port. It refuses connections all the same.
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self._port))

    def take_again(self) -> None:
        """Accepts connections again, on the same port."""
        self._listener.listen()
        self._begin_to_accept()

    def _begin_to_accept(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def exchanges(self, path: str) -> list[Exchange]:
        """Returns all complete exchanges on that path, in the order of their connections."""
        with self._lock:
            raw = [(bytes(c.asked), bytes(c.answered)) for c in self._connections]
        found = []
        for asked, answered in raw:
            pairs = zip(_split_messages(asked), _split_messages(answered))
            for (ask_head, ask_body), (answer_head, answer_body) in pairs:
                line = ask_head.split(b"\r\n", 1)[0].decode()
                if line.split(" ")[1].split("?")[0] == path:
                    status = int(answer_head.split(b" ", 2)[1])
                    found.append(Exchange(line, ask_body, status, answer_body))
        return found

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # Closed.
            try:
                engine = socket.create_connection(self._engine)
            except OSError:
                client.close()
                continue
            connection = _Connection(client, engine)
            with self._lock:
                self._connections.append(connection)
            for answers in (False, True):
                work = threading.Thread(
                    target=self._relay, args=(connection, answers), daemon=True
                )
                work.start()

    def _relay(self, connection: _Connection, answers: bool) -> None:
        source, target, kept = connection.client, connection.engine, connection.asked
        if answers:
            source, target, kept = connection.engine, connection.client, connection.answered
        try:
            while data := source.recv(65536):
                hold = self._hold_of(connection, data, answers)
                if hold and not hold.keep():
                    raise ConnectionAbortedError
                with self._lock:
                    kept += data
                try:
                    target.sendall(data)
                except OSError:
                    if not (answers and self.hides_ends):
                        raise
            if answers or not self.hides_ends:
                target.shutdown(socket.SHUT_WR)
        except OSError:
            if not answers and self.hides_ends:
                return
            for side in (source, target):
                try:
                    side.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def _hold_of(self, connection: _Connection, data: bytes, answers: bool) -> Hold | None:
        """Returns the hold for the message that begins with `data`, and marks it as used. The
        agent sends no request before the answer to the last one, so a message never begins
        within received data."""
        if answers and not data.startswith(b"HTTP/"):
            return None
        if not answers:
            if not data.startswith((b"POST /", b"GET /")):
                return None
            connection.path = data.split(b" ", 2)[1].split(b"?")[0].decode()
        with self._lock:
            for hold in self._holds:
                meant = hold.path == connection.path and hold.answer == answers
                if meant and not hold.has_come():
                    hold.mark_used()
                    return hold
        return None


def _split_messages(raw: bytes) -> list[tuple[bytes, bytes]]:
    """Splits the bytes of one direction of a connection into messages, each a head and a body.
    An unfinished message is left out."""
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
