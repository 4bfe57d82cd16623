"""Samples one scheduler's state, reports it to the agent, and carries out the agent's commands.

A session is a series of turns whose KV the engine keeps from turn to turn. A session is *touched*
when a hook of the shim has seen it, so it may have changed. A *sample* is one reading of the KV
pool's figures and of all touched sessions. If something has changed, an *update* reports the sample
to the agent, together with the events that the hooks have seen since the update before.

The hooks that `__init__` installs call the `Sampler`. `table` reads the sessions, and `link` sends
the frames. For the agent's commands, `audit`, `republish` and `demotion` do the work. Everything
here runs on the scheduler's thread, and nothing waits. While no agent is connected, each hook costs
one comparison.
"""

import logging
import time
from typing import Any

from msgspec.structs import replace

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
# The longest time between two updates. The agent takes a shim that says nothing for long as a sign
# that the scheduler hangs.
HEARTBEAT_SECONDS = 1.0
# A running turn's KV grows by a token in each step, but its session isn't read in each step. The
# sessions of running turns are read in the first step after this time, and when their turn ends.
RUNNING_SECONDS = 0.05


class Sampler:
    """Samples one scheduler, and knows what the agent has been sent."""

    def __init__(
        self,
        scheduler: Any,
        link: Link,
        demotion_refusal: str | None,
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
        # The events that are still to be sent.
        self._unsent_events: list[wire.Event] = []
        # Whether the next update must begin a full table of the sessions.
        self._is_full_table_due = True
        # The number of the next update on this connection.
        self._next_seq = 0
        # The latest figures that were sent on this connection, without the shim's own counters.
        self._figures_sent: wire.RankFacts | None = None
        # Counters since the start. A recount is a sample that reads all sessions again because the
        # sum of the held tokens was wrong.
        self._events_lost = self._samples = self._samples_ns = self._recounts = 0
        # The uncached tokens after the latest recount on an idle engine. While this number stays
        # the same, another recount wouldn't help.
        self._unexplained_tokens = 0
        # How often the weights have changed, and whether there is KV from before the last change.
        self._weight_changes, self._has_old_kv = 0, False
        # When the latest sample was taken, and when the sessions of running turns were last read.
        self._sampled_at_seconds = self._running_read_at_seconds = 0.0
        # When the latest update was sent.
        self._sent_at_seconds = 0.0

    # Called by the hooks on sessions. `id` is the session's id.

    def mark_touched(self, id: str) -> None:
        """Marks a session as possibly changed, so that the next sample reads it."""
        if self._link.is_connected:
            self._table.touched_ids.add(id)

    def report_open(self, id: str, ok: bool) -> None:
        """Reports that the engine has answered a request to open a session."""
        self._queue_event(wire.Opened, id, ok)

    def report_close(self, id: str) -> None:
        """Reports that the engine has closed a session."""
        self._queue_event(wire.Closed, id)

    def report_commit(self, id: str, request: Any) -> None:
        """Reports that a turn became part of the session's history, because it has ended or was put
        back into the queue (retracted)."""
        history_tokens = len(request.origin_input_ids) + answer_tokens(request)
        is_retracted = not request.finished()
        self._queue_event(wire.Committed, id, str(request.rid), history_tokens, is_retracted)

    def report_abort(self, id: str, was_running: bool) -> None:
        """Reports that a turn was aborted. If it was running, the session's row is free now."""
        self._queue_event(wire.Aborted, id, was_running)

    def report_flush(self) -> None:
        """Reports that the engine has discarded the KV of all sessions."""
        self._is_full_table_due = True
        self._has_old_kv = False

    def report_weights(self) -> None:
        """Reports that the engine's weights may have changed."""
        self._weight_changes += 1
        figures = self._read_figures()
        self._has_old_kv = figures.available_tokens < figures.pool_tokens

    def _queue_event(self, kind: type[wire.Event], id: str, *fields: Any) -> None:
        """Queues an event of a session for the next update. `kind` is the class of the event, and
        `fields` are its fields after the id."""
        if not self._link.is_connected or not wire.is_nameable(id):
            return
        self._reset_if_reconnected()
        self._table.touched_ids.add(id)
        if len(self._unsent_events) < wire.EVENTS_MAX:
            self._unsent_events.append(kind(id, *fields))
        else:
            self._events_lost += 1
            self._is_full_table_due = True

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
        """Whether a command, a requested audit, or a chunk of the tree to publish is waiting."""
        return self._link.has_commands or self._auditor.can_begin or self._republisher.is_running

    def run_commands(self) -> None:
        """Carries out the agent's commands. Called before a step's requests are handled."""
        self._reset_if_reconnected()
        for command in self._link.take_commands():
            match command:
                case wire.SampleNow():
                    self._is_full_table_due = True
                case wire.Audit(number):
                    self._auditor.request(number)
                case wire.Republish():
                    self._republisher.begin()
                case wire.Demote(id):
                    refusal = self._demotion_refusal or demotion.demote(self._scheduler, id)
                    self._queue_event(wire.Demoted, id, refusal or None)
        self._auditor.begin()
        self._republisher.publish_chunk()

    def send_heartbeat(self) -> None:
        """Sends an update if none was sent for a while, although nothing has changed. Called in each
        pass of the scheduler's loop, also while the engine is paused."""
        if not self._link.is_connected:
            return
        begin_ns = time.perf_counter_ns()
        if begin_ns / 1e9 - self._sent_at_seconds < HEARTBEAT_SECONDS or not self._link.flush():
            return
        self._reset_if_reconnected()
        if self._is_full_table_due or self._figures_sent is None:
            self._sample(begin_ns)
        else:
            self._send_update(self._figures_sent)

    def sample_idle(self) -> None:
        """Samples between steps and while the scheduler is idle, if something may have changed or
        the latest sample is old."""
        if self._row_publisher is not None:
            self._row_publisher.end_step()
        self._advance_audit()
        if not self._link.is_connected:
            return
        begin_ns = time.perf_counter_ns()
        now_seconds = begin_ns / 1e9
        has_changes = self._is_full_table_due or self._table.touched_ids or self._unsent_events
        if has_changes or now_seconds - self._sampled_at_seconds >= IDLE_SECONDS:
            self._sample(begin_ns)

    def end_step(self, batch: Any) -> None:
        """Samples after a step, when the engine has processed the step's results."""
        if self._row_publisher is not None:
            self._row_publisher.end_step()
        if not self._link.is_connected:
            return
        begin_ns = time.perf_counter_ns()
        now_seconds = begin_ns / 1e9
        # A prefill changes the rows and the tree, so its sessions are always read. A decoding step
        # only adds a token to each turn.
        is_read_due = now_seconds - self._running_read_at_seconds >= RUNNING_SECONDS
        if batch.forward_mode.is_extend() or is_read_due:
            self._running_read_at_seconds = now_seconds
            for request in batch.reqs:
                session = request.session
                if session is not None and session.streaming:
                    self._table.touched_ids.add(session.session_id)
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
        figures = self._read_state()
        is_explained = figures.uncached_tokens in (0, self._unexplained_tokens)
        if not is_explained and self._scheduler.is_fully_idle():
            # Only running requests hold uncached tokens, and no request runs. So a hook has missed
            # a change, and the sum of the held tokens is wrong.
            self._recounts += 1
            self._is_full_table_due = True
            figures = self._read_state()
            self._unexplained_tokens = figures.uncached_tokens
        if self._is_full_table_due or self._unsent_events or figures != self._figures_sent:
            self._send_update(figures)
        # One update may not have room for all changed sessions.
        while self._table.has_changes() and self._link.flush():
            self._send_update(figures)
        self._samples += 1
        self._samples_ns += time.perf_counter_ns() - begin_ns

    def _reset_if_reconnected(self) -> None:
        """Forgets what was sent if the connection is new since the latest call."""
        if self._connection_number != self._link.connection_number:
            self._connection_number = self._link.connection_number
            self._auditor.forget_request()
            self._is_full_table_due, self._next_seq, self._figures_sent = True, 0, None
            self._unsent_events.clear()

    def _read_state(self) -> wire.RankFacts:
        """Reads the touched sessions (all of them for a full update) and the pool's figures."""
        if self._is_full_table_due:
            self._table.rebuild()
        self._table.read_touched()
        return self._read_figures()

    def _send_update(self, figures: wire.RankFacts) -> None:
        """Sends the figures, the events, and as many changed sessions as fit in one update."""
        ended_ids, changed_sessions = self._table.take_changes()
        complete_figures = replace(
            figures,
            uncached_tokens=max(0, figures.uncached_tokens),
            events_lost=self._events_lost,
            recounts=self._recounts,
            samples=self._samples,
            samples_ns=self._samples_ns,
        )
        update = wire.Update(
            self._next_seq, complete_figures, self._is_full_table_due, self._unsent_events,
            ended_ids, changed_sessions,
        )
        self._link.send(wire.encode(update), self._connection_number)
        self._next_seq += 1
        self._figures_sent = figures
        self._sent_at_seconds = time.perf_counter()
        self._is_full_table_due = False
        self._unsent_events.clear()

    def _read_figures(self) -> wire.RankFacts:
        """Reads the figures of the pool and the queues. The shim's own counters stay 0, so that
        the figures of two samples are equal if the engine's state is."""
        scheduler, tree = self._scheduler, self._scheduler.tree_cache
        pool_stats = scheduler.pool_stats_observer.get_pool_stats()
        protected_tokens = (
            tree.full_protected_size()
            if pool_stats.is_hybrid_swa or pool_stats.is_hybrid_ssm
            else tree.protected_size()
        )
        # SGLang 0.5.20 doesn't repeat the pool's size here.
        pool_tokens = getattr(pool_stats, "full_capacity", None)
        if pool_tokens is None:
            pool_tokens = scheduler.max_total_num_tokens
        available_tokens = pool_stats.full_available_size
        evictable_tokens = pool_stats.full_evictable_size
        held_tokens = self._table.held_tokens
        accounted_tokens = available_tokens + evictable_tokens + protected_tokens + held_tokens
        row_pool = scheduler.req_to_token_pool
        return wire.RankFacts(
            pool_tokens=pool_tokens,
            available_tokens=available_tokens,
            evictable_tokens=evictable_tokens,
            protected_tokens=protected_tokens,
            held_tokens=held_tokens,
            uncached_tokens=pool_tokens - accounted_tokens,
            rows_total=row_pool.size,
            rows_free=row_pool.available_size(),
            running=len(scheduler.running_batch.reqs),
            waiting=len(scheduler.waiting_queue),
            weight_changes=self._weight_changes,
            has_old_kv=self._has_old_kv,
        )
