"""A session as its client holds it: the transcript, and what the client doesn't know.

A client that left a turn early doesn't know whether the engine kept that turn. The `prompt_tokens`
of the next turn say which of the two possible histories it was appended to.
"""

from dataclasses import dataclass, field

from soak.oracle import Turn


@dataclass(frozen=True)
class AbandonedTurn:
    """A turn whose client left before its end."""

    delta: list[int]
    tokens: int


@dataclass
class ClientSession:
    id: str
    # The seconds without a turn after which the session is closed; None for the server's default.
    idle_seconds: float | None = None
    history: list[int] = field(default_factory=list)
    # The positions in the history where the turns began.
    starts: list[int] = field(default_factory=list)
    # Whether the session is open, as far as the client knows.
    open: bool = False
    # Whether the session's first turn opens it.
    opened_by_turn: bool = False
    # How many tokens of the history have been sent to this incarnation.
    sent: int = 0
    abandoned: AbandonedTurn | None = None

    def unsent(self, delta: list[int]) -> list[int]:
        """Returns what a turn has to send: the delta, and after a reopen the full history before
        it."""
        return self.history[self.sent :] + delta

    def reopen(self) -> None:
        """Marks the engine's history as gone or unknown, so that the next turn sends the
        client's own."""
        self.open = False
        self.sent = 0
        self.abandoned = None

    def kept(self, delta: list[int], prompt_tokens: int) -> bool | None:
        """Whether the turn that the client left was kept; None if neither history has that
        length."""
        length = len(self.history) + len(delta)
        if prompt_tokens == length:
            return False
        if left := self.abandoned:
            if prompt_tokens == length + len(left.delta) + left.tokens:
                return True
        return None

    def add(
        self, what: str, delta: list[int], output: list[int], logprobs: list[float]
    ) -> Turn:
        """Adds a finished turn whose answer the client has got, and returns it."""
        self.starts.append(len(self.history))
        context = self.history + delta
        self.history = context + output
        self.sent = len(self.history)
        self.abandoned = None
        return Turn(what, self.id, context, output, logprobs, list(self.starts))
