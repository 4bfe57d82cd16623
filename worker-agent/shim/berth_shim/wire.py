"""Encodes the shim's messages to the agent, and decodes the agent's commands. Pure, no I/O.

This is the protocol on the unix stream sockets between the shim, which is Berth's plugin in the
engine, and the agent beside the engine. One socket belongs to the shim in a scheduler process, and
reports the state of the KV pool and its sessions. The other belongs to the *trimmer*, the shim's
part in the process that tokenizes: it removes from a full prompt what the turn's session already
has.

A frame is a `u32` length of the rest (2 to FRAME_BYTES_MAX), a `u8` protocol version, a `u8` kind,
and the body. Integers are unsigned and little-endian; `str` is a `u16` length and that many bytes
of UTF-8; `bool` is one byte, 0 or 1; a list is a `u16` count and its items.

| kind | frame | direction | body |
|---|---|---|---|
| 1 | hello | to agent | the fields of the hello in the order below |
| 2 | update | to agent | the fields of `Head`, then three lists: events, ids of sessions that |
| | | | are gone, changed sessions |
| 3 | audit | to agent | number u64, nanoseconds u64, refusal str, list of names str, report |
| 4 | trimmer | to agent | pid u32, instance 16 bytes; sglang, shim, inert str each |
| 5 | planned | to agent | number u64; shared, committed, sent, prompt u32 each; plan u8; |
| | | | session, rid, why str each |
| 16 | demote | to shim | session str |
| 17 | sample now | to shim | nothing |
| 18 | audit | to shim | number u64 |
| 19 | republish | to shim | nothing |
| 20 | run | to shim | number u64, tokens u32, session str |

| field of hello | type | means |
|---|---|---|
| pid, dp_rank, page_size | u32 each | the scheduler's process, its rank, tokens per page |
| total, rows_total | u64, u32 | the pool in tokens; the rows of the request table |
| instance | 16 bytes | random number that identifies the engine process |
| sglang, shim | str each | versions |
| inert | str | why the shim does nothing; empty while it works |
| undemotable | str | why no session's KV can be moved into the radix tree; empty if it can be |
| unauditable | str | why the pool's pages can't be audited here; empty if they can be |
| unpublishable | str | why the radix tree can't be published again; empty if it can be |
| device | str | the device of the pool: a GPU's UUID as CUDA has it, else torch's device name |
| page_bytes | u64 | bytes of a page's KV on this rank, from its buffers; 0 if unknown |

An audit frame answers a page audit, which checks who holds each page of the KV pool. Its number is
that of the request, and its nanoseconds are the audit's time on the scheduler's thread. The report
is the unchanged output of `libberth_kv`. It numbers the sessions by their index in the list of
names. Numbers without a name are requests without a session, and sessions whose name isn't listed.
If the audit was refused, the frame has neither names nor a report.

The trimmer's socket has the path of the first socket with `.trim` appended. Frames 4, 5 and 20 are
sent only there, and the others only on the first socket. Frame 4 comes first; its `inert` says why
nothing is trimmed.

Frame 5 reports the trimmer's plan for a *marked* turn, which is a request that the agent asked to
trim. With the number 0 the plan is final. It is sent before the engine gets the turn, and exactly
once per turn:

- `plan` says how the turn runs: 1 trimmed, 2 retokenized, 3 diverged, 4 refused. The module `trim`
  explains these plans.
- `session` is the session that the plan is for, and `rid` the id of the turn.
- `shared` is the number of leading tokens that the prompt and the session share.
- `committed` is the session's length as the engine counts it, and `sent` the number of tokens to
  append. The engine counts `committed + sent` prompt tokens.
- `prompt` is the length of the whole prompt. If the prompt is too long for the session, it is at
  least the number of tokens that the engine would count.
- `why` is the reason of a refusal, and why a question didn't help.

A frame 5 with another number is a *question*: the trimmer asks where the turn may run, because
another session or more room in this one could help. The turn waits, and its final plan follows
later. Frame 20 answers the question with that number. It names an open streaming session to run the
turn in, and the maximum number of tokens of the prompt there. An empty name lets the turn run
unchanged.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

VERSION = 4
# The maximum of a frame's length field. The largest update has 256 events, 512 ids of sessions that
# are gone and 512 changed sessions, with names of 512 bytes. That is 0.8 MiB.
FRAME_BYTES_MAX = 1 << 20
# The maximum number of events in an update.
EVENTS_MAX = 256
# The maximum length of an update's list of sessions that are gone, and of changed sessions.
SESSIONS_MAX = 512
# The maximum bytes of a session's name. Sessions with longer names count in the sums, but are not
# listed. The names of Berth's sessions have at most 172 bytes, whatever ids clients choose. The
# agent's build checks that its names fit.
NAME_BYTES_MAX = 512
# The maximum number of names in an audit. So many names of NAME_BYTES_MAX bytes leave half a frame
# for the report.
AUDIT_NAMES_MAX = 1000
AUDIT_BYTES_MAX = FRAME_BYTES_MAX // 2

# The kinds of frames to the agent, and to the shim.
HELLO, UPDATE, AUDITED, TRIMMER, PLANNED = 1, 2, 3, 4, 5
DEMOTE, SAMPLE_NOW, AUDIT, REPUBLISH, RUN = 16, 17, 18, 19, 20
# The kinds of events.
OPENED, CLOSED, COMMITTED, ABORTED, DEMOTED = 1, 2, 3, 4, 5
# The flags of a session.
HOLDS_ROW, IN_FLIGHT, CLOSING = 1, 2, 4
# The values of `Planned.plan`.
TRIMMED, RETOKENIZED, DIVERGED, REFUSED = 1, 2, 3, 4

_PREFIX = struct.Struct("<IBB")
_HELLO = struct.Struct("<IIIQI16s")
_HEAD = struct.Struct("<QQQQQQQQQQQIIII?")
_SESSION = struct.Struct("<BIIII")
_COUNT = struct.Struct("<H")
_NUMBER = struct.Struct("<Q")
_TRIMMER = struct.Struct("<I16s")
_PLANNED = struct.Struct("<QIIIIB")
_RUN = struct.Struct("<QI")


class ProtocolError(Exception):
    """A frame that violates this protocol."""


class Hello(NamedTuple):
    """The first frame: the shim's identity and abilities."""

    pid: int
    dp_rank: int
    page_size: int
    total: int
    rows_total: int
    instance: bytes
    sglang: str
    shim: str
    inert: str
    undemotable: str
    unauditable: str
    unpublishable: str
    device: str
    page_bytes: int


