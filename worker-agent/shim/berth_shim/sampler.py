"""Samples one scheduler's state, reports it to the agent, and carries out the agent's commands.

A *sample* is one reading of the KV pool's figures and of the sessions that a hook has *touched*,
which means that they may have changed. A session is a series of turns whose KV the engine keeps
from turn to turn. An *update* reports a sample if something has changed, together with the events
that the hooks have seen since the update before.

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

# The shortest time between two samples of an idle scheduler in which no session was touched.
# Without `--sleep-on-idle` an idle scheduler spins, and would sample all the time.
IDLE_SECONDS = 0.05
# A running turn's KV grows by a token in each step, but isn't read in each step. The sessions of
# running turns are read again in the first step after this time, and at the end of their turn.
RUNNING_SECONDS = 0.05


class Sampler:
    """Samples one scheduler, and knows what the agent has been sent."""

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
        # The connection for which the following state holds.
        self._connection_number = 0
        # The encoded events that are still to be sent.
        self._events: list[bytes] = []
        # Whether the next update must have the full table of sessions.
        self._is_full_update_due = True
        # The number of the next update on this connection.
        self._seq = 0
        # The latest figures that were sent on this connection.
        self._head_sent: wire.Head | None = None
        # Counters since the start. A recount is a sample that reads all sessions again because the
        # sum of the held tokens was wrong.
        self._events_lost = self._samples = self._samples_ns = self._recounts = 0
        # The uncached tokens after the latest recount on an idle engine. As long as there are so
        # many, another recount wouldn't help.
        self._unexplained_tokens = 0
        self._sampled_at_seconds = self._running_read_at_seconds = 0.0

    # Called by the hooks on sessions. `id` is the session's id.

    def mark_touched(self, id: str) -> None:
        """Marks a session as possibly changed, so that the next sample reads it."""
        if self._link.is_connected:
            self._table.touched.add(id)

    def report_open(self, id: str, ok: bool) -> None:
        """Reports that the engine has answered a request to open a session."""
        self._queue_event(id, wire.encode_opened, ok)

    def report_close(self, id: str) -> None:
        """Reports that the engine has closed a session."""
        self._queue_event(id, wire.encode_closed)

    def report_commit(self, id: str, request: Any) -> None:
        """Reports that a turn became part of the session's history, because it has ended or was put
        back into the queue (retracted)."""
        history_tokens = len(request.origin_input_ids) + answer_tokens(request)
        is_retracted = not request.finished()
        self._queue_event(
            id, wire.encode_committed, str(request.rid), history_tokens, is_retracted
        )

    def report_abort(self, id: str, was_running: bool) -> None:
        """Reports that a turn was aborted. If it was running, the session's row is free now."""
        self._queue_event(id, wire.encode_aborted, was_running)

    def report_flush(self) -> None:
        """Reports that the engine has discarded the KV of all sessions."""
        self._is_full_update_due = True

    def _queue_event(self, id: str, encode: Callable[..., bytes], *values: Any) -> None:
        if not self._link.is_connected or not wire.is_nameable(id):
            return
        self._reset_if_reconnected()
        self._table.touched.add(id)
        if len(self._events) < wire.EVENTS_MAX:
            self._events.append(encode(id, *values))
        else:
            self._events_lost += 1
            self._is_full_update_due = True

    def start_publishing_rows(self, dp_rank: int) -> None:
        """Starts to publish the request table's rows if a file for them is configured."""
        if path := table_path(dp_rank):
            try:
                auditor = self._auditor
                self._row_publisher = RowPublisher(
                    self._scheduler, path, auditor.cuda_ordinal, auditor.current_stream
                )
            except AuditError as error:
                # The warning goes to the engine's log. An agent that finds no file requests its
                # audits from the shim instead.
                logging.getLogger(__name__).warning("can't publish rows to %s: %s", path, error)

    # Called from the scheduler's loop.

    @property
    def is_publishing_rows(self) -> bool:
        """Whether the request table's rows are published after each step."""
        return self._row_publisher is not None

    def begin_step(self) -> None:
        """Must be called before each step changes rows, if rows are published."""
        self._row_publisher.begin_step()

    @property
    def has_work(self) -> bool:
        """Whether a command, an audit or a chunk of the tree's publication waits to be done."""
        return self._link.has_commands or self._auditor.can_begin or self._republisher.is_running

    def run_commands(self) -> None:
        """Carries out the agent's commands. Called before a step's requests are handled."""
        self._reset_if_reconnected()
        for kind, argument in self._link.take_commands():
            if kind == wire.SAMPLE_NOW:
                self._is_full_update_due = True
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
        """Samples between steps and while the scheduler is idle, if something may have changed or
        the latest sample is old."""
        if self._row_publisher is not None:
            self._row_publisher.end_step()
        self._advance_audit()
        if not self._link.is_connected:
            return
        begin_ns = time.perf_counter_ns()
        now = begin_ns / 1e9
        has_news = self._is_full_update_due or self._table.touched or self._events
        if has_news or now - self._sampled_at_seconds >= IDLE_SECONDS:
            self._sample(begin_ns)

    def end_step(self, batch: Any) -> None:
        """Samples after a step, when the engine has processed the step's results."""
        if self._row_publisher is not None:
            self._row_publisher.end_step()
        if not self._link.is_connected:
            return
        begin_ns = time.perf_counter_ns()
        now = begin_ns / 1e9
        # A prefill changes the rows and the tree, so its sessions are always read. A decoding step
        # only adds a token to each turn.
        if batch.forward_mode.is_extend() or now - self._running_read_at_seconds >= RUNNING_SECONDS:
            self._running_read_at_seconds = now
            for request in batch.reqs:
                session = request.session
                if session is not None and session.streaming:
                    self._table.touched.add(session.session_id)
        self._sample(begin_ns)
        self._advance_audit()

    def _advance_audit(self) -> None:
        """Continues a running audit, and sends its answer once there is one."""
        self._auditor.advance()
        if not self._auditor.has_answer:
            return
        # The audit's thread has woken the scheduler with a byte.
        self._link.clear_wake()
        if not self._link.is_connected:
            self._auditor.forget_request()
        elif self._link.flush():
            self._link.send(self._auditor.take_answer(), self._connection_number)

    def _sample(self, begin_ns: int) -> None:
        """Takes a sample, and sends an update if something has changed. `begin_ns` is the value of
        the performance counter when the hook was called."""
        if not self._link.flush():
            return
        self._sampled_at_seconds = begin_ns / 1e9
        self._reset_if_reconnected()
        head = self._read_state()
        is_explained = head.uncached_tokens in (0, self._unexplained_tokens)
        if not is_explained and self._scheduler.is_fully_idle():
            # Only running requests hold uncached tokens, and none runs. So a hook has missed a
            # change, and the sum of the held tokens is wrong.
            self._recounts += 1
            self._is_full_update_due = True
            head = self._read_state()
            self._unexplained_tokens = head.uncached_tokens
        if self._is_full_update_due or self._events or head != self._head_sent:
            self._send_update(head)
        # One update may not have room for all changed sessions.
        while self._table.has_changes() and self._link.flush():
            self._send_update(head)
        self._samples += 1
        self._samples_ns += time.perf_counter_ns() - begin_ns

    def _reset_if_reconnected(self) -> None:
        """Forgets what was sent if the connection is new since the latest call."""
        if self._connection_number != self._link.connection_number:
            self._connection_number = self._link.connection_number
            self._auditor.forget_request()
            self._is_full_update_due, self._seq, self._head_sent = True, 0, None
            self._events.clear()

    def _read_state(self) -> wire.Head:
        """Reads the touched sessions (all of them for a full update) and the pool's figures."""
        if self._is_full_update_due:
            self._table.rebuild()
        self._table.read_touched()
        return self._read_head()

    def _send_update(self, head: wire.Head) -> None:
        """Sends the figures, the events, and as many changed sessions as fit in one update."""
        ended, changed = self._table.take_changes()
        complete = head._replace(
            seq=self._seq,
            events_lost=self._events_lost,
            samples=self._samples,
            samples_ns=self._samples_ns,
            recounts=self._recounts,
            uncached_tokens=max(0, head.uncached_tokens),
            is_full_table=self._is_full_update_due,
        )
        frame = wire.encode_update(complete, self._events, ended, changed)
        self._link.send(frame, self._connection_number)
        self._seq += 1
        self._head_sent = head
        self._is_full_update_due = False
        self._events.clear()

    def _read_head(self) -> wire.Head:
        """Reads the figures of the pool and the queues. The shim's own counters stay 0, so that two
        heads are equal if the engine's state is."""
        scheduler, tree = self._scheduler, self._scheduler.tree_cache
        pool = scheduler.pool_stats_observer.get_pool_stats()
        protected = (
            tree.full_protected_size()
            if pool.is_hybrid_swa or pool.is_hybrid_ssm
            else tree.protected_size()
        )
        free_or_cached = pool.full_available_size + pool.full_evictable_size + protected
        row_pool = scheduler.req_to_token_pool
        return wire.Head(
            seq=0,
            events_lost=0,
            samples=0,
            samples_ns=0,
            recounts=0,
            pool_tokens=pool.full_capacity,
            available_tokens=pool.full_available_size,
            evictable_tokens=pool.full_evictable_size,
            protected_tokens=protected,
            held_tokens=self._table.held_tokens,
            uncached_tokens=pool.full_capacity - free_or_cached - self._table.held_tokens,
            rows_total=row_pool.size,
            rows_free=row_pool.available_size(),
            running=len(scheduler.running_batch.reqs),
            waiting=len(scheduler.waiting_queue),
            is_full_table=False,
        )
