"""Calls the library `libberth_kv` for page audits, through ctypes.

The library reads the engine's request table and its KV buffers in place. `kernels/capi/berth_kv.h`
documents its functions and structures. The structures below must have the same fields in the same
order.
"""

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from .buffers import Buffer
from .snapshot import AuditError, Row, Snapshot
from .wire import AUDIT_BYTES_MAX

ABI_VERSION = 2
LIBRARY_FILE, KERNELS_FILE = "libberth_kv.so", "kv_account.fatbin"


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
        ("nfree", c_uint32), ("digest_pages_max", c_uint32), ("stream", c_uint64),
    ]


class Library:
    """The loaded library. Its file is `BERTH_KV_LIBRARY`, or else LIBRARY_FILE beside the shim. The
    file of its kernels is `BERTH_KV_FATBIN`, or else KERNELS_FILE beside the library."""

    def __init__(self) -> None:
        path = os.environ.get("BERTH_KV_LIBRARY") or str(Path(__file__).parent / LIBRARY_FILE)
        kernels_path = os.environ.get("BERTH_KV_FATBIN") or str(Path(path).parent / KERNELS_FILE)
        self._kernels_path = kernels_path
        try:
            self._functions = ctypes.CDLL(path)
        except OSError as error:
            raise AuditError(f"{error}; build kernels/capi, and set BERTH_KV_LIBRARY") from None
        self._declare_functions()
        if (abi := self._functions.berth_kv_abi()) != ABI_VERSION:
            raise AuditError(
                f"{path} has ABI {abi}, the shim {ABI_VERSION}: install the same version of both"
            )

    def _declare_functions(self) -> None:
        functions, uint32s, uint64s = self._functions, POINTER(c_uint32), POINTER(c_uint64)
        signatures = {
            "abi": (c_uint32, []),
            "error": (c_char_p, []),
            "open": (c_int32, [POINTER(_Pool), c_char_p, uint64s]),
            "begin": (c_int32, [c_uint64, POINTER(_Snapshot)]),
            "ready": (c_int32, [c_uint64]),
            "finish": (c_int64, [c_uint64, uint32s, uint64s, c_uint32, c_void_p, c_uint64]),
            "abandon": (c_int32, [c_uint64]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(functions, f"berth_kv_{name}")
            function.restype, function.argtypes = result, arguments

    def open_audits(
        self,
        page_tokens: int,
        pool_pages: int,
        request_table: Any,
        buffers: Sequence[Buffer],
        cuda_ordinal: int,
    ) -> "PageAudits":
        """`request_table` is a tensor. `cuda_ordinal` is -1 if the pool is in host memory."""
        row_count, row_stride = request_table.shape[0], request_table.stride(0)
        # The engine's pool has one page more than it offers.
        pool = _Pool(
            page_tokens, pool_pages + 1, request_table.data_ptr(), row_count, row_stride,
            (_Buffer * len(buffers))(*buffers), len(buffers), cuda_ordinal,
        )
        handle = c_uint64()
        kernels = self._kernels_path.encode() if cuda_ordinal >= 0 else None
        self.check_result(self._functions.berth_kv_open(pool, kernels, handle))
        page_bytes = sum(buffer.page_bytes for buffer in buffers)
        return PageAudits(self, self._functions, handle, page_bytes)

    def check_result(self, result: int) -> int:
        """Raises the library's error if `result` is negative."""
        if result < 0:
            raise AuditError(self._functions.berth_kv_error().decode(errors="replace"))
        return result


class PageAudits:
    """One audit at a time: call `begin`, wait until `is_copied` is true, then call `finish`."""

    def __init__(self, library: Library, functions: Any, handle: c_uint64, page_bytes: int):
        self._library = library
        self._functions = functions
        self._handle = handle
        self._page_bytes = page_bytes
        self._report_buffer = ctypes.create_string_buffer(AUDIT_BYTES_MAX)

    def begin(self, snapshot: Snapshot, stream: int, digest_bytes_max: int) -> None:
        """The library copies on a CUDA stream of its own, after the work that is already queued on
        `stream`. It digests at most `digest_bytes_max` bytes of KV."""
        rows = (_Row * len(snapshot.rows))(*(
            (row.row_index, row.tokens, row.holder_number, row.sealed_tokens,
             row.protected_tokens, 0, row.version)
            for row in snapshot.rows
        ))
        keys = (c_uint64 * len(snapshot.rows))(*(row.key for row in snapshot.rows))
        digest_pages_max = digest_bytes_max // self._page_bytes if self._page_bytes else 0
        free, tree = _id_list(snapshot.free_pages), _id_list(snapshot.tree_slots)
        self._library.check_result(self._functions.berth_kv_begin(self._handle, _Snapshot(
            rows, keys, ctypes.pointer(free), ctypes.pointer(tree), len(rows),
            len(keys), 1, digest_pages_max, stream,
        )))

    def is_copied(self) -> bool:
        return bool(self._library.check_result(self._functions.berth_kv_ready(self._handle)))

    def finish(self, rows_now: Sequence[Row]) -> bytes:
        """`rows_now` are the rows in use after the copy; their versions tell which have changed.
        Blocks until the device is done, but releases Python's global lock meanwhile."""
        rows = (c_uint32 * len(rows_now))(*(row.row_index for row in rows_now))
        versions = (c_uint64 * len(rows_now))(*(row.version for row in rows_now))
        report_bytes = self._library.check_result(self._functions.berth_kv_finish(
            self._handle, rows, versions, len(rows_now),
            self._report_buffer, len(self._report_buffer),
        ))
        return self._report_buffer.raw[:report_bytes]

    def abandon(self) -> None:
        self._functions.berth_kv_abandon(self._handle)


def _id_list(ids: Any) -> _List:
    return _List(ids.data_ptr(), ids.numel())
