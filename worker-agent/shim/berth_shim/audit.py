"""The page audit: checks the pool's pages with `libberth_kv`.

An audit has two steps on the scheduler's thread. First a snapshot is handed to the device, which
copies and digests what it needs in the background. When the copy is complete, the library is told
which rows have changed meanwhile, and works on the copy in a thread of its own. One audit runs at a
time; a request during an audit starts the next one.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from . import snapshot, wire
from .buffers import buffers, device
from .library import AuditError, Library, PageAudits

# The bytes of KV digested per audit. They take a tenth of a millisecond of a GPU's memory
# bandwidth, or some milliseconds of the scheduler's processor if the pool is in host memory. The
# sessions covered rotate from audit to audit.
DIGEST_BYTES_MAX, HOST_DIGEST_BYTES_MAX = 256 << 20, 4 << 20


class Auditor:
    """The audits of one scheduler. Raises nothing: a failed audit becomes a refusal, and after an
    unforeseen error no further audit is made."""

    def __init__(self, scheduler: Any, wake: Callable[[], None]):
        self._scheduler = scheduler
        self._wake = wake
        self._requested: int | None = None
        self._running: _Audit | None = None
        self._answer: bytes | None = None
        self._audits: PageAudits | None = None
        self.ordinal = -1
        # What the hello tells the agent about the pool; `refusal` is empty if audits are possible.
        self.device, self.page_bytes, self.refusal = "", 0, ""
        try:
            self._open_library()
        except AuditError as error:
            self.refusal = str(error)
        except Exception as error:
            self.refusal = f"{type(error).__name__}: {error}"

    def _open_library(self) -> None:
        scheduler = self._scheduler
        self.device, self.ordinal = device(scheduler)
        kv_buffers = buffers(scheduler)
        self.page_bytes = sum(buffer.page_bytes for buffer in kv_buffers)
        if refusal := snapshot.audit_refusal(scheduler):
            raise AuditError(refusal)
        self._audits = Library().open_audits(
            page_tokens=scheduler.page_size,
            pages=scheduler.max_total_num_tokens // scheduler.page_size,
            rows=scheduler.req_to_token_pool.req_to_token,
            buffers=kv_buffers,
            ordinal=self.ordinal,
        )

    def request(self, number: int) -> None:
        """Requests an audit. Only the latest request is answered."""
        self._requested = number

    def forget_request(self) -> None:
        """Drops the request and the answer: the agent that asked has disconnected."""
        self._requested = self._answer = None
        if self._running is not None:
            self._running.number = None

    @property
    def is_requested(self) -> bool:
        """Whether a requested audit has not begun."""
        return self._requested is not None and self._running is None

    def begin(self) -> None:
        """Begins the requested audit. Must be called before a step's requests are handled, when no
        step is half done."""
        if self.is_requested:
            self._run_guarded(self._begin)

    def advance(self) -> None:
        """Continues the running audit. May be called after any step."""
        if self._running is not None:
            self._run_guarded(self._advance)

    @property
    def has_answer(self) -> bool:
        """Whether an answer is ready."""
        return self._answer is not None

    def take_answer(self) -> bytes:
        """Takes the answer's frame."""
        frame, self._answer = self._answer, None
        return frame

    def _run_guarded(self, step: Callable[[], None]) -> None:
        """Runs a part of an audit. Adds its time to the audit, and turns errors into refusals."""
        begin = time.perf_counter_ns()
        try:
            step()
        except AuditError as error:
            self._refuse(str(error))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            # The device may have room for the lists later.
            if type(error).__name__ != "OutOfMemoryError":
                self.refusal = reason
            self._refuse(reason)
        if self._running is not None:
            self._running.spent_ns += time.perf_counter_ns() - begin

    def _refuse(self, reason: str) -> None:
        number = self._running.number if self._running else self._requested
        if self._running is not None:
            self._audits.abandon()
        else:
            self._requested = None
        self._running = None
        if number is not None:
            self._answer = wire.encode_audit(number, 0, reason, [], b"")

    def _begin(self) -> None:
        if self.refusal:
            raise AuditError(self.refusal)
        taken = snapshot.take_snapshot(self._scheduler)
        self._running = _Audit(self._requested, taken, self._audits)
        self._requested = None
        digest = DIGEST_BYTES_MAX if self.ordinal >= 0 else HOST_DIGEST_BYTES_MAX
        self._audits.begin(self._running.snapshot, self.stream(), digest)

    def _advance(self) -> None:
        audit = self._running
        if audit.thread is None:
            if self._audits.is_copied():
                audit.start_accounting(snapshot.list_rows(self._scheduler)[1], self._wake)
        elif not audit.thread.is_alive():
            names, spent_ns, report = audit.snapshot.names, audit.spent_ns, audit.report()
            self._running = None
            if audit.number is not None:
                self._answer = wire.encode_audit(audit.number, spent_ns, "", names, report)

    def stream(self) -> int:
        """Returns the scheduler's CUDA stream, which orders the audit after the work that makes
        the snapshot valid; 0 on a CPU."""
        if self.ordinal < 0:
            return 0
        import torch

        return torch.cuda.current_stream().cuda_stream


class _Audit:
    """One running audit."""

    def __init__(self, number: int, taken: snapshot.Snapshot, audits: PageAudits):
        # None when no agent waits for the answer any more.
        self.number: int | None = number
        self.snapshot = taken
        self.spent_ns = 0
        self.thread: threading.Thread | None = None
        self._audits = audits
        self._report: bytes | AuditError = AuditError(
            "the audit's thread has ended without a result"
        )

    def start_accounting(self, rows_now: list[snapshot.Row], done: Callable[[], None]) -> None:
        self.thread = threading.Thread(
            target=self._account, args=(rows_now, done), name="berth-audit", daemon=True
        )
        self.thread.start()

    def _account(self, rows_now: list[snapshot.Row], done: Callable[[], None]) -> None:
        try:
            self._report = self._audits.finish(rows_now)
        except AuditError as error:
            self._report = error
        done()

    def report(self) -> bytes:
        if isinstance(self._report, AuditError):
            raise self._report
        return self._report
