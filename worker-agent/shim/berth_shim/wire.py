"""Encodes the shim's messages to the agent, and decodes the agent's commands. Pure, no I/O.

This is the protocol on the unix stream sockets between the shim, which is Berth's plugin in the
engine, and the agent beside the engine. A *session* is a series of turns whose KV the engine keeps
from turn to turn; a *turn* is one request with its answer. One socket belongs to the shim in a
scheduler process, and reports the state of the KV pool and its sessions. The other belongs to the
*trimmer*, the shim's part in the process that tokenizes. The trimmer removes from a full prompt
what the turn's session already has. `sampler` and `trimmer` make and use the messages, and `link`
sends and receives the frames. `worker-agent/src/shim/codec.rs` is the agent's end.

A frame is a `u32` length of the rest (2 to FRAME_BYTES_MAX), a `u8` protocol version, a `u8` kind,
and the body. Integers are unsigned and little-endian; `str` is a `u16` length and that many bytes
of UTF-8; `bool` is one byte, 0 or 1; a list is a `u16` count and its items.

| kind | frame | direction | body |
|---|---|---|---|
| 1 | hello | to agent | the fields of the hello in the order below |
| 2 | update | to agent | the fields of `Figures`, then three lists: events, ids of sessions that |
| | | | are gone, changed sessions |
| 3 | audit | to agent | number u64, nanoseconds u64, refusal str, list of names str, report |
| 4 | trimmer | to agent | pid u32, instance 16 bytes; sglang, shim, inert_reason str each |
| 5 | planned | to agent | number u64; shared_tokens, committed_tokens, appended_tokens, |
| | | | prompt_tokens u32 each; plan u8; session, rid, why str each |
| 16 | demote | to shim | session str |
| 17 | sample now | to shim | nothing |
| 18 | audit | to shim | number u64 |
| 19 | republish | to shim | nothing |
| 20 | run | to shim | number u64, tokens u32, session str |

| field of hello | type | means |
|---|---|---|
| pid, dp_rank, page_size | u32 each | the scheduler's process, its rank, tokens per page |
| pool_tokens | u64 | tokens in the KV pool |
| rows_total | u32 | rows of the engine's request table |
| instance | 16 bytes | random number that identifies the engine process |
| sglang, shim | str each | versions |
| inert_reason | str | why the shim does nothing; empty while it works |
| undemotable_reason | str | why no session can be demoted into the radix tree; empty if it can be |
| unauditable_reason | str | why the pool's pages can't be audited; empty if they can be |
| unpublishable_reason | str | why the radix tree can't be published again; empty if it can be |
| device | str | the device of the pool: a GPU's UUID as CUDA has it, else torch's device name |
| page_bytes | u64 | bytes of a page's KV on this rank, from its buffers; 0 if unknown |

| item of an update | body |
|---|---|
| changed session | id str, then the fields of `SessionFacts`: flags u8, the others u32 each |
| event 1, opened | session str, ok bool: whether the engine has opened the session |
| event 2, closed | session str |
| event 3, committed | session str, rid str, history_tokens u32, is_retracted bool |
| event 4, aborted | session str, was_running bool |
| event 5, demoted | session str, refusal str: empty if the session was demoted |

Each event begins with its number as a `u8`. A turn is *committed* when it becomes part of its
session's history. It is *retracted* if the engine has put it back into the queue. If an aborted
turn was running, the engine has freed the session's row.

An audit frame answers a page audit, which checks who holds each page of the KV pool. Its number is
that of the request, and its nanoseconds are the audit's time on the scheduler's thread. The report
is the unchanged output of `libberth_kv`. It numbers the sessions by their index in the list of
names. Numbers without a name are requests without a session, and sessions whose name isn't listed.
If the audit was refused, the frame has neither names nor a report.

The trimmer's socket has the path of the first socket with `.trim` appended. Frames 4, 5 and 20 are
sent only there, and the others only on the first socket. Frame 4 comes first. Its `inert_reason`
says why nothing is trimmed; it is empty while the trimmer works.

Frame 5 reports the trimmer's plan for a *marked* turn, which is a request that the agent asked to
trim. With the number 0 the plan is final. A final plan is sent before the engine gets the turn, and
exactly once per turn. With another number the plan is a *question*: the trimmer asks where the turn
may run, because another session or more room in this one could help. The turn waits, and its final
plan follows later.

Frame 20 answers the question with its number. It names an open streaming session to run the turn
in, and the maximum number of tokens of the prompt there. An empty name lets the turn run unchanged.

The other fields of frame 5 are:

- `plan` says how the turn runs: 1 trimmed, 2 retokenized, 3 diverged, 4 refused. The module `trim`
  explains these plans.
- `session` is the session that the plan is for, and `rid` the id of the turn.
- `shared_tokens` is the number of leading tokens that the prompt and the session share.
- `committed_tokens` is the length of the session's history as the engine counts it.
- `appended_tokens` is the number of tokens to append to that history. The engine then counts
  `committed_tokens + appended_tokens` prompt tokens.
- `prompt_tokens` is the length of the whole prompt. If the prompt is too long for the session, and
  the engine would count more tokens than that, it is the number that the engine would count.
- `why` says why the plan is a refusal or too long, and why the answer to a question didn't help.
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
# The maximum number of names in an audit. This many names of NAME_BYTES_MAX bytes leave half a
# frame for the report.
AUDIT_NAMES_MAX = 1000
AUDIT_BYTES_MAX = FRAME_BYTES_MAX // 2

# The kinds of frames to the agent, and to the shim.
HELLO, UPDATE, AUDITED, TRIMMER, PLANNED = 1, 2, 3, 4, 5
DEMOTE, SAMPLE_NOW, AUDIT, REPUBLISH, RUN = 16, 17, 18, 19, 20
# The kinds of events in an update.
OPENED, CLOSED, COMMITTED, ABORTED, DEMOTED = 1, 2, 3, 4, 5
# The flags of a session: it holds a row of the request table (and thus KV), the engine has a turn
# of the session, and the engine will close the session at the end of that turn.
HOLDS_ROW, IN_FLIGHT, CLOSING = 1, 2, 4
# The values of `Planned.plan`.
TRIMMED, RETOKENIZED, DIVERGED, REFUSED = 1, 2, 3, 4

# The struct formats of fixed-size parts. A frame's header is its length, version and kind.
_FRAME_HEADER = struct.Struct("<IBB")
_HELLO = struct.Struct("<IIIQI16s")
_FIGURES = struct.Struct("<QQQQQQQQQQQIIII?")
_SESSION_FACTS = struct.Struct("<BIIII")
_U16 = struct.Struct("<H")
_U64 = struct.Struct("<Q")
_TRIMMER = struct.Struct("<I16s")
_PLANNED = struct.Struct("<QIIIIB")
_RUN = struct.Struct("<QI")


class ProtocolError(Exception):
    """A frame that violates this protocol."""


class Hello(NamedTuple):
    """The first frame: the shim's identity, and what it can do. The table of the hello's fields, in
    the module's description, explains the fields."""

    pid: int
    dp_rank: int
    page_size: int
    pool_tokens: int
    rows_total: int
    instance: bytes
    sglang: str
    shim: str
    inert_reason: str
    undemotable_reason: str
    unauditable_reason: str
    unpublishable_reason: str
    device: str
    page_bytes: int


