"""Finds the part of a prompt that a streaming session lacks. Pure: token ids in, a plan out.

A client that sends its full history with each turn should pay only for the new part. The engine
appends to the session's committed context whatever it is sent, and nothing else. A `Transcript` is
that context as the client's prompts write it. Comparing a prompt with it gives one of these plans:

- `Trimmed`: the prompt starts with exactly the transcript's ids; the rest is to be appended.
- `Retokenized`: the ids differ where the client's text of an answer was retokenized, but the text
  is proven to be the same; the rest is to be appended.
- `Diverged`: from some token on the text differs, or nothing follows. Nothing may be appended.
- `TooLong`: the plan would be one of the first two, but there isn't room for so many tokens.
- `Refused`: the comparison isn't possible, for a stated reason.

Drift: the model chooses the ids of an answer. The client sends the answer back as text, and the
tokenizer may encode that text with other ids. The prompt continues the committed ids if three
conditions hold:

- Between each two special tokens, decoding the committed ids and encoding the resulting text gives
  exactly the ids in the prompt. Then the texts are equal, and decoding has lost nothing.
- The decoded text has no replacement character, which could stand for anything.
- The texts before and after the cut, where the rest of the prompt begins, encode separately to the
  same ids as together. This is so if a special token is on either side of the cut. Otherwise the
  rest, up to the next special token, must encode on its own to the ids that the prompt has there.

Only the prompt's own ids are ever appended.

After drift was proven harmless, the transcript keeps the prompt's ids instead of the engine's, so
the same drift needn't be proven again. The two may differ in length; `committed` is the engine's.

What the engine commits (SGLang 0.5.23; `Session`, `StreamingSession`, `update_finish_state`,
`output_streamer.accept`, `release_req`):

- The context of a turn is the previous turn's prompt, then its `output_ids[:max_new_tokens]`. The
  turn's own tokens follow.
- A turn that finishes commits `output_ids[:finished_len]`. This ends after the stop token or EOS,
  after the token that completed a stop string (which the text doesn't show), at `max_new_tokens`,
  and before extra tokens of speculative decoding. The tokenizer's process receives exactly these
  ids. With `max_new_tokens` 0 there are none.
- A running or waiting turn that is aborted or refused commits nothing: the context stays that of
  the previous turn, or empty after a first turn.
- But retraction commits the prompt and the partial answer. If the turn then continues and finishes,
  it commits as usual. If it is aborted after a retraction, the context keeps what it had generated
  by then, and its length isn't reported. So an abort has no effect only without a retraction.
- Appending removes one BOS from the start of the new tokens, if the session has a context.
- A flush or a demotion loses the KV but not the context. Closing a session loses both.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Proving drift encodes the text after the last special token that both sides share, usually one
# answer. 16384 tokens take about 20 ms. A longer difference is another history, not drift.
DRIFT_TOKENS_MAX = 16_384
# The default bound on a prompt's tokens: more than any engine's pool.
TOKENS_MAX = (1 << 32) - 1


class Tokenizer(Protocol):
    """A tokenizer that encodes and decodes without adding or dropping anything."""

    # The tokens at which a text is split before any other tokenization.
    specials: frozenset[int]

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Trimmed:
    """The first `shared_tokens` tokens equal the transcript's. `rest` is to be appended to the
    `committed` tokens.
    """

    shared_tokens: int
    committed: int
    rest: array


@dataclass(frozen=True)
class Retokenized:
    """`rest` is to be appended, as with `Trimmed`. After the first `shared_tokens` tokens the ids
    differ from the transcript's, but the text is the same.
    """

    shared_tokens: int
    committed: int
    rest: array


@dataclass(frozen=True)
class Diverged:
    """The first `shared_tokens` tokens equal the transcript's. Then the text differs, or the prompt
    ends.
    """

    shared_tokens: int
    committed: int


@dataclass(frozen=True)
class TooLong:
    """Like `Trimmed` or `Retokenized`, but the engine would count `tokens` prompt tokens, which is
    over the limit.
    """

    shared_tokens: int
    committed: int
    tokens: int


@dataclass(frozen=True)
class Refused:
    """The comparison isn't possible. `can_run_elsewhere`: another session could take the turn."""

    why: str
    can_run_elsewhere: bool = False


