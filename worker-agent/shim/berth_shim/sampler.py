"""Reports one scheduler's state to the agent: collects what the hooks see, and reads the pool.

Everything here runs on the scheduler's thread, and nothing waits. While no agent is connected, each
hook costs one comparison.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from . import demotion, wire
from .audit import Auditor
from .library import AuditError
from .link import Link
from .publish import RowPublisher, table_path
from .republish import Republisher
from .table import SessionTable, answer_tokens

# The sampling interval of an idle scheduler while no hook is called. Without `--sleep-on-idle` an
# idle scheduler spins.
IDLE_SECONDS = 0.05
# A running turn's KV grows by a token per step. Its facts are at most this old, and exact at its
# end.
RUNNING_SECONDS = 0.05


class Sampler:
    """The state of one scheduler, and how much of it was sent to the agent."""

    def __init__(
        self,
        scheduler: Any,
        link: Link,
        demotion_refusal: str,
        auditor: Auditor,
        republisher: Republisher,
    ):
        self._scheduler = scheduler
        self._link = link
        self._auditor = auditor
        self._republisher = republisher
        self._row_publisher: RowPublisher | None = None
        self._demotion_refusal = demotion_refusal
        self._table = SessionTable(scheduler)
        self._connection_number = 0
        self._events: list[bytes] = []
        self._events_lost = 0
        self._full_update_due = True
        self._seq = 0
        self._samples = self._samples_ns = self._recounts = 0
        self._head_sent: wire.Head | None = None
        # The uncached tokens that a recount on an idle engine didn't explain. Another recount
        # wouldn't help.
        self._unexplained = 0
        self._sampled_at_seconds = self._running_read_at_seconds = 0.0

    # Called by the hooks.

    def mark_touched(self, id: str) -> None:
        if self._link.is_connected:
            self._table.touched.add(id)

    def report_open(self, id: str, ok: bool) -> None:
        self._queue_event(id, wire.encode_opened, ok)

    def report_close(self, id: str) -> None:
        self._queue_event(id, wire.encode_closed)

    def report_commit(self, id: str, request: Any) -> None:
        """Reports that a turn became part of the session's history: it ended, or was retracted to
        the queue."""
        history = len(request.origin_input_ids) + answer_tokens(request)
        retracted = not request.finished()
        self._queue_event(id, wire.encode_committed, str(request.rid), history, retracted)

    def report_abort(self, id: str, released: bool) -> None:
        self._queue_event(id, wire.encode_aborted, released)

    def report_flush(self) -> None:
        self._full_update_due = True

    def _queue_event(self, id: str, encode: Callable[..., bytes], *values: Any) -> None:
        if not self._link.is_connected or not wire.is_nameable(id):
            return
        self._reset_if_reconnected()
        self._table.touched.add(id)
        if len(self._events) < wire.EVENTS_MAX:
            self._events.append(encode(id, *values))
        else:
            self._events_lost += 1
            self._full_update_due = True

    def start_publishing_rows(self, dp_rank: int) -> None:
        """Starts publishing rows if a table file is configured."""
        if path := table_path(dp_rank):
            try:
                auditor = self._auditor
                self._row_publisher = RowPublisher(
                    self._scheduler, path, auditor.ordinal, auditor.stream
                )
            except AuditError as error:
                # This goes to the engine's log. An agent that finds no table has the audit made in
                # the engine.
                logging.getLogger(__name__).warning("can't publish rows to %s: %s", path, error)

    # Called from the scheduler's loop.

    @property
    def is_publishing_rows(self) -> bool:
        """Whether rows are published after each step."""
        return self._row_publisher is not None

    def begin_step(self) -> None:
        """Must be called before a step changes rows, if rows are published."""
        self._row_publisher.begin_step()

    @property
    def has_work(self) -> bool:
        """Whether commands, an audit or a chunk of the tree are waiting to be done."""
        return self._link.has_commands or self._auditor.is_requested or self._republisher.is_running

    def run_commands(self) -> None:
        """Carries out the agent's commands. Called before a step's requests are handled."""
        self._reset_if_reconnected()
        for kind, argument in self._link.take_commands():
            if kind == wire.SAMPLE_NOW:
                self._full_update_due = True
            elif kind == wire.AUDIT:
                self._auditor.request(argument)
            elif kind == wire.REPUBLISH:
                self._republisher.begin()
            else:
                refusal = self._demotion_refusal or demotion.demote(self._scheduler, argument)
                self._queue_event(argument, wire.encode_demoted, refusal)
        self._auditor.begin()
        self._republisher.publish_chunk()

    def sample_idle(self) -> None:
        """Called between steps and while idle."""
        if self._row_publisher is not None:
            self._row_publisher.end_step()
        self._advance_audit()
        if not self._link.is_connected:
            return
        begin = time.perf_counter_ns()
        now = begin / 1e9
        changed = self._full_update_due or self._table.touched or self._events
        if changed or now - self._sampled_at_seconds >= IDLE_SECONDS:
            self._sample(begin)

    def end_step(self, batch: Any) -> None:
        """Called when a step's results are in."""
        if self._row_publisher is not None:
            self._row_publisher.end_step()
        if not self._link.is_connected:
            return
        begin = time.perf_counter_ns()
        now = begin / 1e9
        # A prefill takes rows and moves prefixes into the tree; decoding only adds tokens.
        if batch.forward_mode.is_extend() or now - self._running_read_at_seconds >= RUNNING_SECONDS:
            self._running_read_at_seconds = now
            for request in batch.reqs:
                session = request.session
                if session is not None and session.streaming:
                    self._table.touched.add(session.session_id)
        self._sample(begin)
        self._advance_audit()

    def _advance_audit(self) -> None:
        self._auditor.advance()
        if not self._auditor.has_answer:
            return
        # Clears the wake-up byte that the audit's thread has sent.
        self._link.clear_wake()
        if not self._link.is_connected:
            self._auditor.forget_request()
        elif self._link.flush():
            self._link.send(self._auditor.take_answer(), self._connection_number)

    def _sample(self, begin: int) -> None:
        """Samples the pool. `begin` is the performance counter when the hook was called, in ns."""
        if not self._link.flush():
            return
        self._sampled_at_seconds = begin / 1e9
        self._reset_if_reconnected()
        head = self._read_state()
        if head.uncached not in (0, self._unexplained) and self._scheduler.is_fully_idle():
            # Nothing runs, so nothing should be uncached: a hook has missed a change.
            self._recounts += 1
            self._full_update_due = True
            head = self._read_state()
            self._unexplained = head.uncached
        if self._full_update_due or self._events or head != self._head_sent:
            self._send_update(head)
        while self._table.has_changes() and self._link.flush():
            self._send_update(head)
        self._samples += 1
        self._samples_ns += time.perf_counter_ns() - begin

    def _reset_if_reconnected(self) -> None:
        """Resets what was sent if another agent has connected since."""
        if self._connection_number != self._link.connection_number:
            self._connection_number = self._link.connection_number
            self._auditor.forget_request()
            self._full_update_due, self._seq, self._head_sent = True, 0, None
            self._events.clear()

    def _read_state(self) -> wire.Head:
        if self._full_update_due:
            self._table.rebuild()
        self._table.read_touched()
        return self._read_head()

    def _send_update(self, head: wire.Head) -> None:
        ended, changed = self._table.take_changes()
        complete = head._replace(
            seq=self._seq,
            events_lost=self._events_lost,
            samples=self._samples,
            samples_ns=self._samples_ns,
            recounts=self._recounts,
            uncached=max(0, head.uncached),
            full=self._full_update_due,
        )
        frame = wire.encode_update(complete, self._events, ended, changed)
        self._link.send(frame, self._connection_number)
        self._seq += 1
        self._head_sent = head
        self._full_update_due = False
        self._events.clear()

    def _read_head(self) -> wire.Head:
        """Reads the pool's figures. Fields that only count messages stay zero, so that two heads
        can be compared."""
        scheduler, tree = self._scheduler, self._scheduler.tree_cache
        pool = scheduler.pool_stats_observer.get_pool_stats()
        protected = (
            tree.full_protected_size()
            if pool.is_hybrid_swa or pool.is_hybrid_ssm
            else tree.protected_size()
        )
        cached = pool.full_available_size + pool.full_evictable_size + protected
        rows = scheduler.req_to_token_pool
        return wire.Head(
            seq=0,
            events_lost=0,
            samples=0,
            samples_ns=0,
            recounts=0,
            total=pool.full_capacity,
            available=pool.full_available_size,
            evictable=pool.full_evictable_size,
            protected=protected,
            held=self._table.held_tokens,
            uncached=pool.full_capacity - cached - self._table.held_tokens,
            rows_total=rows.size,
            rows_free=rows.available_size(),
            running=len(scheduler.running_batch.reqs),
            waiting=len(scheduler.waiting_queue),
            full=False,
        )
