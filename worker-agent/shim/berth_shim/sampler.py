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
from .library import Failed
from .link import Link
from .publish import Publisher, path_of
from .republish import Republisher
from .table import Table, answer_tokens

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
        undemotable: str,
        auditor: Auditor,
        republisher: Republisher,
    ):
        self._scheduler = scheduler
        self._link = link
        self._auditor = auditor
        self._republisher = republisher
        self._publisher: Publisher | None = None
        self._undemotable = undemotable
        self._table = Table(scheduler)
        self._connection = 0
        self._events: list[bytes] = []
        self._events_lost = 0
        self._full = True
        self._seq = 0
        self._samples = self._samples_ns = self._recounts = 0
        self._told: wire.Head | None = None
        # The uncached tokens that a recount on an idle engine didn't explain. Another recount
        # wouldn't help.
        self._unexplained = 0
        self._sampled_at = self._running_at = 0.0

    # Called by the hooks.

    def touched(self, id: str) -> None:
        if self._link.connected:
            self._table.touched.add(id)

    def opened(self, id: str, ok: bool) -> None:
        self._event(id, wire.opened, ok)

    def closed(self, id: str) -> None:
        self._event(id, wire.closed)

    def committed(self, id: str, request: Any) -> None:
        """The turn became part of the session's history: it ended, or was retracted to the
        queue."""
        history = len(request.origin_input_ids) + answer_tokens(request)
        self._event(id, wire.committed, str(request.rid), history, not request.finished())

    def aborted(self, id: str, released: bool) -> None:
        self._event(id, wire.aborted, released)

    def flushed(self) -> None:
        self._full = True

    def _event(self, id: str, make: Callable[..., bytes], *values: Any) -> None:
        if not self._link.connected or not wire.nameable(id):
            return
        self._renew()
        self._table.touched.add(id)
        if len(self._events) < wire.EVENTS_MAX:
            self._events.append(make(id, *values))
        else:
            self._events_lost += 1
            self._full = True

    def publish(self, dp_rank: int) -> None:
        """Starts publishing rows if a table file is configured."""
        if path := path_of(dp_rank):
            try:
                auditor = self._auditor
                self._publisher = Publisher(
                    self._scheduler, path, auditor.ordinal, auditor.stream
                )
            except Failed as error:
                # This goes to the engine's log. An agent that finds no table has the audit made in
                # the engine.
                logging.getLogger(__name__).warning("no row table at %s: %s", path, error)

    # Called from the scheduler's loop.

    @property
    def publishes(self) -> bool:
        """Whether rows are published after each step."""
        return self._publisher is not None

    def step_begins(self) -> None:
        """A step begins, and may change rows."""
        self._publisher.begin()

    @property
    def asked(self) -> bool:
        """Whether commands, an audit or a chunk of the tree are waiting to be done."""
        return self._link.asked or self._auditor.asked or self._republisher.runs

    def commands(self) -> None:
        """Carries out the agent's commands. Called before a step's requests are handled."""
        self._renew()
        for kind, what in self._link.take_commands():
            if kind == wire.SAMPLE_NOW:
                self._full = True
            elif kind == wire.AUDIT:
                self._auditor.ask(what)
            elif kind == wire.REPUBLISH:
                self._republisher.begin()
            else:
                refusal = self._undemotable or demotion.demote(self._scheduler, what)
                self._event(what, wire.demoted, refusal)
        self._auditor.begin()
        self._republisher.go_on()

    def idle(self) -> None:
        """Called between steps and while idle."""
        if self._publisher is not None:
            self._publisher.done()
        self._audit()
        if not self._link.connected:
            return
        begin = time.perf_counter_ns()
        now = begin / 1e9
        news = self._full or self._table.touched or self._events
        if news or now - self._sampled_at >= IDLE_SECONDS:
            self._sample(begin)

    def stepped(self, batch: Any) -> None:
        """Called when a step's results are in."""
        if self._publisher is not None:
            self._publisher.done()
        if not self._link.connected:
            return
        begin = time.perf_counter_ns()
        now = begin / 1e9
        # A prefill takes rows and moves prefixes into the tree; decoding only adds tokens.
        if batch.forward_mode.is_extend() or now - self._running_at >= RUNNING_SECONDS:
            self._running_at = now
            for request in batch.reqs:
                session = request.session
                if session is not None and session.streaming:
                    self._table.touched.add(session.session_id)
        self._sample(begin)
        self._audit()

    def _audit(self) -> None:
        self._auditor.go_on()
        if not self._auditor.answered:
            return
        # Clears the wake-up byte that the audit's thread has sent.
        self._link.hush()
        if not self._link.connected:
            self._auditor.forget()
        elif self._link.ready():
            self._link.send(self._auditor.take(), self._connection)

    def _sample(self, begin: int) -> None:
        """Samples the pool. `begin` is the performance counter when the hook was called, in ns."""
        if not self._link.ready():
            return
        self._sampled_at = begin / 1e9
        self._renew()
        head = self._look()
        if head.uncached not in (0, self._unexplained) and self._scheduler.is_fully_idle():
            # Nothing runs, so nothing should be uncached: a hook has missed a change.
            self._recounts += 1
            self._full = True
            head = self._look()
            self._unexplained = head.uncached
        if self._full or self._events or head != self._told:
            self._tell(head)
        while self._table.pending() and self._link.ready():
            self._tell(head)
        self._samples += 1
        self._samples_ns += time.perf_counter_ns() - begin

    def _renew(self) -> None:
        """Resets what was sent if another agent has connected since."""
        if self._connection != self._link.connections:
            self._connection = self._link.connections
            self._auditor.forget()
            self._full, self._seq, self._told = True, 0, None
            self._events.clear()

    def _look(self) -> wire.Head:
        if self._full:
            self._table.rebuild()
        self._table.look()
        return self._head()

    def _tell(self, head: wire.Head) -> None:
        gone, changed = self._table.take()
        full = head._replace(
            seq=self._seq,
            events_lost=self._events_lost,
            samples=self._samples,
            samples_ns=self._samples_ns,
            recounts=self._recounts,
            uncached=max(0, head.uncached),
            full=self._full,
        )
        self._link.send(wire.update(full, self._events, gone, changed), self._connection)
        self._seq += 1
        self._told = head
        self._full = False
        self._events.clear()

    def _head(self) -> wire.Head:
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
            held=self._table.held,
            uncached=pool.full_capacity - cached - self._table.held,
            rows_total=rows.size,
            rows_free=rows.available_size(),
            running=len(scheduler.running_batch.reqs),
            waiting=len(scheduler.waiting_queue),
            full=False,
        )