class Head(NamedTuple):
    """The figures of an update, in the order of the protocol. The figures of the KV pool, which are
    `total` to `uncached`, count tokens."""

    seq: int
    events_lost: int
    samples: int
    samples_ns: int
    recounts: int
    total: int
    available: int
    evictable: int
    protected: int
    held: int
    uncached: int
    rows_total: int
    rows_free: int
    running: int
    waiting: int
    full: bool


class SessionFacts(NamedTuple):
    """The state of a session, in the order of the protocol. All but `flags` count tokens."""

    flags: int
    allocated: int
    committed: int
    protected: int
    history: int


class Planned(NamedTuple):
    """The plan for a marked turn, in the order of the protocol. The module's description explains
    the fields."""

    number: int
    shared: int
    committed: int
    sent: int
    prompt: int
    plan: int
    session: str
    rid: str
    why: str


class Run(NamedTuple):
    """The agent's answer to a question: where to run the turn."""

    # The number of the question.
    number: int
    tokens_max: int
    session: str


def is_nameable(id: Any) -> bool:
    """Whether the session's id can be sent: a text of at most NAME_BYTES_MAX bytes."""
    try:
        return isinstance(id, str) and len(id.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False


def _encode_str(text: str) -> bytes:
    """Encodes at most the first NAME_BYTES_MAX bytes of the text."""
    raw = text.encode(errors="replace")
    if len(raw) > NAME_BYTES_MAX:
        # Cut between characters, so that the rest is valid UTF-8.
        raw = raw[:NAME_BYTES_MAX].decode(errors="ignore").encode()
    return _COUNT.pack(len(raw)) + raw


def _encode_frame(kind: int, body: bytes) -> bytes:
    return _PREFIX.pack(len(body) + 2, VERSION, kind) + body


def encode_hello(hello: Hello) -> bytes:
    texts = b"".join(map(_encode_str, hello[6:13]))
    return _encode_frame(HELLO, _HELLO.pack(*hello[:6]) + texts + _NUMBER.pack(hello.page_bytes))


def encode_update(
    head: Head,
    events: Sequence[bytes],
    gone: Sequence[str],
    sessions: Sequence[tuple[str, SessionFacts]],
) -> bytes:
    """Encodes an update. `events` are encoded already and at most EVENTS_MAX. `gone` and `sessions`
    have at most SESSIONS_MAX items each."""
    parts = [_HEAD.pack(*head), _COUNT.pack(len(events)), *events, _COUNT.pack(len(gone))]
    parts += map(_encode_str, gone)
    parts.append(_COUNT.pack(len(sessions)))
    for id, facts in sessions:
        parts += (_encode_str(id), _SESSION.pack(*facts))
    return _encode_frame(UPDATE, b"".join(parts))


def encode_audit(
    number: int, spent_ns: int, refusal: str, names: Sequence[str], report: bytes
) -> bytes:
    """Encodes an audit with at most AUDIT_NAMES_MAX names and AUDIT_BYTES_MAX bytes of report."""
    parts = [_NUMBER.pack(number), _NUMBER.pack(spent_ns), _encode_str(refusal)]
    parts += [_COUNT.pack(len(names)), *map(_encode_str, names), report]
    return _encode_frame(AUDITED, b"".join(parts))


def encode_trimmer(pid: int, instance: bytes, sglang: str, shim: str, inert: str) -> bytes:
    texts = b"".join(map(_encode_str, (sglang, shim, inert)))
    return _encode_frame(TRIMMER, _TRIMMER.pack(pid, instance) + texts)


def encode_planned(planned: Planned) -> bytes:
    texts = b"".join(map(_encode_str, planned[6:]))
    return _encode_frame(PLANNED, _PLANNED.pack(*planned[:6]) + texts)


def _encode_event(kind: int, id: str, fields: bytes = b"") -> bytes:
    return bytes((kind,)) + _encode_str(id) + fields


def encode_opened(id: str, ok: bool) -> bytes:
    return _encode_event(OPENED, id, bytes((ok,)))


def encode_closed(id: str) -> bytes:
    return _encode_event(CLOSED, id)


def encode_committed(id: str, rid: str, history: int, retracted: bool) -> bytes:
    return _encode_event(COMMITTED, id, _encode_str(rid) + struct.pack("<I?", history, retracted))


def encode_aborted(id: str, released: bool) -> bytes:
    return _encode_event(ABORTED, id, bytes((released,)))


def encode_demoted(id: str, refusal: str) -> bytes:
    return _encode_event(DEMOTED, id, _encode_str(refusal))


def take_commands(buffer: bytearray) -> Iterable[tuple[int, Any]]:
    """Removes all complete frames from the front of the buffer. Yields the kind and the content of
    each: the session of a demotion, the number of an audit, a `Run`, or else an empty string."""
    while len(buffer) >= 4:
        length = int.from_bytes(buffer[:4], "little")
        if not 2 <= length <= FRAME_BYTES_MAX:
            raise ProtocolError(f"a frame of {length} bytes")
        if len(buffer) < 4 + length:
            return
        frame = bytes(buffer[4 : 4 + length])
        del buffer[: 4 + length]
        yield _decode_command(frame)


def _decode_command(frame: bytes) -> tuple[int, Any]:
    version, kind, body = frame[0], frame[1], frame[2:]
    if version != VERSION:
        raise ProtocolError(f"protocol version {version}")
    if kind in (SAMPLE_NOW, REPUBLISH) and not body:
        return kind, ""
    if kind == DEMOTE and _is_encoded_str(body):
        return kind, body[2:].decode(errors="replace")
    if kind == RUN and _is_encoded_str(body[_RUN.size :]):
        session = body[_RUN.size + 2 :].decode(errors="replace")
        return kind, Run(*_RUN.unpack(body[: _RUN.size]), session)
    if kind == AUDIT and len(body) == _NUMBER.size:
        return kind, _NUMBER.unpack(body)[0]
    raise ProtocolError(f"kind {kind} with {len(body)} bytes")


def _is_encoded_str(body: bytes) -> bool:
    return len(body) >= 2 and len(body) == 2 + int.from_bytes(body[:2], "little")
