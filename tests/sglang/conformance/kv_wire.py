"""Reads the engine's KV events from its sockets, with nothing but Python's standard library.

It implements as much of ZMTP 3.0 as subscriptions and replays need, and as much of MessagePack as
the events use.
"""

import socket
import struct
from dataclasses import dataclass
from typing import Any

REPLAY_END = b"\xff" * 8
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


class Socket:
    """One connection to one peer; `kind` is the ZeroMQ socket type that this side announces."""

    def __init__(self, port: int, kind: bytes, seconds: float):
        self._socket = socket.create_connection(("127.0.0.1", port), seconds)
        self._received = b""
        self._socket.sendall(_GREETING)
        peer = self._read(64)
        assert peer[:1] == b"\xff" and peer[9:11] == b"\x7f\x03", f"no ZMTP 3 peer: {peer!r}"
        ready = b"\x05READY" + _property(b"Socket-Type", kind) + _property(b"Identity", b"")
        self._socket.sendall(bytes([_COMMAND, len(ready)]) + ready)
        flags, body = self._frame()
        assert flags & _COMMAND and body.startswith(b"\x05READY"), f"not ready: {body!r}"

    def send(self, frames: list[bytes]) -> None:
        last = len(frames) - 1
        self._socket.sendall(
            b"".join(
                bytes([_MORE if place < last else 0, len(frame)]) + frame
                for place, frame in enumerate(frames)
            )
        )

    def receive(self, seconds: float) -> list[bytes]:
        """Returns the frames of the next message. Raises TimeoutError if nothing arrives for
        `seconds`."""
        self._socket.settimeout(seconds)
        frames = []
        while True:
            flags, body = self._frame()
            if flags & _COMMAND:
                continue
            frames.append(body)
            if not flags & _MORE:
                return frames

    def close(self) -> None:
        self._socket.close()

    def _frame(self) -> tuple[int, bytes]:
        flags = self._read(1)[0]
        size = struct.unpack(">Q", self._read(8))[0] if flags & _LONG else self._read(1)[0]
        return flags, self._read(size)

    def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the engine has closed its socket")
            self._received += data
        read, self._received = self._received[:size], self._received[size:]
        return read


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


@dataclass(frozen=True)
class Batch:
    """One message of the publisher: its sequence number and its events."""

    topic: bytes
    sequence: int
    time: float
    events: list[dict]
    rank: int | None

    @classmethod
    def from_frames(cls, frames: list[bytes]) -> "Batch":
        topic, sequence, payload = frames
        time, events, rank = unpack(payload)
        return cls(topic, int.from_bytes(sequence, "big"), time, events, rank)


def replay(port: int, first: int, seconds: float = 30) -> list[Batch]:
    """Returns the batches that the engine still keeps, from sequence number `first` on."""
    dealer = Socket(port, b"DEALER", seconds)
    try:
        dealer.send([b"", first.to_bytes(8, "big")])
        batches = []
        while (frames := dealer.receive(seconds))[2] != REPLAY_END:
            assert frames[0] == b"", f"a reply without its empty frame: {frames}"
            batches.append(Batch.from_frames(frames[1:]))
        assert frames == [b"", b"", REPLAY_END, b""], f"the end of a replay: {frames}"
        return batches
    finally:
        dealer.close()


def unpack(data: bytes) -> Any:
    """Returns the MessagePack value that takes up the whole of `data`."""
    value, end = _unpack(data, 0)
    assert end == len(data), f"{len(data) - end} bytes after the message"
    return value


_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# The number of bytes of the length field that follows each type byte.
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    kind = data[at]
    at += 1
    if kind < 0x80:
        return kind, at
    if kind >= 0xE0:
        return kind - 0x100, at
    if kind in _CONSTANTS:
        return _CONSTANTS[kind], at
    if form := _NUMBERS.get(kind):
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)

    def length(fixed: range, sizes: dict[int, int]) -> tuple[int, int] | None:
        """Returns the value's length and where its content begins; None if its type byte is
        neither in `fixed` nor in `sizes`."""
        if kind in fixed:
            return kind - fixed.start, at
        if size := sizes.get(kind):
            return int.from_bytes(data[at : at + size], "big"), at + size
        return None

    if found := length(range(0xA0, 0xC0), _TEXTS):
        count, begin = found
        return data[begin : begin + count].decode(), begin + count
    if found := length(range(0x90, 0xA0), _ARRAYS):
        return _several(data, *found)
    if found := length(range(0x80, 0x90), _MAPS):
        count, begin = found
        flat, end = _several(data, 2 * count, begin)
        return dict(zip(flat[::2], flat[1::2])), end
    raise ValueError(f"a MessagePack type that no event has: {kind:#x}")


def _several(data: bytes, count: int, at: int) -> tuple[list, int]:
    values = []
    for _ in range(count):
        value, at = _unpack(data, at)
        values.append(value)
    return values, at
