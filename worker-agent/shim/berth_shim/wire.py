"""Encodes the shim's messages to the agent, and decodes the agent's commands. Pure, no I/O.

The other end is `worker-agent/src/shim/codec.rs`: it defines the form of a frame, and says which
types explain the fields. The classes here have the same names as the
messages there, and the same fields in the same order.
"""

import operator
import struct
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

VERSION = 9
# The largest update has 256 events, 512 ids of sessions that are gone and 512 changed sessions,
# with names of 512 bytes. That is 0.8 MiB.
FRAME_BYTES_MAX = 1 << 20
EVENTS_MAX = 256
# In an update: at most so many ids of sessions that are gone, and so many changed sessions.
SESSIONS_MAX = 512
# Sessions with longer names count in the sums, but are not listed. The names of Berth's sessions
# have at most 172 bytes, whatever ids clients choose; the agent's build checks that.
NAME_BYTES_MAX = 512
# This many names of NAME_BYTES_MAX bytes leave half a frame for the report.
AUDIT_NAMES_MAX = 1000
AUDIT_BYTES_MAX = FRAME_BYTES_MAX // 2

# Length and version.
_FRAME_HEAD = struct.Struct("<IB")


class ProtocolError(Exception):
    """A frame that violates this protocol."""


class _Struct(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A part of a message: an array of its fields."""


class _Message(_Struct, tag=True):
    """A message or an event: an array of the class's name and the fields."""


class _Texts:
    """A part with texts of clients, or of errors, cut to NAME_BYTES_MAX bytes of valid UTF-8."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if isinstance(text := getattr(self, name), str):
                # Drops the bytes of a character that was cut.
                cut = text.encode(errors="replace")[:NAME_BYTES_MAX].decode(errors="ignore")
                msgspec.structs.force_setattr(self, name, cut)


class _TextMessage(_Texts, _Message):
    """A message with such texts."""


class HostFacts(_Struct):
    """The copies of KV in the host's memory."""

    total_tokens: int
    used_tokens: int
    # What eviction on the host can free: an estimate.
    evictable_tokens: int
    loading_tokens: int
    writing_tokens: int
    # Of the timed loads since the shim's start.
    loaded_tokens: int
    loads_us: int


class RankFacts(_Struct):
    pool_tokens: int
    available_tokens: int
    evictable_tokens: int
    protected_tokens: int
    held_tokens: int
    uncached_tokens: int
    rows_total: int
    rows_free: int
    running: int
    waiting: int
    # The shim's own counters.
    events_lost: int = 0
    recounts: int = 0
    samples: int = 0
    samples_ns: int = 0
    # What has become of the engine's weights.
    weight_changes: int = 0
    has_old_kv: bool = False
    # None without a hierarchical cache.
    host: HostFacts | None = None


class SessionFacts(_Struct):
    id: str
    holds_row: bool
    in_flight: bool
    closing: bool
    allocated_tokens: int
    committed_tokens: int
    protected_tokens: int
    history_tokens: int


class Opened(_TextMessage):
    id: str
    ok: bool


class Closed(_TextMessage):
    id: str


class Committed(_TextMessage):
    id: str
    rid: str
    history_tokens: int
    is_retracted: bool


class Aborted(_TextMessage):
    id: str
    was_running: bool


class Demoted(_TextMessage):
    number: int
    id: str
    refusal: str | None


class Prefetched(_TextMessage):
    """`tokens` begin to be loaded. If none do, `refusal` says why."""

    number: int
    id: str
    tokens: int
    refusal: str | None


class Inspected(_Message):
    number: int
    session: SessionFacts | None


Event = Opened | Closed | Committed | Aborted | Demoted | Prefetched | Inspected


class PinSafety(_Texts, _Struct):
    unguarded_reason: str | None = None
    second_pool: str | None = None


class Hello(_TextMessage):
    pid: int
    dp_rank: int
    page_size_tokens: int
    pool_tokens: int
    rows_total: int
    instance: bytes
    sglang: str
    shim: str
    inert_reason: str | None = None
    undemotable_reason: str | None = None
    unauditable_reason: str | None = None
    unpublishable_reason: str | None = None
    device: str = ""
    page_bytes: int | None = None
    pin_safety: PinSafety = PinSafety()


class Update(_Message):
    """At most EVENTS_MAX events, SESSIONS_MAX gone ids and SESSIONS_MAX sessions."""

    seq: int
    facts: RankFacts | None
    begins_table: bool
    ends_table: bool
    events: list[Event]
    gone_ids: list[str]
    sessions: list[SessionFacts]


class Audited(_TextMessage):
    """At most AUDIT_NAMES_MAX names, and AUDIT_BYTES_MAX bytes of report."""

    number: int
    # Seconds, and nanoseconds of the next second.
    spent: tuple[int, int]
    refusal: str | None
    names: list[str]
    report: bytes


class Trimmer(_TextMessage):
    pid: int
    instance: bytes
    sglang: str
    shim: str
    inert_reason: str | None


class Planned(_TextMessage):
    question: int | None
    plan: Literal["trimmed", "retokenized", "diverged", "refused"]
    shared_tokens: int
    committed_tokens: int
    appended_tokens: int
    prompt_tokens: int
    session: str
    rid: str
    why: str


_Number = Annotated[int, msgspec.Meta(ge=0)]


class Demote(_Message):
    number: _Number
    session: str


class Prefetch(_Message):
    number: _Number
    session: str
    tokens_max: _Number


class Inspect(_Message):
    number: _Number
    session: str


class SampleNow(_Message):
    pass


class Audit(_Message):
    number: _Number


class Republish(_Message):
    pass


class Run(_Message):
    question: _Number
    tokens_max: _Number
    session: str | None


Command = Demote | Prefetch | Inspect | SampleNow | Audit | Republish | Run

# The engine may count in integers of another type, such as NumPy's.
_encoder = msgspec.msgpack.Encoder(enc_hook=operator.index)
_command_decoder = msgspec.msgpack.Decoder(Command)


def is_nameable(id: Any) -> bool:
    """Whether the session's id can be sent: a text of at most NAME_BYTES_MAX bytes."""
    try:
        return isinstance(id, str) and len(id.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False


def encode(message: Hello | Update | Audited | Trimmer | Planned) -> bytes:
    """Encodes a message as a frame."""
    body = _encoder.encode(message)
    return _FRAME_HEAD.pack(1 + len(body), VERSION) + body


def take_commands(buffer: bytearray) -> Iterable[Command]:
    """Removes all complete frames from the front of the buffer. Yields the command of each."""
    while len(buffer) >= 4:
        length = int.from_bytes(buffer[:4], "little")
        if not 2 <= length <= FRAME_BYTES_MAX:
            raise ProtocolError(f"a frame of {length} bytes")
        if len(buffer) < 4 + length:
            return
        version, message = buffer[4], bytes(buffer[5 : 4 + length])
        del buffer[: 4 + length]
        if version != VERSION:
            raise ProtocolError(f"protocol version {version}")
        try:
            yield _command_decoder.decode(message)
        except msgspec.MsgspecError as error:
            raise ProtocolError(str(error)) from None
