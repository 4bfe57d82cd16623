"""Takes the agent's place: accepts the connection of the engine's shim and decodes its frames.

It is written from the protocol's table in `worker-agent/shim/berth_shim/wire.py`, and shares no
code with the shim.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VERSION = 4
# Messages come at once, or after some seconds on a loaded machine.
REPORTED_SECONDS_MAX = 60
HEAD_NAMES = (
    "seq events_lost samples samples_ns recounts total available evictable protected held uncached"
).split()
ROW_NAMES = "rows_total rows_free running waiting".split()


class _Reader:
    def __init__(self, frame: bytes):
        self.frame = frame
        self.at = 0

    def take(self, size: int) -> bytes:
        assert self.at + size <= len(self.frame), "a frame of the shim is too short"
        self.at += size
        return self.frame[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self) -> str:
        return self.take(self.number(2)).decode()

    def flag(self) -> bool:
        value = self.number(1)
        assert value in (0, 1), f"a bool of the shim is {value}"
        return bool(value)

    def rest(self) -> bytes:
        return self.take(len(self.frame) - self.at)

    def end(self) -> None:
        assert self.at == len(self.frame), "a frame of the shim is too long"


@dataclass(frozen=True)
class Session:
    """A session's state as the shim reports it."""

    holds_row: bool
    in_flight: bool
    closing: bool
    allocated: int
    committed: int
    protected: int
    history: int


@dataclass
class ShimState:
    """Everything that one connection has reported so far."""

    hello: SimpleNamespace | None = None
    head: SimpleNamespace | None = None
    heads: list[SimpleNamespace] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)
    # The kind, the session and the values of each event, oldest first.
    events: list[tuple] = field(default_factory=list)
    full_tables: int = 0
    # The audit reports, by the number of the request for them.
    audits: dict[int, SimpleNamespace] = field(default_factory=dict)
    ended: bool = False
    broken: BaseException | None = None


class Listener:
    """Listens at the path, for one shim at a time; `told` belongs to the newest connection. A
    deaf listener accepts the connection, but reads nothing until `hear` is called."""

    def __init__(self, path: Path, deaf: bool = False):
        self._path = path
        self._hears = threading.Event()
        if not deaf:
            self._hears.set()
        path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen(4)
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self.state = ShimState()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self._hears.set()
        self._path.unlink(missing_ok=True)
        for each in (self._listening, self._connection):
            if each:
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                each.close()

    def resume_reading(self) -> None:
        self._hears.set()

    def connected(self, seconds: float = REPORTED_SECONDS_MAX) -> None:
        """Waits until the shim has connected; a deaf listener can wait for it too."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._connection, seconds)
        assert came, f"no shim has connected within {seconds} s"

    def wait(
        self, what: str, holds: Callable[[ShimState], Any], seconds: float = REPORTED_SECONDS_MAX
    ) -> Any:
        """Waits until `holds` returns a true value for all that was told, and returns that
        value."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                state = self.state
                if state.broken:
                    raise state.broken
                if found := holds(state):
                    return found
                left = deadline - time.monotonic()
                assert left > 0, f"not reported within {seconds} s: {what}; last: {state.head}, " \
                    f"{state.sessions}, {state.events[-5:]}"
                self._changed.wait(left)

    def session(self, id: str, what: str, holds: Callable[[Session], Any]) -> Session:
        """Waits until `holds` is true for the session's state, and returns the state."""
        self.wait(
            f"{what} of {id}", lambda state: id in state.sessions and holds(state.sessions[id])
        )
        return self.state.sessions[id]

    def event(self, kind: str, id: str) -> tuple:
        """Waits for an event of the session, removes it from the list, and returns its values."""
        def find(state: ShimState) -> tuple | None:
            return next((event for event in state.events if event[:2] == (kind, id)), None)

        found = self.wait(f"{kind} of {id}", find)
        with self._changed:
            self.state.events.remove(found)
        return found[2:]

    def demote(self, id: str) -> str:
        """Asks the shim to demote the session. Returns its refusal, which is empty if it did."""
        raw = id.encode()
        self._command(16, struct.pack("<H", len(raw)) + raw)
        return self.event("demoted", id)[0]

    def audit(self) -> SimpleNamespace:
        """Asks the shim for an audit of the pages. Returns its refusal, names and report."""
        number = len(self.state.audits) + 1
        self._command(18, struct.pack("<Q", number))
        return self.wait("an audit", lambda state: state.audits.get(number))

    def resync(self) -> ShimState:
        """Asks the shim for a full session table, and waits for it."""
        before = self.state.full_tables
        self._command(17, b"")
        self.wait("a full table", lambda state: state.full_tables > before)
        return self.state

    def _command(self, kind: int, body: bytes) -> None:
        self._connection.sendall(struct.pack("<IBB", 2 + len(body), VERSION, kind) + body)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            state = ShimState()
            with self._changed:
                self._connection, self.state = connection, state
                self._changed.notify_all()
            threading.Thread(target=self._read, args=(connection, state), daemon=True).start()

    def _read(self, connection: socket.socket, state: ShimState) -> None:
        self._hears.wait()
        try:
            with connection.makefile("rb") as stream:
                while len(prefix := stream.read(4)) == 4:
                    frame = stream.read(int.from_bytes(prefix, "little"))
                    with self._changed:
                        _apply(state, _Reader(frame))
                        self._changed.notify_all()
        except AssertionError as error:
            state.broken = error
        except OSError:
            pass
        with self._changed:
            state.ended = True
            self._changed.notify_all()


