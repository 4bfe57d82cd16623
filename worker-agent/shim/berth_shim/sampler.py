"""Samples one scheduler's state, reports it to the agent, and carries out the agent's commands.

A session is *touched* when a hook has seen it, so it may have changed. A *sample* is one reading of
the KV pool's figures and of all touched sessions. An *update* reports it if something has changed,
with the events that the hooks have seen since the update before.

A *request* of the agent concerns one session. Its answer repeats its number, so the agent never
takes anything else for it. An answer is an event, and is never dropped: a request waits until its
answer has room.

A scheduler may have thousands of sessions, and a pass of its loop must stay short. So each pass has
a limited time for requests, and another for a full table of the sessions. Everything here runs on
the scheduler's thread, and nothing waits. While no agent is connected, each hook costs one
comparison.
"""

import time
from collections import deque
from typing import Any

from msgspec.structs import replace

from . import demotion, wire
from .audit import Auditor
from .host import HostTier
from .prefetch import Prefetcher
from .link import Link
from .republish import Republisher
from .table import SessionTable, answer_tokens

# Without `--sleep-on-idle` an idle scheduler spins, and would sample all the time.
IDLE_SECONDS = 0.05
# The agent takes a shim that says nothing for long as a sign that the scheduler hangs.
HEARTBEAT_SECONDS = 1.0
# A running turn's KV grows by a token in each step. Its session is read in the first step after
# this time, and when the turn ends.
RUNNING_SECONDS = 0.05
# In one pass, for the agent's requests, and for a full table. Each begins at least one part.
REQUESTS_SECONDS = TABLE_SECONDS = 0.002
# With so many events waiting, no request is carried out. The rest is for the events of hooks.
ANSWERS_MAX = wire.EVENTS_MAX // 2
# The agent inspects a session after it has aborted its turn over another connection. The engine
# receives the abort at the latest in the pass after the one that takes the request.
INSPECTION_PASSES = 2


