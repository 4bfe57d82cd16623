"""What of a whole prompt a streaming session hasn't got yet. Pure: token ids in, a plan out.

A client that resends its whole history gets a turn that costs only what is new: the engine appends
what follows the session's committed context, and nothing else. A `Transcript` is that context as
the client's prompts write it. A plan against it is one of

- `Trimmed`: the prompt begins with the very ids, and goes on; the rest is to be appended.
- `Healed`: the ids differ where answers were tokenised anew, but it is proven to be the same text.
- `Diverged`: it is another text from this token on, or nothing follows. Nothing may be appended.
- `TooLong`: it could be trimmed or healed, but there isn't room for so many tokens.
- `Nothing`: nobody can tell, and why.

Drift. An answer's ids are the model's choice; the client sends its text back, and the tokenizer
writes it in its own way. The committed ids stand for that text where three things hold. Between two
special tokens, what the tokenizer makes of the decoded committed ids is, id for id, what stands in
the prompt: so the texts are equal, and decoding has lost nothing. A replacement character proves
nothing and is a divergence. And the cut, where the prompt goes on, is safe: both sides encode alone
as they do together. A special token on either side of it makes them independent; else the rest up
to the next special token must encode, alone, to the ids that the prompt has there. What is appended
is always the prompt's own ids.

A transcript keeps the prompt's ids and not the engine's, once they were proven to be the same text:
so no drift has to be proven twice. The two may differ in length; `committed` counts the engine's.

What the engine commits (SGLang 0.5.23; `Session`, `StreamingSession`, `update_finish_state`,
`output_streamer.accept`, `release_req`):

- Context of the next turn: the last turn's prompt, its `output_ids[:max_new_tokens]`, what is sent.
- A turn that finishes commits `output_ids[:finished_len]`. That is cut behind the stop token or
  EOS, behind the token that completed a stop string (which the text doesn't show), at
  `max_new_tokens`, and before what speculative decoding made beyond. The tokenizer's side is sent
  exactly these ids. With `max_new_tokens` 0 there are none.
- A running or waiting turn that is aborted, or refused, commits nothing: the context is that of the
  turn before; of a first turn, nothing at all.
- But retraction commits prompt and partial answer. A turn that goes on and finishes commits anew,
  as if nothing had been. One that is aborted afterwards leaves in the context what it had made by
  then; how much isn't told. So an abort is without effect only if no retraction came before it.
- Appending strips one BOS in front of what is sent, if the session has a context.
- A flush and a demotion lose KV, never the context. A session that is closed has none.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Proving drift encodes what lies behind the last special token that both have: mostly an answer.
# 16384 tokens take some 20 ms; more isn't an answer that drifted but another history.
DRIFT_TOKENS_MAX = 16_384
# Of a prompt, where nobody bounds it: more than any engine's pool.
TOKENS_MAX = (1 << 32) - 1


class Text(Protocol):
    """The tokenizer: both ways without adding or dropping anything."""

    # Tokens that split a text before anything else does.
    specials: frozenset[int]

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Trimmed:
    """The first `at` tokens are the session's; the rest is to be appended to the committed ones."""

    at: int
    committed: int
    rest: array


@dataclass(frozen=True)
class Healed:
    """As trimmed; from `at` on the prompt differs in its tokens, but not in its text."""

    at: int
    committed: int
    rest: array


@dataclass(frozen=True)
class Diverged:
    """The first `at` tokens are the session's; then it is another text, or the prompt ends."""

    at: int
    committed: int


@dataclass(frozen=True)
class TooLong:
    """As trimmed or healed, but the engine would count so many tokens, and may not."""

    at: int
    committed: int
    tokens: int


@dataclass(frozen=True)
class Nothing:
    """Nobody can tell, for this reason. `elsewhere` someone may: in another session."""

    why: str
    elsewhere: bool = False


Plan = Trimmed | Healed | Diverged | TooLong | Nothing


def askable(plan: Plan) -> bool:
    """Could it be a better one for another session, or for this one with more room?"""
    return isinstance(plan, Diverged | TooLong) or isinstance(plan, Nothing) and plan.elsewhere


@dataclass(frozen=True)
class Finished:
    """The engine has ended the turn well; these are all ids of its answer."""

    answer: Sequence[int]


@dataclass(frozen=True)
class RolledBack:
    """It was aborted or refused, never retracted: as if it hadn't been."""


@dataclass(frozen=True)
class Lost:
    """Nobody knows what of it the engine has kept."""


Outcome = Finished | RolledBack | Lost


class Turn:
    """A turn inside the engine."""

    def __init__(self, prompt: array, tokens: int):
        # The whole prompt as the client has it.
        self.prompt = prompt
        # What the engine must count of it; another figure is another context.
        self.prompt_tokens = tokens


