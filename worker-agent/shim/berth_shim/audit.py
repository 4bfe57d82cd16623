"""Audits the KV pool's pages when the agent requests it, with the library `libberth_kv`.

A page audit checks who holds each page of the pool: a row of the request table, the radix tree, or
the free list. It also compares digests of pages that must not change any more with earlier digests.

An audit hands a snapshot to the library on the scheduler's thread. The device then copies the rows
and computes the digests in the background. When the copy is complete, the audit tells the library,
on the same thread, which rows have changed meanwhile. Then the library works out the report from
the copy, on the audit's thread. A request during an audit waits until that audit has ended.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from . import snapshot, wire
from .buffers import buffers, device
from .library import Library, PageAudits
from .snapshot import AuditError

# The maximum bytes of KV that one audit digests on a GPU. Reading them takes about 0.1 ms of the
# GPU's memory bandwidth. Each audit digests other sessions than the audit before it, in rotation.
GPU_DIGEST_BYTES_MAX = 256 << 20
# The same for a pool in host memory, where it takes some milliseconds of the scheduler's processor.
HOST_DIGEST_BYTES_MAX = 4 << 20


class Auditor:
    """Makes the audits of one scheduler. Its methods raise nothing: a failed audit is answered with
    a refusal. After an unforeseen error it makes no more audits."""

    def __init__(
        self, scheduler: Any, wake_scheduler: Callable[[], None], off_reason: str = ""
    ):
        self._scheduler = scheduler
        self._wake_scheduler = wake_scheduler
        # Of the request for which no audit has begun yet.
        self._requested_number: int | None = None
        self._running_audit: _Audit | None = None
        self._answer: bytes | None = None
        self._page_audits: PageAudits | None = None
        # -1 if the pool is not on a CUDA device.
        self._cuda_ordinal = -1
        # For the hello.
        self.device, self.page_bytes = "", 0
        # Empty if audits are possible. The engine may lack what an audit needs (`off_reason`).
        self.refusal = off_reason
        try:
            self._open_library()
        except AuditError as error:
            self.refusal = str(error)
        except Exception as error:
            self.refusal = self.refusal or f"{type(error).__name__}: {error}"

    def _open_library(self) -> None:
        scheduler = self._scheduler
        self.device, self._cuda_ordinal = device(scheduler)
        kv_buffers = buffers(scheduler)
        self.page_bytes = sum(buffer.page_bytes for buffer in kv_buffers)
        if refusal := self.refusal or snapshot.audit_refusal(scheduler):
            raise AuditError(refusal)
        self._page_audits = Library().open_audits(
            page_tokens=scheduler.page_size,
            pool_pages=scheduler.max_total_num_tokens // scheduler.page_size,
            request_table=scheduler.req_to_token_pool.req_to_token,
            buffers=kv_buffers,
            cuda_ordinal=self._cuda_ordinal,
        )

    def request(self, number: int) -> None:
        """Replaces an earlier request for which no audit has begun yet."""
        self._requested_number = number

    def forget_request(self) -> None:
        """The agent that asked has disconnected. A running audit continues, but isn't answered."""
        self._requested_number = self._answer = None
        if self._running_audit is not None:
            self._running_audit.number = None

    @property
    def can_begin(self) -> bool:
        return self._requested_number is not None and self._running_audit is None

    def begin(self) -> None:
        """Must be called before a step's requests are handled, when no change of the pool is half
        done."""
        if self.can_begin:
            self._run_guarded(self._begin)

    def advance(self) -> None:
        """May be called after any step."""
        if self._running_audit is not None:
            self._run_guarded(self._advance)

    @property
    def has_answer(self) -> bool:
        return self._answer is not None

    def take_answer(self) -> bytes:
        frame, self._answer = self._answer, None
        return frame

    def _run_guarded(self, audit_part: Callable[[], None]) -> None:
        """Turns an error of `audit_part` into a refusal."""
        begin_ns = time.perf_counter_ns()
        try:
            audit_part()
        except AuditError as error:
            self._refuse(str(error))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            # A device without memory for the snapshot's lists may have it for a later audit.
            if type(error).__name__ != "OutOfMemoryError":
                self.refusal = reason
            self._refuse(reason)
        if self._running_audit is not None:
            self._running_audit.spent_ns += time.perf_counter_ns() - begin_ns

    def _refuse(self, reason: str) -> None:
        """Gives up the running audit, or else the requested one."""
        audit = self._running_audit
        number = audit.number if audit else self._requested_number
        if audit is not None:
            self._page_audits.abandon()
        else:
            self._requested_number = None
        self._running_audit = None
        if number is not None:
            self._answer = wire.encode(wire.Audited(number, (0, 0), reason, [], b""))

    def _begin(self) -> None:
        if self.refusal:
            raise AuditError(self.refusal)
        pool_snapshot = snapshot.take_snapshot(self._scheduler)
        self._running_audit = _Audit(self._requested_number, pool_snapshot, self._page_audits)
        self._requested_number = None
        is_on_gpu = self._cuda_ordinal >= 0
        digest_bytes_max = GPU_DIGEST_BYTES_MAX if is_on_gpu else HOST_DIGEST_BYTES_MAX
        self._page_audits.begin(pool_snapshot, self._current_stream(), digest_bytes_max)

    def _advance(self) -> None:
        audit = self._running_audit
        if audit.thread is None:
            if self._page_audits.is_copied():
                _, rows_now = snapshot.list_rows(self._scheduler)
                audit.start_accounting(rows_now, self._wake_scheduler)
        elif not audit.thread.is_alive():
            names, report = audit.snapshot.session_names, audit.report()
            spent = divmod(audit.spent_ns, 1_000_000_000)
            self._running_audit = None
            if audit.number is not None:
                answer = wire.Audited(audit.number, spent, None, names, report)
                self._answer = wire.encode(answer)

    def _current_stream(self) -> int:
        """Returns 0 if the pool is not on a CUDA device. The device works on an audit after the
        work that is already queued on this stream: only then is the snapshot valid."""
        if self._cuda_ordinal < 0:
            return 0
        import torch

        return torch.cuda.current_stream().cuda_stream


class _Audit:
    def __init__(self, number: int, pool_snapshot: snapshot.Snapshot, page_audits: PageAudits):
        # None if the agent that sent the request has disconnected.
        self.number: int | None = number
        self.snapshot = pool_snapshot
        # On the scheduler's thread.
        self.spent_ns = 0
        # None while the device still copies.
        self.thread: threading.Thread | None = None
        self._page_audits = page_audits
        self._report: bytes | AuditError = AuditError(
            "the audit's thread has ended without a result"
        )

    def start_accounting(self, rows_now: list[snapshot.Row], on_end: Callable[[], None]) -> None:
        """The audit's thread calls `on_end` when the report is ready or has failed."""
        self.thread = threading.Thread(
            target=self._account, args=(rows_now, on_end), name="berth-audit", daemon=True
        )
        self.thread.start()

    def _account(self, rows_now: list[snapshot.Row], on_end: Callable[[], None]) -> None:
        try:
            self._report = self._page_audits.finish(rows_now)
        except AuditError as error:
            self._report = error
        on_end()

    def report(self) -> bytes:
        """Raises the error that the library reported instead of a report."""
        if isinstance(self._report, AuditError):
            raise self._report
        return self._report