class Figures(NamedTuple):
    """The figures of an update, in the order of the protocol."""

    # The number of the update on this connection, from 0.
    seq: int
    # Counters since the shim's start: events that it has lost, readings of the engine's state, and
    # the nanoseconds that these readings took on the scheduler's thread.
    events_lost: int
    samples: int
    samples_ns: int
    # How often since its start the shim has read all sessions again, because the sum of the tokens
    # that they hold was wrong.
    recounts: int
    # Tokens in the KV pool: the sum of the next five figures.
    pool_tokens: int
    # Free tokens.
    available_tokens: int
    # Tokens in the radix tree that the engine may evict.
    evictable_tokens: int
    # Tokens in the radix tree that turns or sessions lock.
    protected_tokens: int
    # Tokens that sessions hold outside the tree, in whole pages.
    held_tokens: int
    # All other tokens: those of running requests without a session.
    uncached_tokens: int
    # Rows of the request table.
    rows_total: int
    rows_free: int
    # Requests in the running batch, and in the queue.
    running: int
    waiting: int
    # Whether the update's sessions begin a full table, which replaces all that was sent before.
    is_full_table: bool


class SessionFacts(NamedTuple):
    """The state of a session, in the order of the protocol."""

    # The sum of those flags of HOLDS_ROW, IN_FLIGHT and CLOSING that apply.
    flags: int
    # Tokens for which KV is allocated.
    allocated_tokens: int
    # Tokens whose KV is valid.
    committed_tokens: int
    # Tokens whose KV is in the radix tree, where the session locks it.
    protected_tokens: int
    # Tokens that the engine puts before the next turn's prompt. A session without KV has them too.
    history_tokens: int