class Transcript:
    """One session's context. A prompt that is handed in is kept, so nobody else may change it."""

    def __init__(self) -> None:
        self._said = array("q")
        self._committed = 0
        self._lost = False
        # What the KV depends on beside the tokens (adapter, salt): of one session always the same.
        self._tie: object = None
        self.turn: Turn | None = None

    def __len__(self) -> int:
        """Ids kept here."""
        return len(self._said)

    @property
    def committed(self) -> int:
        """Tokens of the context, as the engine counts them."""
        return self._committed

    def plan(
        self, prompt: array, text: Text | None, tie: object = None, tokens_max: int = TOKENS_MAX
    ) -> Plan:
        """What to do with this whole prompt, of which the engine may count so many tokens. Without
        a tokenizer nothing is healed."""
        if refusal := self._refusal(tie):
            return refusal
        plan = self._compared(prompt, text)
        if isinstance(plan, Diverged):
            return plan
        tokens = plan.committed + len(plan.rest)
        return plan if tokens <= tokens_max else TooLong(plan.at, plan.committed, tokens)

    def _compared(self, prompt: array, text: Text | None) -> Trimmed | Healed | Diverged:
        said = self._said
        at = len(said)
        if len(prompt) > at and prompt[:at] == said:
            return Trimmed(at, self._committed, prompt[at:])
        at = common(said, prompt)
        if text is not None and (cut := _drift(said, prompt, at, text)):
            return Healed(at, self._committed, prompt[cut:])
        return Diverged(at, self._committed)

    def begin(self, prompt: array, rest: array, tie: object = None) -> Turn:
        """The rest of this prompt goes to the engine, by a plan of this moment."""
        assert self.turn is None, "a turn begins in a session that has one"
        self._tie = tie
        self.turn = Turn(prompt, self._committed + len(rest))
        return self.turn

    def append(self, ids: array, bos: int | None, tie: object = None) -> Turn | None:
        """A client of the engine's own appends these ids. None when nobody can tell to what."""
        if self._refusal(tie):
            self.lose()
            return None
        if self._committed and len(ids) and ids[0] == bos:
            ids = ids[1:]
        return self.begin(self._said + ids, ids, tie)

    def commit(self, turn: Turn, outcome: Outcome) -> None:
        """The engine's last word on the turn. One that isn't this life's means nothing."""
        if turn is not self.turn:
            return
        self.turn = None
        if isinstance(outcome, Finished):
            self._said = turn.prompt
            self._said.extend(outcome.answer)
            self._committed = turn.prompt_tokens + len(outcome.answer)
        elif isinstance(outcome, Lost):
            self.lose()

    def lose(self) -> None:
        """From here on nobody knows what the context is; a turn that runs doesn't change that."""
        self.turn = None
        self._lost = True
        self._said = array("q")
        self._committed = 0

    def _refusal(self, tie: object) -> Nothing | None:
        if self._lost:
            return Nothing("the session's context isn't known", elsewhere=True)
        if self.turn is not None:
            return Nothing("a turn of the session runs")
        if self._committed and tie != self._tie:
            return Nothing("another adapter or salt than the session's", elsewhere=True)
        return None

    def check_invariants(self) -> None:
        assert bool(self._committed) == bool(self._said), "a length without ids, or ids without one"
        assert not (self._lost and (self._said or self.turn)), "a lost context has ids or a turn"
        if self.turn is not None:
            assert self.turn.prompt_tokens >= self._committed, "a turn that takes tokens away"


def guarded(rest: array, committed: int, bos: int | None) -> array:
    """What to send so that the engine appends the rest: it strips one BOS, if it has a context."""
    if committed and len(rest) and rest[0] == bos:
        return array("q", [bos]) + rest
    return rest


def common(a: array, b: array) -> int:
    """How many leading items are the same."""
    low, high = 0, min(len(a), len(b))
    # Comparing slices is C's work, an item at a time Python's.
    a, b = memoryview(a), memoryview(b)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _drift(said: array, prompt: array, at: int, text: Text) -> int | None:
    """Where the prompt goes on, if all that was said stands before it as the same text. The two are
    the same up to `at`."""
    first = len(said) - DRIFT_TOKENS_MAX
    while at >= first and at > 0 and said[at - 1] not in text.specials:
        at -= 1
    if at < first:
        return None
    i = j = at
    while True:
        end = _special(said, i, text)
        part = _encoded(said[i:end], text)
        if part is None or list(prompt[j : j + len(part)]) != part:
            return None
        j += len(part)
        if end == len(said):
            break
        if j >= len(prompt) or prompt[j] != said[end]:
            return None
        i, j = end + 1, j + 1
    if j >= len(prompt):
        return None
    # Right behind a special token, or right before one.
    if i == len(said) or prompt[j] in text.specials:
        return j
    rest = prompt[j : _special(prompt, j, text)]
    if len(rest) > DRIFT_TOKENS_MAX or _encoded(rest, text) != list(rest):
        return None
    return j


def _special(ids: array, begin: int, text: Text) -> int:
    """The first special token's place from there on, or the end."""
    for place in range(begin, len(ids)):
        if ids[place] in text.specials:
            return place
    return len(ids)


def _encoded(ids: array, text: Text) -> list[int] | None:
    """What the tokenizer makes of the ids' text. None when that isn't their whole text."""
    if not ids:
        return []
    decoded = text.decode(ids)
    if "\ufffd" in decoded:
        return None
    return text.encode(decoded)
