"""The sessions as the agent knows them, what they hold, and which changed since the last report.

Reading every session in each step would cost more the more sessions there are. So only sessions
that a hook has touched are read, and the sum of what all hold is kept up to date. `Sampler` checks
the sum whenever the engine is idle.
"""

from typing import Any

from . import wire


class Table:
    """Reads `session_controller.sessions` and the streaming sessions' slots of one scheduler."""

    def __init__(self, scheduler: Any):
        self._sessions = scheduler.session_controller.sessions
        self._slots = scheduler.tree_cache.session.slots
        self._page = scheduler.tree_cache.page_size
        self._known: dict[str, wire.Facts] = {}
        self._held: dict[str, int] = {}
        # The ids of sessions to read, of changed ones to report, and of ended ones to report.
        self.touched: set[str] = set()
        self._changed: dict[str, None] = {}
        self._gone: dict[str, None] = {}
        # Tokens that sessions hold outside the radix tree, in whole pages.
        self.held = 0

    def rebuild(self) -> None:
        """Forgets everything and marks every session as touched."""
        self._known.clear()
        self._held.clear()
        self._changed.clear()
        self._gone.clear()
        self.held = 0
        self.touched = {id for id, session in self._sessions.items() if session.streaming}
        # A slot without a session would be a leak in the engine, which the sum must show.
        self.touched.update(self._slots)

    def look(self) -> None:
        """Reads the touched sessions."""
        for id in self.touched:
            slot = self._slots.get(id)
            kv = slot.kv if slot is not None and slot.kv.holds_kv else None
            self._hold(id, self._private(kv))
            session = self._sessions.get(id)
            if session is None or not session.streaming:
                if self._known.pop(id, None) is not None:
                    self._changed.pop(id, None)
                    self._gone[id] = None
                continue
            facts = _facts(session, kv)
            if self._known.get(id) != facts and wire.nameable(id):
                self._known[id] = facts
                self._gone.pop(id, None)
                self._changed[id] = None
        self.touched.clear()

    def pending(self) -> bool:
        return bool(self._changed or self._gone)

    def take(self) -> tuple[list[str], list[tuple[str, wire.Facts]]]:
        """Takes the next part to report: ids of ended sessions, and changed sessions."""
        gone = _first(self._gone)
        changed = [(id, self._known[id]) for id in _first(self._changed)]
        return gone, changed

    def _private(self, kv: Any) -> int:
        if kv is None:
            return 0
        pages = -(-kv.kv_allocated_len // self._page)
        return pages * self._page - kv.cache_protected_len

    def _hold(self, id: str, tokens: int) -> None:
        self.held += tokens - self._held.pop(id, 0)
        if tokens:
            self._held[id] = tokens


def _facts(session: Any, kv: Any) -> wire.Facts:
    flags = (
        (wire.HOLDS_ROW if kv is not None else 0)
        | (wire.IN_FLIGHT if session._inflight else 0)
        | (wire.CLOSING if session.close_on_finish else 0)
    )
    history = history_tokens(session)
    if kv is None:
        return wire.Facts(flags, 0, 0, 0, history)
    return wire.Facts(
        flags, kv.kv_allocated_len, kv.kv_committed_len, kv.cache_protected_len, history
    )


def history_tokens(session: Any) -> int:
    """Returns the tokens that the engine puts before the next turn's prompt. A running turn shares
    the last turn's arrays, so the prompt counts only up to its committed length."""
    if session.committed_origin_len is None or not session.req_nodes:
        return 0
    [node] = session.req_nodes.values()
    return session.committed_origin_len + answer_tokens(node.req)


def answer_tokens(request: Any) -> int:
    """Returns how many tokens of a turn's answer become history."""
    return min(len(request.output_ids), request.sampling_params.max_new_tokens)


def _first(ids: dict[str, None]) -> list[str]:
    taken = []
    while ids and len(taken) < wire.SESSIONS_MAX:
        id = next(iter(ids))
        del ids[id]
        taken.append(id)
    return taken
