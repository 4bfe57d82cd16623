"""The sessions as the agent knows them: what has changed since it was told, and what they hold.

Looking at every session each step would cost more as sessions grow, so only those that a hook has
touched are looked at. The sum of what they hold is kept along; `Sampler` proves it whenever the
engine is idle.
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
        # Sessions to look at, those to tell of, and those to tell the end of.
        self.touched: set[str] = set()
        self._changed: dict[str, None] = {}
        self._gone: dict[str, None] = {}
        # Tokens that sessions hold outside the radix tree, in whole pages.
        self.held = 0

    def rebuild(self) -> None:
        """Forgets everything and looks at every session; all of it counts as changed."""
        self._known.clear()
        self._held.clear()
        self._changed.clear()
        self._gone.clear()
        self.held = 0
        self.touched = {id for id, session in self._sessions.items() if session.streaming}
        # A slot without a session would be a leak of the engine's; the sum must show it.
        self.touched.update(self._slots)

    def look(self) -> None:
        """Looks at what was touched."""
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
        """The next piece to tell: ids that have gone, and sessions that changed."""
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
    """What the engine puts in front of the next turn. The last turn's arrays are shared with a turn
    that is running, so its prompt counts only as far as it was when it was committed."""
    if session.committed_origin_len is None or not session.req_nodes:
        return 0
    [node] = session.req_nodes.values()
    return session.committed_origin_len + answer_tokens(node.req)


def answer_tokens(request: Any) -> int:
    """As much of a turn's answer as becomes history."""
    return min(len(request.output_ids), request.sampling_params.max_new_tokens)


def _first(ids: dict[str, None]) -> list[str]:
    taken = []
    while ids and len(taken) < wire.SESSIONS_MAX:
        id = next(iter(ids))
        del ids[id]
        taken.append(id)
    return taken
