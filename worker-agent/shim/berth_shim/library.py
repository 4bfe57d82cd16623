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
    from .snapshot import Snapshot, Row

ABI = 1
NAME, KERNELS = "libberth_kv.so", "kv_account.fatbin"


class AuditError(Exception):
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


class _Snapshot(Structure):
    _fields_ = [
        ("rows", POINTER(_Row)), ("keys", POINTER(c_uint64)), ("free", POINTER(_List)),
        ("tree", POINTER(_List)), ("nrows", c_uint32), ("nsessions", c_uint32),
        ("nfree", c_uint32), ("complete", c_uint32), ("digest_pages_max", c_uint32),
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
            self._functions = ctypes.CDLL(path)
        except OSError as error:
            raise AuditError(f"{error}; build kernels/capi, and set BERTH_KV_LIBRARY") from None
        self._declare()
        if (abi := self._functions.berth_kv_abi()) != ABI:
            raise AuditError(
                f"{path} has ABI {abi}, the shim {ABI}: install the same version of both"
            )

    def _declare(self) -> None:
        functions, uint32s, uint64s = self._functions, POINTER(c_uint32), POINTER(c_uint64)
        signatures = {
            "abi": (c_uint32, []),
            "error": (c_char_p, []),
            "open": (c_int32, [POINTER(_Pool), c_char_p, uint64s]),
            "begin": (c_int32, [c_uint64, POINTER(_Snapshot)]),
            "ready": (c_int32, [c_uint64]),
            "finish": (c_int64, [c_uint64, uint32s, uint64s, c_uint32, c_void_p, c_uint64]),
            "abandon": (c_int32, [c_uint64]),
            "table_open": (
                c_int32, [POINTER(_Pool), c_char_p, c_char_p, c_uint32, c_uint32, uint64s]
            ),
            "table_begin": (c_int32, [c_uint64, c_uint64]),
            "table_done": (c_int32, [c_uint64, POINTER(_TableRow), c_uint32, c_uint64]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(functions, f"berth_kv_{name}")
            function.restype, function.argtypes = result, arguments

    def open_audits(
        self, page_tokens: int, pages: int, rows: Any, buffers: Sequence[Buffer], ordinal: int
    ) -> "PageAudits":
        """Opens a pool for audits; `rows` is the engine's request table, a tensor."""
        pool = _Pool(
            page_tokens, pages + 1, rows.data_ptr(), rows.shape[0], rows.stride(0),
            (_Buffer * len(buffers))(*buffers), len(buffers), ordinal,
        )
        handle = c_uint64()
        kernels = self._kernels.encode() if ordinal >= 0 else None
        self.check(self._functions.berth_kv_open(pool, kernels, handle))
        page_bytes = sum(buffer.page_bytes for buffer in buffers)
        return PageAudits(self, self._functions, handle, page_bytes)

    def open_row_table(
        self, page_tokens: int, pages: int, rows: Any, ordinal: int, path: str, tables: int
    ) -> "RowTable":
        """Opens a table of the live rows in the file at `path`, which must be in memory (tmpfs)."""
        pool = _Pool(
            page_tokens, pages + 1, rows.data_ptr(), rows.shape[0], rows.stride(0), None, 0, ordinal
        )
        handle = c_uint64()
        kernels = self._kernels.encode() if ordinal >= 0 else None
        self.check(self._functions.berth_kv_table_open(
            pool, kernels, path.encode(), tables, rows.shape[0], handle
        ))
        return RowTable(self, self._functions, handle)

    def check(self, result: int) -> int:
        """Returns the result of a call. Raises the library's error if the result is negative."""
        if result < 0:
            raise AuditError(self._functions.berth_kv_error().decode(errors="replace"))
        return result


class PageAudits:
    """Audits of one pool, one at a time: `begin`, wait for `is_copied`, then `finish`."""

    def __init__(self, library: Library, functions: Any, handle: c_uint64, page_bytes: int):
        self._library = library
        self._functions = functions
        self._handle = handle
        self._page_bytes = page_bytes
        self._buffer = ctypes.create_string_buffer(AUDIT_BYTES_MAX)

    def begin(self, snapshot: "Snapshot", stream: int, digest_bytes_max: int) -> None:
        """Starts to copy the snapshot, on a stream of the library's own, after the work queued on
        `stream`."""
        rows = (_Row * len(snapshot.rows))(*(
            (row.row, row.tokens, row.session, row.sealed_tokens, row.protected_tokens, 0,
             row.version)
            for row in snapshot.rows
        ))
        keys = (c_uint64 * len(snapshot.rows))(*(row.key for row in snapshot.rows))
        digest_pages_max = digest_bytes_max // self._page_bytes if self._page_bytes else 0
        free, tree = _id_list(snapshot.free), _id_list(snapshot.tree)
        self._library.check(self._functions.berth_kv_begin(self._handle, _Snapshot(
            rows, keys, ctypes.pointer(free), ctypes.pointer(tree), len(rows),
            len(keys), 1, 1, digest_pages_max, 0, stream,
        )))

    def is_copied(self) -> bool:
        """Whether the copy is complete."""
        return bool(self._library.check(self._functions.berth_kv_ready(self._handle)))

    def finish(self, rows_now: "Sequence[Row]") -> bytes:
        """Returns the report. Blocks until the device is done, but releases the GIL."""
        rows = (c_uint32 * len(rows_now))(*(row.row for row in rows_now))
        versions = (c_uint64 * len(rows_now))(*(row.version for row in rows_now))
        size = self._library.check(self._functions.berth_kv_finish(
            self._handle, rows, versions, len(rows_now), self._buffer, len(self._buffer)
        ))
        return self._buffer.raw[:size]

    def abandon(self) -> None:
        """Gives up the running audit."""
        self._functions.berth_kv_abandon(self._handle)


class RowTable:
    """Publishes the live rows of each step: `begin_step` before the step, `end_step` after it."""

    def __init__(self, library: Library, functions: Any, handle: c_uint64):
        self._library = library
        self._functions = functions
        self._handle = handle

    def begin_step(self, stream: int) -> None:
        """Marks the table as changing. Must come before the step's first change on the stream."""
        self._library.check(self._functions.berth_kv_table_begin(self._handle, stream))

    def end_step(self, live: "Sequence[Row]", keys: Sequence[int], stream: int) -> None:
        """Writes the rows after the step's last change on the stream. `keys` is indexed by session
        number."""
        rows = (_TableRow * len(live))(*(
            (row.row, row.tokens, row.session, 0, row.version, keys[row.session]) for row in live
        ))
        self._library.check(
            self._functions.berth_kv_table_done(self._handle, rows, len(rows), stream)
        )


def _id_list(ids: Any) -> _List:
    return _List(ids.data_ptr(), ids.numel())