def _apply(state: ShimState, frame: _Reader) -> None:
    version, kind = frame.number(1), frame.number(1)
    assert version == VERSION, f"the shim speaks version {version}"
    assert (kind == 1) == (state.hello is None), f"frame {kind} and hello: {state.hello}"
    if kind == 1:
        state.hello = SimpleNamespace(
            pid=frame.number(4), dp_rank=frame.number(4), page_size=frame.number(4),
            total=frame.number(8), rows_total=frame.number(4), instance=frame.take(16),
            sglang=frame.text(), shim=frame.text(), inert=frame.text(), undemotable=frame.text(),
            unauditable=frame.text(), unpublishable=frame.text(), device=frame.text(),
            page_bytes=frame.number(8),
        )
    elif kind == 3:
        number, spent_ns, refusal = frame.number(8), frame.number(8), frame.text()
        names = [frame.text() for _ in range(frame.number(2))]
        state.audits[number] = SimpleNamespace(
            refusal=refusal, names=names, report=frame.rest(), spent_ns=spent_ns
        )
    else:
        assert kind == 2, f"the shim sends a frame of kind {kind}"
        _update(state, frame)
    frame.end()


def _update(state: ShimState, frame: _Reader) -> None:
    values = {name: frame.number(8) for name in HEAD_NAMES}
    values |= {name: frame.number(4) for name in ROW_NAMES}
    head = SimpleNamespace(**values, full=frame.flag())
    expected = state.head.seq + 1 if state.head else 0
    assert head.seq == expected, f"update {head.seq} of the shim came where {expected} was due"
    pool = head.available + head.evictable + head.protected + head.held + head.uncached
    assert pool == head.total, f"the pool's parts don't sum to it: {head}"
    state.events += [_event(frame) for _ in range(frame.number(2))]
    if head.full:
        state.full_tables += 1
        state.sessions.clear()
    for _ in range(frame.number(2)):
        state.sessions.pop(frame.text(), None)
    for _ in range(frame.number(2)):
        id, flags = frame.text(), frame.number(1)
        assert flags < 8, f"unknown flags {flags}"
        state.sessions[id] = Session(
            bool(flags & 1), bool(flags & 2), bool(flags & 4),
            *(frame.number(4) for _ in range(4)),
        )
    state.head = head
    state.heads.append(head)


def _event(frame: _Reader) -> tuple:
    number, id = frame.number(1), frame.text()
    if number == 1:
        return ("opened", id, frame.flag())
    if number == 2:
        return ("closed", id)
    if number == 3:
        return ("committed", id, frame.text(), frame.number(4), frame.flag())
    if number == 4:
        return ("aborted", id, frame.flag())
    assert number == 5, f"the shim sends an event of number {number}"
    return ("demoted", id, frame.text())
