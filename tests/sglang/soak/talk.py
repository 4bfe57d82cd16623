"""A session as its client holds it: the transcript, and what the client doesn't know.

A client that left a turn half-way doesn't know whether the engine kept that turn. The next turn's
`prompt_tokens` says which of the two histories it was added to; there is no third one.
"""

from dataclasses import dataclass, field

from soak.oracle import Turn


@dataclass(frozen=True)
class Left:
    """A turn whose end its client didn't wait for."""

    delta: list[int]
    tokens: int


@dataclass
class Talk:
    id: str
    # Without a turn for so long it is closed; none: as long as its keeper likes.
    idle_seconds: float | None = None
    history: list[int] = field(default_factory=list)
    # Where in the history each turn began.
    starts: list[int] = field(default_factory=list)
    # Opened, as far as its client knows.
    open: bool = False
    # It wasn't opened before its first turn: that turn opens it.
    by_turn: bool = False
    # How much of the history this incarnation has been sent.
    sent: int = 0
    left: Left | None = None

    def unsent(self, delta: list[int]) -> list[int]:
        """What a turn has to send: after a reopen, everything."""
        return self.history[self.sent :] + delta

    def reopen(self) -> None:
        """The engine's history is gone or unknown; the client's own is what counts."""
        self.open = False
        self.sent = 0
        self.left = None

    def kept(self, delta: list[int], prompt_tokens: int) -> bool | None:
        """Was the turn that was left kept? None: neither history has that length."""
        length = len(self.history) + len(delta)
        if prompt_tokens == length:
            return False
        if self.left and prompt_tokens == length + len(self.left.delta) + self.left.tokens:
            return True
        return None

    def add(
        self, what: str, delta: list[int], output: list[int], logprobs: list[float]
    ) -> Turn:
        """A finished turn, whose answer its client has."""
        self.starts.append(len(self.history))
        context = self.history + delta
        self.history = context + output
        self.sent = len(self.history)
        self.left = None
        return Turn(what, self.id, context, output, logprobs, list(self.starts))
