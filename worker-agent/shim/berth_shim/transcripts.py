"""Keeps the transcripts of all open sessions for the trimmer, within a bound on their size. Pure.

At the bound on tokens, the session that has been idle longest loses its transcript's ids: its
context is then unknown, and its turns can't be trimmed any more.
"""

from collections.abc import Callable
from typing import Any

from .trim import Transcript

# Each session with KV takes a row of the engine's request table, by default at most 4096.
SESSIONS_MAX = 4096
# At 8 bytes per token, 128 MiB: enough for 160 sessions of 100,000 tokens. The engine itself keeps
# the same ids two or three times.
TOKENS_MAX = 1 << 24


class Transcripts:
    """The transcripts of the open sessions by session id, least recently used first."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, tokens_max: int = TOKENS_MAX):
        self._sessions_max, self._tokens_max = sessions_max, tokens_max
        self._by_id: dict[str, Transcript] = {}
        self._kept_tokens = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def open(self, id: str) -> None:
        """Adds a session with an empty context, in place of an earlier one with this id. At the
        bound on sessions, discards the longest idle one, or else the least recently used."""
        self.close(id)
        if len(self._by_id) >= self._sessions_max:
            by_id = self._by_id
            idle_ids = (other for other, transcript in by_id.items() if transcript.turn is None)
            self.close(next(idle_ids, next(iter(by_id))))
        self._by_id[id] = Transcript()

    def close(self, id: str) -> None:
        """Removes a session, if it is known."""
        if transcript := self._by_id.pop(id, None):
            self._kept_tokens -= len(transcript)

    def get(self, id: str) -> Transcript | None:
        """Returns a session's transcript for reading only; None if the session is unknown."""
        return self._by_id.get(id)

    def change(self, id: str, apply: Callable[[Transcript], Any]) -> Any:
        """Calls `apply` with the transcript, marks the session as used, and enforces the bound on
        tokens. Returns the result of `apply`, or None if the session is unknown."""
        if (transcript := self._by_id.pop(id, None)) is None:
            return None
        self._by_id[id] = transcript
        tokens_before = len(transcript)
        result = apply(transcript)
        self._kept_tokens += len(transcript) - tokens_before
        self._make_room()
        return result

    def _make_room(self) -> None:
        """Discards contexts until the bound holds: first those of idle sessions, then those of
        sessions with a running turn, and of each the least recently used first."""
        for is_idle_pass in (True, False):
            for transcript in self._by_id.values():
                if self._kept_tokens <= self._tokens_max:
                    return
                if (transcript.turn is None) == is_idle_pass:
                    self._kept_tokens -= len(transcript)
                    transcript.discard_context()

    def check_invariants(self) -> None:
        assert self._kept_tokens == sum(map(len, self._by_id.values())), "not the transcripts' sum"
        assert self._kept_tokens <= self._tokens_max, "more tokens than the bound"
        assert len(self._by_id) <= self._sessions_max, "more sessions than the bound"
        for transcript in self._by_id.values():
            transcript.check_invariants()
