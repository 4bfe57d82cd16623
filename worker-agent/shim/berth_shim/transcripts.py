"""The transcripts of all sessions, with a bound on their size. Pure.

At the bound, the session that has been idle longest loses its transcript's ids. The context of that
session is then unknown, and its turns are refused.
"""

from collections.abc import Callable
from typing import Any

from .trim import Transcript

# Each session takes a row of the request table; SGLang has at most 4096 by default.
SESSIONS_MAX = 4096
# At 8 bytes per token these are 128 MiB: 160 sessions of 100,000 tokens. The engine itself keeps
# the same ids two or three times.
TOKENS_MAX = 1 << 24


class Transcripts:
    """Transcripts by session id, least recently used first. Contains only opened sessions."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, tokens_max: int = TOKENS_MAX):
        self._sessions_max, self._tokens_max = sessions_max, tokens_max
        self._by_id: dict[str, Transcript] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def open(self, id: str) -> None:
        """Adds the session with an empty context. Discards an earlier session with this id."""
        self.close(id)
        if len(self._by_id) >= self._sessions_max:
            idle = (other for other, transcript in self._by_id.items() if transcript.turn is None)
            self.close(next(idle, next(iter(self._by_id))))
        self._by_id[id] = Transcript()

    def close(self, id: str) -> None:
        if transcript := self._by_id.pop(id, None):
            self._tokens -= len(transcript)

    def get(self, id: str) -> Transcript | None:
        """Returns the transcript for reading. To change it, use `change`."""
        return self._by_id.get(id)

    def change(self, id: str, apply: Callable[[Transcript], Any]) -> Any:
        """Calls `apply` with the transcript, marks the session as used, and enforces the bound.

        Returns the result of `apply`, or None if the session is unknown.
        """
        if (transcript := self._by_id.pop(id, None)) is None:
            return None
        self._by_id[id] = transcript
        before = len(transcript)
        result = apply(transcript)
        self._tokens += len(transcript) - before
        self._make_room()
        return result

    def _make_room(self) -> None:
        for idle in (True, False):
            for transcript in self._by_id.values():
                if self._tokens <= self._tokens_max:
                    return
                if (transcript.turn is None) == idle:
                    self._tokens -= len(transcript)
                    transcript.discard_context()

    def check_invariants(self) -> None:
        assert self._tokens == sum(map(len, self._by_id.values())), "not the transcripts' sum"
        assert self._tokens <= self._tokens_max, "more tokens than the bound"
        assert len(self._by_id) <= self._sessions_max, "more sessions than the bound"
        for transcript in self._by_id.values():
            transcript.check_invariants()
