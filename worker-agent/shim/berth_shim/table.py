"""Keeps a table of the engine's sessions, and finds those that changed since the last report.

A session is a series of turns whose KV the engine keeps from turn to turn, in the session's *slot*.
A session is *touched* when a hook of the shim has seen it, so it may have changed. Only touched
sessions are read, because the cost of reading all of them would grow with their number. The table
also keeps the sum of the tokens that all sessions hold.

`sampler` marks sessions as touched, lets the table read them, and reports the changes to the agent.
It also checks the sum whenever the engine is idle. The table itself sends nothing.
"""

from typing import Any

from . import wire


class SessionTable:
    """Reads `session_controller.sessions` and the streaming sessions' slots of one scheduler."""

    def __init__(self, scheduler: Any):
        self._sessions = scheduler.session_controller.sessions
        self._slots = scheduler.tree_cache.session.slots
        self._page_size = scheduler.tree_cache.page_size
        # The latest facts of each session, as the agent knows them once all changes are reported.
        self._facts_by_id: dict[str, wire.SessionFacts] = {}
        # The part of `held_tokens` of each session that holds any.
        self._held_tokens_by_id: dict[str, int] = {}
        # The ids of the sessions to read next.
        self.touched_ids: set[str] = set()
        # The ids of changed sessions and of ended sessions that are still to be reported, in order.
        self._changed_ids: dict[str, None] = {}
        self._ended_ids: dict[str, None] = {}
        # The tokens that all sessions hold outside the radix tree, in whole pages.
        self.held_tokens = 0

    def rebuild(self) -> None:
        """Forgets all sessions and marks every streaming session of the engine as touched."""
        self._facts_by_id.clear()
        self._held_tokens_by_id.clear()
        self._changed_ids.clear()
        self._ended_ids.clear()
        self.held_tokens = 0
        self.touched_ids = {id for id, session in self._sessions.items() if session.streaming}
        # A slot without a session is a leak in the engine. It must count in the sum.
        self.touched_ids.update(self._slots)

    def read_touched(self) -> None:
        """Reads the touched sessions, and notes which have changed or ended."""
        for id in self.touched_ids:
            slot = self._slots.get(id)
            kv = slot.kv if slot is not None and slot.kv.holds_kv else None
            self._set_held_tokens(id, self._private_tokens(kv))
            session = self._sessions.get(id)
            if session is None or not session.streaming:
                if self._facts_by_id.pop(id, None) is not None:
                    self._changed_ids.pop(id, None)
                    self._ended_ids[id] = None
                continue
            facts = _read_facts(id, session, kv)
            if self._facts_by_id.get(id) != facts and wire.is_nameable(id):
                self._facts_by_id[id] = facts
                self._ended_ids.pop(id, None)
                self._changed_ids[id] = None
        self.touched_ids.clear()

    def has_changes(self) -> bool:
        """Whether sessions are still to be reported."""
        return bool(self._changed_ids or self._ended_ids)

    def take_changes(self) -> tuple[list[str], list[wire.SessionFacts]]:
        """Takes the next sessions to report, at most SESSIONS_MAX of each kind: the ids of ended
        sessions, and the facts of changed sessions."""
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
    """Returns the number of tokens that the engine puts before the next turn's prompt. A running
    turn appends to the token array of the turn before it, so that array counts only up to its
    committed length."""
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
