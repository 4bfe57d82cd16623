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
from .library import Failed, Library, Pages

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
        self._number: int | None = None
        self._running: _Audit | None = None
        self._frame: bytes | None = None
        self._pages: Pages | None = None
        self.ordinal = -1
        # What the hello tells the agent about the pool; `refusal` is empty if audits are possible.
        self.device, self.page_bytes, self.refusal = "", 0, ""
        try:
            self._open()
        except Failed as error:
            self.refusal = str(error)
        except Exception as error:
            self.refusal = f"{type(error).__name__}: {error}"

    def _open(self) -> None:
        scheduler = self._scheduler
        self.device, self.ordinal = device(scheduler)
        parts = buffers(scheduler)
        self.page_bytes = sum(buffer.page_bytes for buffer in parts)
        if refusal := snapshot.unauditable(scheduler):
            raise Failed(refusal)
        self._pages = Library().pages(
            page_tokens=scheduler.page_size,
            pages=scheduler.max_total_num_tokens // scheduler.page_size,
            rows=scheduler.req_to_token_pool.req_to_token,
            buffers=parts,
            ordinal=self.ordinal,
        )

    def ask(self, number: int) -> None:
        """Requests an audit. Only the latest request is answered."""
        self._number = number

    def forget(self) -> None:
        """Drops the request and the answer: the agent that asked has disconnected."""
        self._number = self._frame = None
        if self._running is not None:
            self._running.number = None

    @property
    def asked(self) -> bool:
        """Whether a requested audit has not begun."""
        return self._number is not None and self._running is None

    def begin(self) -> None:
        """Begins the requested audit. Must be called before a step's requests are handled, when no
        step is half done."""
        if self.asked:
            self._try(self._begin)

    def go_on(self) -> None:
        """Continues the running audit. May be called after any step."""
        if self._running is not None:
            self._try(self._go_on)

    @property
    def answered(self) -> bool:
        """Whether an answer is ready."""
        return self._frame is not None

    def take(self) -> bytes:
        """Takes the answer's frame."""
        frame, self._frame = self._frame, None
        return frame

    def _try(self, step: Callable[[], None]) -> None:
        begin = time.perf_counter_ns()
        try:
            step()
        except Failed as error:
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
        number = self._running.number if self._running else self._number
        if self._running is not None:
            self._pages.abandon()
        else:
            self._number = None
        self._running = None
        if number is not None:
            self._frame = wire.audited(number, 0, reason, [], b"")

    def _begin(self) -> None:
        if self.refusal:
            raise Failed(self.refusal)
        self._running = _Audit(self._number, snapshot.take(self._scheduler), self._pages)
        self._number = None
        digest = DIGEST_BYTES_MAX if self.ordinal >= 0 else HOST_DIGEST_BYTES_MAX
        self._pages.begin(self._running.cut, self.stream(), digest)

    def _go_on(self) -> None:
        audit = self._running
        if audit.thread is None:
            if self._pages.gathered():
                audit.account(snapshot.rows_of(self._scheduler)[1], self._wake)
        elif not audit.thread.is_alive():
            names, spent_ns, report = audit.cut.names, audit.spent_ns, audit.report()
            self._running = None
            if audit.number is not None:
                self._frame = wire.audited(audit.number, spent_ns, "", names, report)

    def stream(self) -> int:
        """Returns the scheduler's CUDA stream, which orders the audit after the work that makes
        the snapshot valid; 0 on a CPU."""
        if self.ordinal < 0:
            return 0
        import torch

        return torch.cuda.current_stream().cuda_stream


class _Audit:
    """One running audit."""

    def __init__(self, number: int, taken: snapshot.Cut, pages: Pages):
        # None when no agent waits for the answer any more.
        self.number: int | None = number
        self.cut = taken
        self.spent_ns = 0
        self.thread: threading.Thread | None = None
        self._pages = pages
        self._report: bytes | Failed = Failed("the audit's thread has ended without a result")

    def account(self, rows_now: list[snapshot.Row], done: Callable[[], None]) -> None:
        self.thread = threading.Thread(
            target=self._work, args=(rows_now, done), name="berth-audit", daemon=True
        )
        self.thread.start()

    def _work(self, rows_now: list[snapshot.Row], done: Callable[[], None]) -> None:
        try:
            self._report = self._pages.finish(rows_now)
        except Failed as error:
            self._report = error
        done()

    def report(self) -> bytes:
        if isinstance(self._report, Failed):
            raise self._report
        return self._report
