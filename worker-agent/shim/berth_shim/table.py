"""Keeps a table of the engine's sessions, and finds those that changed since the last report.

A session is *touched* when a hook sees the engine use it. Only those are read, as the cost of
reading all would grow with their number. The table also keeps the sum of the tokens that all
sessions hold.

A *scan* reads all sessions. It may take many passes of the scheduler, because each pass has a
limited time for it. The sum is wrong until the scan has ended.
"""

import time
from typing import Any

from . import wire

# Sessions that a scan reads between two looks at the clock: 0.2 ms.
SCAN_PART = 16


class SessionTable:
    """Reads `session_controller.sessions` and the streaming sessions' slots of one scheduler."""

    def __init__(self, scheduler: Any):
        self._sessions = scheduler.session_controller.sessions
        self._slots = scheduler.tree_cache.session.slots
        self._page_size = scheduler.tree_cache.page_size
        # The facts that were read last, which the agent has too once all changes are reported.
        self._facts_by_id: dict[str, wire.SessionFacts] = {}
        self._held_tokens_by_id: dict[str, int] = {}
        self.touched_ids: set[str] = set()
        self._unscanned_ids: list[str] = []
        # Still to be reported, in order.
        self._changed_ids: dict[str, None] = {}
        self._ended_ids: dict[str, None] = {}
        # Outside the radix tree, in whole pages. Complete only if no scan is running.
        self.held_tokens = 0

    def begin_scan(self) -> None:
        """Forgets all sessions and begins to read every session of the engine."""
        self._facts_by_id.clear()
        self._held_tokens_by_id.clear()
        self._changed_ids.clear()
        self._ended_ids.clear()
        self.held_tokens = 0
        self.touched_ids.clear()
        # A slot without a session is a leak in the engine. It must count in the sum.
        leaked_ids = [id for id in self._slots if id not in self._sessions]
        self._unscanned_ids = [*self._sessions, *leaked_ids]

    @property
    def is_scanning(self) -> bool:
        """Whether a scan has sessions left to read."""
        return bool(self._unscanned_ids)

    def continue_scan(self, deadline_seconds: float) -> None:
        """Reads at least SCAN_PART of a scan's sessions, until the deadline."""
        while self._unscanned_ids:
            for id in self._unscanned_ids[-SCAN_PART:]:
                self._read(id)
            del self._unscanned_ids[-SCAN_PART:]
            if time.perf_counter() >= deadline_seconds:
                return

    def read_touched(self) -> None:
        """Reads the touched sessions, and notes which have changed or ended."""
        for id in self.touched_ids:
            self._read(id)
        self.touched_ids.clear()

    def facts(self, id: str) -> wire.SessionFacts | None:
        """Reads a session's facts now; None if the engine has no such streaming session."""
        session = self._sessions.get(id)
        if session is None or not session.streaming:
            return None
        return _read_facts(id, session, self._kv(id))

    def _kv(self, id: str) -> Any:
        """Returns the record of a session's KV; None if it has no KV."""
        slot = self._slots.get(id)
        return slot.kv if slot is not None and slot.kv.holds_kv else None

    def _read(self, id: str) -> None:
        """Reads a session, and notes whether it has changed or ended."""
        kv = self._kv(id)
        self._set_held_tokens(id, self._private_tokens(kv))
        session = self._sessions.get(id)
        if session is None or not session.streaming:
            if self._facts_by_id.pop(id, None) is not None:
                self._changed_ids.pop(id, None)
                self._ended_ids[id] = None
            return
        facts = _read_facts(id, session, kv)
        if self._facts_by_id.get(id) != facts and wire.is_nameable(id):
            self._facts_by_id[id] = facts
            self._ended_ids.pop(id, None)
            self._changed_ids[id] = None

    def has_changes(self) -> bool:
        """Whether sessions are still to be reported."""
        return bool(self._changed_ids or self._ended_ids)

    def take_changes(self) -> tuple[list[str], list[wire.SessionFacts]]:
        """Takes the ended and the changed sessions to report, at most SESSIONS_MAX of each."""
        ended_ids = _take_first(self._ended_ids)
        changed_sessions = [self._facts_by_id[id] for id in _take_first(self._changed_ids)]
        return ended_ids, changed_sessions

    def _private_tokens(self, kv: Any) -> int:
        """Returns the tokens that a session's KV takes outside the radix tree, in whole pages."""
        if kv is None:
            return 0
        pages = -(-kv.kv_allocated_len // self._page_size)
        return pages * self._page_size - kv.cache_protected_len

    def _set_held_tokens(self, id: str, tokens: int) -> None:
        """Sets the tokens that a session holds, and corrects the sum."""
        self.held_tokens += tokens - self._held_tokens_by_id.pop(id, 0)
        if tokens:
            self._held_tokens_by_id[id] = tokens


def _read_facts(id: str, session: Any, kv: Any) -> wire.SessionFacts:
    """Reads a session's facts. `kv` is the record of the session's KV; None if it has no KV."""
    holds_row = kv is not None
    return wire.SessionFacts(
        id=id,
        holds_row=holds_row,
        in_flight=bool(session._inflight),
        closing=bool(session.close_on_finish),
        allocated_tokens=kv.kv_allocated_len if holds_row else 0,
        committed_tokens=kv.kv_committed_len if holds_row else 0,
        protected_tokens=kv.cache_protected_len if holds_row else 0,
        history_tokens=history_tokens(session),
    )


def history_tokens(session: Any) -> int:
    """Returns the number of tokens that the engine puts before the next turn's prompt. Of the
    prompt's tokens only the committed ones count: a running turn appends to the same list."""
    if session.committed_origin_len is None or not session.req_nodes:
        return 0
    [node] = session.req_nodes.values()
    return session.committed_origin_len + answer_tokens(node.req)


def answer_tokens(request: Any) -> int:
    """Returns how many tokens of a turn's answer become part of the session's history."""
    return min(len(request.output_ids), request.sampling_params.max_new_tokens)


def _take_first(ids: dict[str, None]) -> list[str]:
    """Removes and returns the first ids, at most SESSIONS_MAX."""
    first_ids = []
    while ids and len(first_ids) < wire.SESSIONS_MAX:
        id = next(iter(ids))
        del ids[id]
        first_ids.append(id)
    return first_ids