class Planned(NamedTuple):
    """The plan for a marked turn, in the order of the protocol. The module's description explains
    the fields."""

    number: int
    shared_tokens: int
    committed_tokens: int
    appended_tokens: int
    prompt_tokens: int
    plan: int
    session: str
    rid: str
    why: str


class Run(NamedTuple):
    """The agent's answer to a question: where to run the turn."""

    # The number of the question.
    number: int
    # The maximum number of tokens of the prompt.
    tokens_max: int
    # The session to run the turn in; empty if the turn runs unchanged.
    session: str


def is_nameable(id: Any) -> bool:
    """Whether the session's id can be sent: a text of at most NAME_BYTES_MAX bytes."""
    try:
        return isinstance(id, str) and len(id.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False


def _encode_str(text: str) -> bytes:
    """Encodes at most the first NAME_BYTES_MAX bytes of the text."""
    encoded = text.encode(errors="replace")
    if len(encoded) > NAME_BYTES_MAX:
        # Cut between characters, so that the rest is valid UTF-8.
        encoded = encoded[:NAME_BYTES_MAX].decode(errors="ignore").encode()
    return _U16.pack(len(encoded)) + encoded


def _encode_frame(kind: int, body: bytes) -> bytes:
    return _FRAME_HEADER.pack(len(body) + 2, VERSION, kind) + body


def encode_hello(hello: Hello) -> bytes:
    texts = b"".join(map(_encode_str, hello[6:13]))
    return _encode_frame(HELLO, _HELLO.pack(*hello[:6]) + texts + _U64.pack(hello.page_bytes))


def encode_update(
    figures: Figures,
    events: Sequence[bytes],
    gone_ids: Sequence[str],
    sessions: Sequence[tuple[str, SessionFacts]],
) -> bytes:
    """Encodes an update. `events` are encoded already and at most EVENTS_MAX. `gone_ids` and
    `sessions` have at most SESSIONS_MAX items each."""
    parts = [_FIGURES.pack(*figures), _U16.pack(len(events)), *events, _U16.pack(len(gone_ids))]
    parts += map(_encode_str, gone_ids)
    parts.append(_U16.pack(len(sessions)))
    for id, facts in sessions:
        parts += (_encode_str(id), _SESSION_FACTS.pack(*facts))
    return _encode_frame(UPDATE, b"".join(parts))


def encode_audit(
    number: int, spent_ns: int, refusal: str, names: Sequence[str], report: bytes
) -> bytes:
    """Encodes an audit with at most AUDIT_NAMES_MAX names and AUDIT_BYTES_MAX bytes of report."""
    parts = [_U64.pack(number), _U64.pack(spent_ns), _encode_str(refusal)]
    parts += [_U16.pack(len(names)), *map(_encode_str, names), report]
    return _encode_frame(AUDITED, b"".join(parts))


def encode_trimmer(pid: int, instance: bytes, sglang: str, shim: str, inert_reason: str) -> bytes:
    texts = b"".join(map(_encode_str, (sglang, shim, inert_reason)))
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


def encode_committed(id: str, rid: str, history_tokens: int, is_retracted: bool) -> bytes:
    fields = _encode_str(rid) + struct.pack("<I?", history_tokens, is_retracted)
    return _encode_event(COMMITTED, id, fields)


def encode_aborted(id: str, was_running: bool) -> bytes:
    return _encode_event(ABORTED, id, bytes((was_running,)))


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
    if kind == AUDIT and len(body) == _U64.size:
        return kind, _U64.unpack(body)[0]
    raise ProtocolError(f"kind {kind} with {len(body)} bytes")


def _is_encoded_str(body: bytes) -> bool:
    return len(body) >= 2 and len(body) == 2 + int.from_bytes(body[:2], "little")