Plan = Trimmed | Retokenized | Diverged | TooLong | Refused


def is_improvable(plan: Plan) -> bool:
    """Whether another session, or more room in this one, could give a better plan."""
    if isinstance(plan, Refused):
        return plan.can_run_elsewhere
    return isinstance(plan, Diverged | TooLong)


@dataclass(frozen=True)
class Finished:
    """The engine finished the turn; `answer` has all ids of its answer."""

    answer: Sequence[int]


@dataclass(frozen=True)
class RolledBack:
    """The turn was aborted or refused without a retraction, so it changed nothing."""


@dataclass(frozen=True)
class Lost:
    """It is unknown how much of the turn the engine has committed."""


Outcome = Finished | RolledBack | Lost


class Turn:
    """A turn inside the engine."""

    def __init__(self, prompt: array, prompt_tokens: int):
        # The full prompt as the client sent it.
        self.prompt = prompt
        # The number of prompt tokens the engine must count. A different count means another
        # context.
        self.prompt_tokens = prompt_tokens


class Transcript:
    """The context of one session. Keeps the prompts passed to it; the caller must not change them
    afterwards.
    """

    def __init__(self) -> None:
        self._ids = array("q")
        self._committed = 0
        self._is_lost = False
        # What the KV depends on besides the tokens (adapter, salt). It is the same for all turns.
        self._cache_namespace: object = None
        self.turn: Turn | None = None

    def __len__(self) -> int:
        """Returns the number of ids kept here."""
        return len(self._ids)

    @property
    def committed(self) -> int:
        """The number of tokens of the context, as the engine counts them."""
        return self._committed

    def plan(
        self,
        prompt: array,
        tokenizer: Tokenizer | None,
        namespace: object = None,
        tokens_max: int = TOKENS_MAX,
    ) -> Plan:
        """Compares a full prompt with the context. The engine may count at most `tokens_max` tokens
        of it. Without a tokenizer, no drift can be proven harmless."""
        if refusal := self._refusal(namespace):
            return refusal
        plan = self._compare(prompt, tokenizer)
        if isinstance(plan, Diverged):
            return plan
        tokens = plan.committed + len(plan.rest)
        return plan if tokens <= tokens_max else TooLong(plan.shared_tokens, plan.committed, tokens)

    def _compare(
        self, prompt: array, tokenizer: Tokenizer | None
    ) -> Trimmed | Retokenized | Diverged:
        ids = self._ids
        shared = len(ids)
        if len(prompt) > shared and prompt[:shared] == ids:
            return Trimmed(shared, self._committed, prompt[shared:])
        shared = common_prefix_len(ids, prompt)
        if tokenizer is not None and (cut := _find_cut(ids, prompt, shared, tokenizer)):
            return Retokenized(shared, self._committed, prompt[cut:])
        return Diverged(shared, self._committed)

    def begin(self, prompt: array, rest: array, namespace: object = None) -> Turn:
        """Starts a turn with this prompt; the engine gets `rest`. The plan must be current."""
        assert self.turn is None, "a turn begins in a session that has one"
        self._cache_namespace = namespace
        self.turn = Turn(prompt, self._committed + len(rest))
        return self.turn

    def append(self, ids: array, bos: int | None, namespace: object = None) -> Turn | None:
        """Starts a turn whose client sends only new ids. If the context is unknown, another turn
        runs or the cache namespace differs, returns None, and the context is unknown from then on.
        """
        if self._refusal(namespace):
            self.discard_context()
            return None
        if self._committed and len(ids) and ids[0] == bos:
            ids = ids[1:]
        return self.begin(self._ids + ids, ids, namespace)

    def commit(self, turn: Turn, outcome: Outcome) -> None:
        """Applies the end of a turn. Ignored if the session was opened again since it began."""
        if turn is not self.turn:
            return
        self.turn = None
        if isinstance(outcome, Finished):
            self._ids = turn.prompt
            self._ids.extend(outcome.answer)
            self._committed = turn.prompt_tokens + len(outcome.answer)
        elif isinstance(outcome, Lost):
            self.discard_context()

    def discard_context(self) -> None:
        """Makes the context unknown for good. The end of a running turn doesn't change that."""
        self.turn = None
        self._is_lost = True
        self._ids = array("q")
        self._committed = 0

    def _refusal(self, namespace: object) -> Refused | None:
        if self._is_lost:
            return Refused("the session's context isn't known", can_run_elsewhere=True)
        if self.turn is not None:
            return Refused("a turn of the session runs")
        if self._committed and namespace != self._cache_namespace:
            return Refused("another adapter or salt than the session's", can_run_elsewhere=True)
        return None

    def check_invariants(self) -> None:
        assert bool(self._committed) == bool(self._ids), "a length without ids, or ids without one"
        assert not (self._is_lost and (self._ids or self.turn)), "a lost context has ids or a turn"
        if self.turn is not None:
            assert self.turn.prompt_tokens >= self._committed, "a turn that takes tokens away"


