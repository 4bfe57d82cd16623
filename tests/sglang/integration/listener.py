"""Takes the agent's place: accepts the connection of the engine's shim and decodes its frames.

It is written from the protocol's table in `worker-agent/src/shim/codec.rs`, and shares no code with
the shim.
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

import msgspec

VERSION = 9
# Messages come at once, or after some seconds on a loaded machine.
REPORTED_SECONDS_MAX = 60
HELLO_NAMES = (
    "pid dp_rank page_size total rows_total instance sglang shim inert undemotable unauditable "
    "unpublishable device page_bytes pin_safety"
).split()
HEAD_NAMES = (
    "total available evictable protected held uncached rows_total rows_free running waiting "
    "events_lost recounts samples samples_ns weight_changes has_old_kv host"
).split()
EVENTS = ("Opened", "Closed", "Committed", "Aborted")


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
    updates: int = 0
    sessions: dict[str, Session] = field(default_factory=dict)
    # The kind, the session and the values of each event, oldest first.
    events: list[tuple] = field(default_factory=list)
    # The number of complete tables.
    full_tables: int = 0
    # The answers to requests, by the number of the request: the session's refusal, which is empty
    # if it was demoted, or its state, which is None if the engine doesn't have it.
    answers: dict[int, Any] = field(default_factory=dict)
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
        self._requests = 0
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
        def find(state: ShimState) -> Session | None:
            session = state.sessions.get(id)
            return session if session and holds(session) else None

        return self.wait(f"{what} of {id}", find)

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
        return self._request("Demote", id)

    def prefetch(self, id: str, tokens_max: int = 1 << 20) -> tuple[int, str]:
        """Asks the shim to load the session's KV. Returns how many tokens it loads, or a refusal."""
        return self._request("Prefetch", id, tokens_max)

    def inspect(self, id: str) -> Session | None:
        """Asks the shim for the session's state. Returns None if the engine doesn't have it."""
        return self._request("Inspect", id)

    def _request(self, kind: str, id: str, *more: Any) -> Any:
        """Sends a request about a session, and returns its answer."""
        self._requests += 1
        number = self._requests
        self._command(kind, number, id, *more)
        self.wait(f"an answer to {kind} of {id}", lambda state: number in state.answers)
        return self.state.answers[number]

    def audit(self) -> SimpleNamespace:
        """Asks the shim for an audit of the pages. Returns its refusal, names and report."""
        number = len(self.state.audits) + 1
        self._command("Audit", number)
        return self.wait("an audit", lambda state: state.audits.get(number))

    def resync(self) -> ShimState:
        """Asks the shim for a full session table, and waits for it."""
        before = self.state.full_tables
        self._command("SampleNow")
        self.wait("a full table", lambda state: state.full_tables > before)
        return self.state

    def _command(self, *message: Any) -> None:
        body = msgspec.msgpack.encode(message)
        self._connection.sendall(struct.pack("<IB", 1 + len(body), VERSION) + body)

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
                        _apply(state, frame)
                        self._changed.notify_all()
        except AssertionError as error:
            state.broken = error
        except OSError:
            pass
        with self._changed:
            state.ended = True
            self._changed.notify_all()


def _apply(state: ShimState, frame: bytes) -> None:
    assert frame[0] == VERSION, f"the shim speaks version {frame[0]}"
    name, *fields = msgspec.msgpack.decode(frame[1:])
    assert (name == "Hello") == (state.hello is None), f"{name}, and hello: {state.hello}"
    if name == "Hello":
        state.hello = _named(HELLO_NAMES, fields)
    elif name == "Audited":
        number, (seconds, nanoseconds), refusal, names, report = fields
        spent_ns = seconds * 10**9 + nanoseconds
        state.audits[number] = SimpleNamespace(
            refusal=refusal or "", names=names, report=report, spent_ns=spent_ns
        )
    else:
        assert name == "Update", f"the shim sends the message {name}"
        _update(state, *fields)


def _named(names: list[str], fields: list[Any]) -> SimpleNamespace:
    """Returns the fields with their names. A missing reason is an empty text."""
    values = ("" if value is None else value for value in fields)
    return SimpleNamespace(**dict(zip(names, values, strict=True)))


def _update(
    state: ShimState, seq: int, facts: list | None, begins_table: bool, ends_table: bool,
    events: list, gone: list, sessions: list,
) -> None:
    assert seq == state.updates, f"update {seq} of the shim came where {state.updates} was due"
    state.updates += 1
    for name, *values in events:
        _event(state, name, values)
    if begins_table:
        state.sessions.clear()
    for id in gone:
        state.sessions.pop(id, None)
    for id, *values in sessions:
        state.sessions[id] = Session(*values)
    state.full_tables += ends_table
    # Without figures, the shim has not read all sessions of a full table.
    if facts is not None:
        head = _named([*HEAD_NAMES, "seq", "full"], [*facts, seq, begins_table])
        pool = head.available + head.evictable + head.protected + head.held + head.uncached
        assert pool == head.total, f"the pool's parts don't sum to it: {head}"
        state.head = head
        state.heads.append(head)


def _event(state: ShimState, name: str, values: list) -> None:
    if name == "Demoted":
        number, _id, refusal = values
        state.answers[number] = refusal or ""
    elif name == "Prefetched":
        number, _id, tokens, refusal = values
        state.answers[number] = (tokens, refusal or "")
    elif name == "Inspected":
        number, session = values
        state.answers[number] = session and Session(*session[1:])
    else:
        assert name in EVENTS, f"the shim sends the event {name}"
        state.events.append((name.lower(), *("" if value is None else value for value in values)))
