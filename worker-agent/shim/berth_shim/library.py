"""Calls `libberth_kv` through ctypes.

The library reads the pool in place; `kernels/capi/berth_kv.h` documents its calls.
"""

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .buffers import Buffer
from .wire import AUDIT_BYTES_MAX

if TYPE_CHECKING:
    from .snapshot import Cut, Row

ABI = 1
NAME, KERNELS = "libberth_kv.so", "kv_account.fatbin"


class Failed(Exception):
    """An audit is not possible; the text is for an operator."""


class _Buffer(Structure):
    _fields_ = [("addr", c_uint64), ("page_bytes", c_uint64)]


class _Pool(Structure):
    _fields_ = [
        ("page_tokens", c_uint32), ("pages", c_uint32), ("r2t", c_uint64), ("r2t_rows", c_uint32),
        ("r2t_stride", c_uint32), ("buffers", POINTER(_Buffer)), ("nbuffers", c_uint32),
        ("device", c_int32),
    ]


class _Row(Structure):
    _fields_ = [
        ("row", c_uint32), ("len", c_uint32), ("session", c_uint32), ("sealed_tokens", c_uint32),
        ("protected_tokens", c_uint32), ("zero", c_uint32), ("version", c_uint64),
    ]


class _List(Structure):
    _fields_ = [("addr", c_uint64), ("n", c_uint64)]


class _Cut(Structure):
    _fields_ = [
        ("rows", POINTER(_Row)), ("keys", POINTER(c_uint64)), ("free", POINTER(_List)),
        ("tree", POINTER(_List)), ("nrows", c_uint32), ("nsessions", c_uint32),
        ("nfree", c_uint32), ("whole", c_uint32), ("digest_pages_max", c_uint32),
        ("zero", c_uint32), ("stream", c_uint64),
    ]


class _TableRow(Structure):
    _fields_ = [
        ("row", c_uint32), ("len", c_uint32), ("session", c_uint32), ("zero", c_uint32),
        ("version", c_uint64), ("key", c_uint64),
    ]


class Library:
    """The loaded library: `BERTH_KV_LIBRARY`, or else the file beside the shim. Its kernels are
    `BERTH_KV_FATBIN`, or else the file beside the library."""

    def __init__(self) -> None:
        path = os.environ.get("BERTH_KV_LIBRARY") or str(Path(__file__).parent / NAME)
        self._kernels = os.environ.get("BERTH_KV_FATBIN") or str(Path(path).parent / KERNELS)
        try:
            self._calls = ctypes.CDLL(path)
        except OSError as error:
            raise Failed(f"{error}; build kernels/capi, and set BERTH_KV_LIBRARY") from None
        self._declare()
        if (abi := self._calls.berth_kv_abi()) != ABI:
            raise Failed(f"{path} has ABI {abi}, the shim {ABI}: install the same version of both")

    def _declare(self) -> None:
        calls, uint32s, uint64s = self._calls, POINTER(c_uint32), POINTER(c_uint64)
        of = {
            "abi": (c_uint32, []),
            "error": (c_char_p, []),
            "open": (c_int32, [POINTER(_Pool), c_char_p, uint64s]),
            "begin": (c_int32, [c_uint64, POINTER(_Cut)]),
            "ready": (c_int32, [c_uint64]),
            "finish": (c_int64, [c_uint64, uint32s, uint64s, c_uint32, c_void_p, c_uint64]),
            "abandon": (c_int32, [c_uint64]),
            "table_open": (
                c_int32, [POINTER(_Pool), c_char_p, c_char_p, c_uint32, c_uint32, uint64s]
            ),
            "table_begin": (c_int32, [c_uint64, c_uint64]),
            "table_done": (c_int32, [c_uint64, POINTER(_TableRow), c_uint32, c_uint64]),
        }
        for name, (result, arguments) in of.items():
            call = getattr(calls, f"berth_kv_{name}")
            call.restype, call.argtypes = result, arguments

    def pages(
        self, page_tokens: int, pages: int, rows: Any, buffers: Sequence[Buffer], ordinal: int
    ) -> "Pages":
        """Opens a pool for audits; `rows` is the engine's request table, a tensor."""
        pool = _Pool(
            page_tokens, pages + 1, rows.data_ptr(), rows.shape[0], rows.stride(0),
            (_Buffer * len(buffers))(*buffers), len(buffers), ordinal,
        )
        handle = c_uint64()
        kernels = self._kernels.encode() if ordinal >= 0 else None
        self.check(self._calls.berth_kv_open(pool, kernels, handle))
        page_bytes = sum(buffer.page_bytes for buffer in buffers)
        return Pages(self, self._calls, handle, page_bytes)

    def row_table(
        self, page_tokens: int, pages: int, rows: Any, ordinal: int, path: str, tables: int
    ) -> "RowTable":
        """Opens a table of the live rows in the file at `path`, which must be in memory (tmpfs)."""
        pool = _Pool(
            page_tokens, pages + 1, rows.data_ptr(), rows.shape[0], rows.stride(0), None, 0, ordinal
        )
        handle = c_uint64()
        kernels = self._kernels.encode() if ordinal >= 0 else None
        self.check(self._calls.berth_kv_table_open(
            pool, kernels, path.encode(), tables, rows.shape[0], handle
        ))
        return RowTable(self, self._calls, handle)

    def check(self, answer: int) -> int:
        """Returns a call's result. Raises the library's error if it is negative."""
        if answer < 0:
            raise Failed(self._calls.berth_kv_error().decode(errors="replace"))
        return answer


