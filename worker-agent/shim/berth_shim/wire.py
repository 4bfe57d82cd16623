"""The protocol between the shim and the agent: frames on a unix stream socket. Pure, no I/O.

A frame is a `u32` length of the rest (2 to FRAME_BYTES_MAX), a `u8` protocol version, a `u8` kind,
and the body. Integers are unsigned and little-endian; `str` is a `u16` length and that many bytes
of UTF-8; `bool` is one byte, 0 or 1; a list is a `u16` count and its items.

| kind | frame | direction | body |
|---|---|---|---|
| 1 | hello | to agent | the fields of the hello in the order below |
| 2 | update | to agent | the fields of the head, then the lists of events, gone ids, sessions |
| 3 | audit | to agent | number u64, nanoseconds u64, refusal str, list of names str, report |
| 4 | trimmer | to agent | pid u32, instance 16 bytes; sglang, shim, inert str each |
| 5 | planned | to agent | number u64; at, committed, sent, prompt u32 each; plan u8; |
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
| instance | 16 bytes | random token of the engine process |
| sglang, shim | str each | versions |
| inert | str | why the shim reads nothing; empty while it works |
| undemotable | str | why no session can be demoted here; empty if sessions can be |
| unauditable | str | why the pool's pages can't be audited here; empty if they can be |
| unpublishable | str | why the radix tree can't be published again; empty if it can be |
| device | str | the device of the pool: a GPU's UUID as CUDA has it, else torch's device name |
| page_bytes | u64 | bytes of a page's KV on this rank, from its buffers; 0 if unknown |

An audit has the number of the request it answers; the nanoseconds are its time on the scheduler's
thread. Its report is the unchanged output of `libberth_kv`: a session's number in it is its index
in the names, and a number without a name is a turn without a session. An audit with a refusal has
neither names nor a report.

The process that tokenizes has a socket of its own, whose path ends in `.trim`. Frames 4, 5 and 20
are sent only there, the others only on the first socket. Frame 4 comes first; its `inert` says why
nothing is trimmed. Frame 5 reports the plan of a marked turn before the engine gets the turn,
exactly once per turn with the number 0:

- `plan` is 1 trimmed, 2 retokenized (`RETOKENIZED`), 3 diverged, 4 refused.
- `session` is the session that the plan is for.
- `at` is the number of leading tokens that the prompt and the session share.
- `committed` is the session's length as the engine counts it, and `sent` the number of tokens to
  append. The engine counts `committed + sent` prompt tokens.
- `prompt` is the length of the whole prompt, or what the engine would count if that is too long.
- `why` is the reason of a refusal, and why a question didn't help.

A frame 5 with another number is a question: another session, or more room in this one, could help
the turn. The final plan follows later. Frame 20 answers the question. It has the open streaming
session to run the turn in and the maximum number of tokens of its prompt there, or an empty name to
let the turn run unchanged.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

VERSION = 4
# A full update: 256 events, 512 ids and 512 sessions of 512 byte names are 0.8 MiB.
FRAME_BYTES_MAX = 1 << 20
EVENTS_MAX = 256
SESSIONS_MAX = 512
# Sessions with longer names are included in the sums, but not listed. Berth's own names have at
# most 172 bytes, whatever ids clients choose; the agent's build checks that they fit.
NAME_BYTES_MAX = 512
# This many names of that length leave half a frame for the report.
AUDIT_NAMES_MAX = 1000
AUDIT_BYTES_MAX = FRAME_BYTES_MAX // 2

HELLO, UPDATE, AUDITED, TRIMMER, PLANNED = 1, 2, 3, 4, 5
DEMOTE, SAMPLE_NOW, AUDIT, REPUBLISH, RUN = 16, 17, 18, 19, 20
OPENED, CLOSED, COMMITTED, ABORTED, DEMOTED = 1, 2, 3, 4, 5
HOLDS_ROW, IN_FLIGHT, CLOSING = 1, 2, 4
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
    """The numbers of an update, in the order of the protocol."""

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
    """The state of a session, in the order of the protocol."""

    flags: int
    allocated: int
    committed: int
    protected: int
    history: int


class Planned(NamedTuple):
    """The plan of a marked turn, in the order of the protocol."""

    number: int
    at: int
    committed: int
    sent: int
    prompt: int
    plan: int
    session: str
    rid: str
    why: str


class Run(NamedTuple):
    """The agent's answer to a question."""

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
    """Encodes an update. The lists have at most EVENTS_MAX, SESSIONS_MAX, SESSIONS_MAX items."""
    parts = [_HEAD.pack(*head), _COUNT.pack(len(events)), *events, _COUNT.pack(len(gone))]
    parts += map(_encode_str, gone)
    parts.append(_COUNT.pack(len(sessions)))
    for id, facts in sessions:
        parts += (_encode_str(id), _SESSION.pack(*facts))
    return _encode_frame(UPDATE, b"".join(parts))


def encode_audit(
    number: int, spent_ns: int, refusal: str, names: Sequence[str], report: bytes
) -> bytes:
    """Encodes an audit: at most AUDIT_NAMES_MAX names, and a report of AUDIT_BYTES_MAX bytes."""
    parts = [_NUMBER.pack(number), _NUMBER.pack(spent_ns), _encode_str(refusal)]
    parts += [_COUNT.pack(len(names)), *map(_encode_str, names), report]
    return _encode_frame(AUDITED, b"".join(parts))


def encode_trimmer(pid: int, instance: bytes, sglang: str, shim: str, inert: str) -> bytes:
    texts = b"".join(map(_encode_str, (sglang, shim, inert)))
    return _encode_frame(TRIMMER, _TRIMMER.pack(pid, instance) + texts)


def encode_planned(planned: Planned) -> bytes:
    texts = b"".join(map(_encode_str, planned[6:]))
    return _encode_frame(PLANNED, _PLANNED.pack(*planned[:6]) + texts)


def _encode_event(number: int, id: str, rest: bytes = b"") -> bytes:
    return bytes((number,)) + _encode_str(id) + rest


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
    """Removes all complete frames from the front of the buffer. Yields the kind of each with its
    content: a demotion's session, an audit's number, or a `Run`."""
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