class Sampler:
    """Samples one scheduler, and knows what the agent has been sent."""

    def __init__(
        self,
        scheduler: Any,
        link: Link,
        demotion_refusal: str | None,
        auditor: Auditor,
        republisher: Republisher,
        host: HostTier,
        prefetcher: Prefetcher,
    ):
        self._scheduler = scheduler
        self._link = link
        self._auditor = auditor
        self._republisher = republisher
        self._host = host
        self._prefetcher = prefetcher
        self._demotion_refusal = demotion_refusal
        self._table = SessionTable(scheduler)
        # The following state holds for this connection.
        self._connection_number = 0
        self._unsent_events: list[wire.Event] = []
        self._is_full_table_due = True
        # Whether the next update begins a full table, and whether one's end is still to come.
        self._begins_table = self._is_table_open = False
        # An inspection comes with the first pass that may carry it out. `_pass` counts the passes
        # that had work.
        self._demotions: deque[wire.Demote] = deque()
        self._prefetches: deque[wire.Prefetch] = deque()
        self._inspections: deque[tuple[int, wire.Inspect]] = deque()
        self._pass = 0
        self._next_seq = 0
        # Those sent last on this connection, without the shim's own counters.
        self._figures_sent: wire.RankFacts | None = None
        # A recount reads all sessions again because the sum of the held tokens was wrong.
        self._events_lost = self._samples = self._samples_ns = self._recounts = 0
        # The uncached tokens after the latest recount on an idle engine: while this number stays
        # the same, another recount wouldn't help.
        self._unexplained_tokens = 0
        self._is_recounting = False
        # Whether there is KV from before the latest change of the weights.
        self._weight_changes, self._has_old_kv = 0, False
        self._sampled_at_seconds = self._running_read_at_seconds = 0.0
        self._sent_at_seconds = 0.0

    # Called by the hooks on sessions.

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
        """Reports that a turn is now history: it has ended, or was retracted into the queue."""
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
        is_host_in_use = figures.host is not None and figures.host.used_tokens > 0
        self._has_old_kv = figures.available_tokens < figures.pool_tokens or is_host_in_use

    def _queue_event(self, kind: type[wire.Event], id: str, *fields: Any) -> None:
        """Queues a session's event for the next update. `fields` follow the id."""
        if not self._link.is_connected or not wire.is_nameable(id):
            return
        self._reset_if_reconnected()
        self._table.touched_ids.add(id)
        if len(self._unsent_events) < wire.EVENTS_MAX:
            self._unsent_events.append(kind(id, *fields))
        else:
            self._events_lost += 1
            self._is_full_table_due = True

    # Called from the scheduler's loop.

    @property
    def has_work(self) -> bool:
        """Whether a command, a requested audit, or a chunk of the tree to publish is waiting."""
        return bool(
            self._link.has_commands or self._demotions or self._inspections or self._prefetches
            or self._auditor.can_begin or self._republisher.is_running
        )

    def run_commands(self) -> None:
        """Carries out the agent's commands. Called before a step's requests are handled."""
        self._reset_if_reconnected()
        self._pass += 1
        for command in self._link.take_commands():
            match command:
                case wire.SampleNow():
                    self._is_full_table_due = True
                case wire.Audit(number):
                    self._auditor.request(number)
                case wire.Republish():
                    self._republisher.begin()
                case wire.Demote():
                    self._demotions.append(command)
                case wire.Prefetch():
                    self._prefetches.append(command)
                case wire.Inspect():
                    self._inspections.append((self._pass + INSPECTION_PASSES, command))
        self._carry_out_requests()
        self._auditor.begin()
        self._republisher.publish_chunk()

    def _carry_out_requests(self) -> None:
        """Carries out requests while there is time and room for their answers."""
        deadline_seconds = time.perf_counter() + REQUESTS_SECONDS
        while len(self._unsent_events) < ANSWERS_MAX:
            if self._inspections and self._inspections[0][0] <= self._pass:
                _, command = self._inspections.popleft()
                facts = self._table.facts(command.session)
                self._unsent_events.append(wire.Inspected(command.number, facts))
            elif self._demotions:
                self._demote(self._demotions.popleft())
            elif self._prefetches:
                self._prefetch(self._prefetches.popleft())
            else:
                break
            if time.perf_counter() >= deadline_seconds:
                break
        if self._inspections or self._demotions or self._prefetches:
            # An idle scheduler must not sleep before the next pass.
            self._link.wake()

    def _demote(self, command: wire.Demote) -> None:
        """Demotes a session, and queues the answer."""
        number, id = command.number, command.session
        refusal = self._demotion_refusal or demotion.demote(self._scheduler, id)
        self._table.touched_ids.add(id)
        self._unsent_events.append(wire.Demoted(number, id, refusal or None))

    def _prefetch(self, command: wire.Prefetch) -> None:
        """Begins to load a session's KV, and queues the answer."""
        tokens, refusal = self._prefetcher.prefetch(command.session, command.tokens_max)
        answer = wire.Prefetched(command.number, command.session, tokens, refusal or None)
        self._unsent_events.append(answer)

    def send_heartbeat(self) -> None:
        """Sends an update if none was sent for a while, although nothing has changed. Called in
        each pass, also while the engine is paused."""
        if not self._link.is_connected:
            return
        begin_ns = time.perf_counter_ns()
        now_seconds = begin_ns / 1e9
        # A paused engine calls no other hook that could go on with a full table.
        is_unfinished = self._is_table_open and now_seconds - self._sampled_at_seconds > IDLE_SECONDS
        is_due = is_unfinished or now_seconds - self._sent_at_seconds >= HEARTBEAT_SECONDS
        if not is_due or not self._link.flush():
            return
        self._reset_if_reconnected()
        if self._is_full_table_due or self._is_table_open or self._figures_sent is None:
            self._sample(begin_ns)
        else:
            self._send_update(self._figures_sent)

    def sample_idle(self) -> None:
        """Samples between steps and while idle, if that is due or something may have changed."""
        self._advance_audit()
        if not self._link.is_connected:
            return
        begin_ns = time.perf_counter_ns()
        now_seconds = begin_ns / 1e9
        has_changes = (
            self._is_full_table_due or self._is_table_open or self._table.touched_ids
            or self._table.has_changes() or self._unsent_events
        )
        if has_changes or now_seconds - self._sampled_at_seconds >= IDLE_SECONDS:
            self._sample(begin_ns)

    def end_step(self, batch: Any) -> None:
        """Samples after a step, when the engine has processed the step's results."""
        if not self._link.is_connected:
            return
        begin_ns = time.perf_counter_ns()
        now_seconds = begin_ns / 1e9
        # A prefill changes the rows and the tree. A decoding step only adds a token to each turn.
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
        self._link.clear_wake()
        if not self._link.is_connected:
            self._auditor.forget_request()
        elif self._link.flush():
            self._link.send(self._auditor.take_answer(), self._connection_number)

    def _sample(self, begin_ns: int) -> None:
        """Takes a sample, and reports changes. `begin_ns` is when the hook was called."""
        if not self._link.flush():
            return
        self._sampled_at_seconds = begin_ns / 1e9
        self._reset_if_reconnected()
        deadline_seconds = self._sampled_at_seconds + TABLE_SECONDS
        figures = self._read_state(deadline_seconds)
        if figures is not None and self._is_recount_due(figures):
            self._is_full_table_due = self._is_recounting = True
            figures = self._read_state(deadline_seconds)
        if figures is not None and self._is_recounting:
            self._is_recounting, self._unexplained_tokens = False, figures.uncached_tokens
        has_figures = figures is not None and figures != self._figures_sent
        if self._begins_table or self._unsent_events or has_figures:
            self._send_update(figures)
        # One update may not have room for all changed sessions.
        while self._has_table_to_send() and self._link.flush():
            self._send_update(figures)
            if time.perf_counter() >= deadline_seconds:
                break
        if self._is_table_open or self._table.has_changes():
            # An idle scheduler must not sleep before the next pass.
            self._link.wake()
        self._samples += 1
        self._samples_ns += time.perf_counter_ns() - begin_ns

    def _is_recount_due(self, figures: wire.RankFacts) -> bool:
        """Whether all sessions must be read again. Only running requests hold uncached tokens. If
        none runs, a hook has missed a change, and the sum of the held tokens is wrong."""
        is_explained = figures.uncached_tokens in (0, self._unexplained_tokens)
        if is_explained or self._is_recounting or not self._scheduler.is_fully_idle():
            return False
        self._recounts += 1
        return True

    def _has_table_to_send(self) -> bool:
        """Whether sessions are still to be sent, or the end of a full table."""
        return self._table.has_changes() or (self._is_table_open and not self._table.is_scanning)

    def _reset_if_reconnected(self) -> None:
        """Forgets what was sent if the connection is new since the latest call."""
        if self._connection_number != self._link.connection_number:
            self._connection_number = self._link.connection_number
            self._auditor.forget_request()
            self._is_full_table_due, self._next_seq, self._figures_sent = True, 0, None
            self._is_table_open = self._is_recounting = False
            self._unsent_events.clear()
            # Requests of an earlier connection need no answers any more.
            self._demotions.clear()
            self._prefetches.clear()
            self._inspections.clear()

    def _read_state(self, deadline_seconds: float) -> wire.RankFacts | None:
        """Reads the touched sessions, the next part of a full table, and the pool's figures. None
        while the table is incomplete: the sum of held tokens is wrong then."""
        if self._is_full_table_due:
            self._table.begin_scan()
            self._is_full_table_due = False
            self._begins_table = self._is_table_open = True
        self._table.read_touched()
        self._table.continue_scan(deadline_seconds)
        return None if self._table.is_scanning else self._read_figures()

    def _send_update(self, figures: wire.RankFacts | None) -> None:
        """Sends the figures, the events, and as many changed sessions as fit in one update."""
        ended_ids, changed_sessions = self._table.take_changes()
        complete_figures = None if figures is None else replace(
            figures,
            uncached_tokens=max(0, figures.uncached_tokens),
            events_lost=self._events_lost,
            recounts=self._recounts,
            samples=self._samples,
            samples_ns=self._samples_ns,
        )
        ends_table = (
            self._is_table_open and not self._table.is_scanning and not self._table.has_changes()
        )
        update = wire.Update(
            self._next_seq, complete_figures, self._begins_table, ends_table, self._unsent_events,
            ended_ids, changed_sessions,
        )
        self._link.send(wire.encode(update), self._connection_number)
        self._next_seq += 1
        self._figures_sent = figures or self._figures_sent
        self._sent_at_seconds = time.perf_counter()
        self._begins_table = False
        self._is_table_open = self._is_table_open and not ends_table
        self._unsent_events.clear()

    def _read_figures(self) -> wire.RankFacts:
        """Reads the figures of the pool and the queues. The shim's own counters stay 0, so that
        equal states have equal figures."""
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
            host=self._host.read(),
        )