class Pages:
    """Audits of one pool, one at a time: `begin`, wait for `gathered`, then `finish`."""

    def __init__(self, library: Library, calls: Any, handle: c_uint64, page_bytes: int):
        self._library = library
        self._calls = calls
        self._handle = handle
        self._page_bytes = page_bytes
        self._buffer = ctypes.create_string_buffer(AUDIT_BYTES_MAX)

    def begin(self, cut: "Cut", stream: int, digest_bytes_max: int) -> None:
        """Starts to copy the snapshot, on a stream of the library's own, after the work queued on
        `stream`."""
        rows = (_Row * len(cut.rows))(*(
            (row.row, row.tokens, row.session, row.sealed_tokens, row.protected_tokens, 0,
             row.version)
            for row in cut.rows
        ))
        keys = (c_uint64 * len(cut.rows))(*(row.key for row in cut.rows))
        digest_pages_max = digest_bytes_max // self._page_bytes if self._page_bytes else 0
        self._library.check(self._calls.berth_kv_begin(self._handle, _Cut(
            rows, keys, ctypes.pointer(_list(cut.free)), ctypes.pointer(_list(cut.tree)),
            len(rows), len(keys), 1, 1, digest_pages_max, 0, stream,
        )))

    def gathered(self) -> bool:
        """Whether the copy is complete."""
        return bool(self._library.check(self._calls.berth_kv_ready(self._handle)))

    def finish(self, rows_now: "Sequence[Row]") -> bytes:
        """Returns the report. Blocks until the device is done, but releases the GIL."""
        rows = (c_uint32 * len(rows_now))(*(row.row for row in rows_now))
        versions = (c_uint64 * len(rows_now))(*(row.version for row in rows_now))
        size = self._library.check(self._calls.berth_kv_finish(
            self._handle, rows, versions, len(rows_now), self._buffer, len(self._buffer)
        ))
        return self._buffer.raw[:size]


    def abandon(self) -> None:
        """Gives up the running audit."""
        self._calls.berth_kv_abandon(self._handle)


class RowTable:
    """Publishes the live rows of each step: `begin` before the step, `done` after it."""

    def __init__(self, library: Library, calls: Any, handle: c_uint64):
        self._library = library
        self._calls = calls
        self._handle = handle

    def begin(self, stream: int) -> None:
        """Marks the table as changing. Must come before the step's first change on the stream."""
        self._library.check(self._calls.berth_kv_table_begin(self._handle, stream))

    def done(self, live: "Sequence[Row]", keys: Sequence[int], stream: int) -> None:
        """Writes the rows after the step's last change on the stream. `keys` is indexed by session
        number."""
        rows = (_TableRow * len(live))(*(
            (row.row, row.tokens, row.session, 0, row.version, keys[row.session]) for row in live
        ))
        self._library.check(
            self._calls.berth_kv_table_done(self._handle, rows, len(rows), stream)
        )


def _list(ids: Any) -> _List:
    return _List(ids.data_ptr(), ids.numel())