def guard_bos(rest: array, committed: int, bos: int | None) -> array:
    """Returns what to send so that the engine appends all of `rest`: with a context, the engine
    removes one leading BOS, so a second one is added."""
    if committed and len(rest) and rest[0] == bos:
        return array("q", [bos]) + rest
    return rest


def common_prefix_len(a: array, b: array) -> int:
    """Returns the number of leading items that are equal."""
    low, high = 0, min(len(a), len(b))
    # Slices are compared in C, which is much faster than comparing items in Python.
    a, b = memoryview(a), memoryview(b)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _find_cut(ids: array, prompt: array, shared: int, tokenizer: Tokenizer) -> int | None:
    """Returns the cut, where the rest of the prompt begins, if the prompt before it has the same
    text as `ids`; else None. The first `shared` ids must be equal."""
    earliest = len(ids) - DRIFT_TOKENS_MAX
    # The comparison starts after the last special token that both sides share.
    start = shared
    while start >= earliest and start > 0 and ids[start - 1] not in tokenizer.specials:
        start -= 1
    if start < earliest:
        return None
    begin = cut = start
    while True:
        end = _next_special(ids, begin, tokenizer)
        part = _reencode(ids[begin:end], tokenizer)
        if part is None or list(prompt[cut : cut + len(part)]) != part:
            return None
        cut += len(part)
        if end == len(ids):
            break
        if cut >= len(prompt) or prompt[cut] != ids[end]:
            return None
        begin, cut = end + 1, cut + 1
    if cut >= len(prompt):
        return None
    # A special token is just before the cut, or just after it.
    if begin == len(ids) or prompt[cut] in tokenizer.specials:
        return cut
    rest = prompt[cut : _next_special(prompt, cut, tokenizer)]
    if len(rest) > DRIFT_TOKENS_MAX or _reencode(rest, tokenizer) != list(rest):
        return None
    return cut


def _next_special(ids: array, begin: int, tokenizer: Tokenizer) -> int:
    """Returns the position of the first special token from `begin` on, or the end of the ids."""
    for place in range(begin, len(ids)):
        if ids[place] in tokenizer.specials:
            return place
    return len(ids)


def _reencode(ids: array, tokenizer: Tokenizer) -> list[int] | None:
    """Decodes the ids and encodes the text again. Returns None if the text is incomplete."""
    if not ids:
        return []
    decoded = tokenizer.decode(ids)
    if "\ufffd" in decoded:
        return None
    return tokenizer.encode(decoded)
