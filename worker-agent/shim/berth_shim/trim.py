"""Finds the part of a prompt that its session lacks, so that the engine gets only that part.

The engine appends to a session's tokens, the *context*, whatever a turn sends. A `Transcript` is a
copy of the context, as token ids, in the process that tokenizes. Comparing a full prompt with it
gives a *plan*. This module is pure. The plans are:

- `Trimmed`: the prompt starts with exactly the transcript's ids. The rest is to be appended.
- `Retokenized`: the prompt starts with other ids, but is proven to start with the same text. The
  rest is to be appended.
- `Diverged`: from some token on the text differs, or the prompt has nothing after the transcript.
  Nothing may be appended.
- `TooLong`: the plan would be one of the first two, but there isn't room for so many tokens.
- `Refused`: the comparison isn't possible, for a stated reason.

# Drift

The client sends an answer back as text, and the tokenizer may encode that text with other ids than
the model chose: *drift*. A prompt with drift continues the context if four conditions hold. The
*cut* is where the rest of the prompt begins.

- Between each two special tokens, decoding the transcript's ids and encoding the text gives exactly
  the ids in the prompt.
- The decoded text has no replacement character, which could stand for anything.
- The ids have the same *pieces* (the vocabulary's entries) as those of the prompt, one after the
  other. A tokenizer that normalizes texts (NFKC for example) encodes different texts to the same
  ids, so equal ids alone prove nothing of what the model wrote.
- The texts before and after the cut encode separately to the same ids as together. This is so if a
  special token is on either side of the cut. Otherwise the rest, up to the next special token, must
  encode on its own to the ids that the prompt has there.

Only the prompt's own ids are ever appended. The transcript then keeps them instead of the engine's,
so that the same drift needn't be proven again; `Transcript.committed_tokens` is the length that the
engine counts.

# What the engine commits

To *commit* a turn is to make its tokens part of the context. SGLang 0.5.23 does it in `Session`,
`StreamingSession`, `update_finish_state`, `output_streamer.accept` and `release_req`:

- A turn's context is the previous turn's whole prompt, context included, and the first
  `max_new_tokens` ids of the previous turn's answer.
- A turn that finishes commits `output_ids[:finished_len]` as its answer, which the process that
  tokenizes receives. It ends after the stop token or EOS, after the token that completed a stop
  string (which the text doesn't show), at `max_new_tokens`, and before extra tokens of speculative
  decoding. With `max_new_tokens` 0 there are none.
- A running or waiting turn that is aborted or refused commits nothing.
- A retraction puts a running turn back into the queue, and commits its prompt and its partial
  answer. If the turn then finishes, it commits as usual. If it is aborted, the context keeps an
  unknown part of its answer. So only a turn that was never retracted can be aborted without effect.
- Appending removes one BOS from the start of the new tokens, if the session has a context.
- A flush or a demotion of the session discards its KV, but not its context. Closing the session
  discards both.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Compared as text, after the last special token that prompt and transcript share: usually one
# answer. 16384 tokens take about 20 ms. A longer difference is another history, not drift.
DRIFT_TOKENS_MAX = 16_384
# No engine's pool has as many.
TOKENS_MAX = (1 << 32) - 1


class Tokenizer(Protocol):
    """A tokenizer that encodes and decodes without adding or dropping anything."""

    # The tokenizer splits every text at them before it encodes the parts between them: this
    # module's special tokens.
    split_ids: frozenset[int]

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    # Returns the pieces of the ids, joined; None if an id has none.
    def pieces(self, ids: Sequence[int]) -> str | None: ...


@dataclass(frozen=True)
class Trimmed:
    """The prompt's first `shared_tokens` ids are the whole transcript. `new_ids` is the rest."""

    shared_tokens: int
    committed_tokens: int
    new_ids: array


@dataclass(frozen=True)
class Retokenized:
    """The prompt starts with the transcript's text, in other ids after `shared_tokens`."""

    shared_tokens: int
    committed_tokens: int
    new_ids: array


@dataclass(frozen=True)
class Diverged:
    """After the first `shared_tokens` tokens the text differs, or the prompt has no more tokens."""

    shared_tokens: int
    committed_tokens: int


@dataclass(frozen=True)
class TooLong:
    """The engine would count `prompt_tokens` prompt tokens, which is over the limit."""

    shared_tokens: int
    committed_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Refused:
    """The comparison isn't possible, for the reason `why`."""

    why: str
    # Whether another session could take the turn.
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
    """A turn that the engine runs."""

    def __init__(self, prompt: array, prompt_tokens: int):
        self.prompt = prompt
        # If the engine counts another number, it ran the turn on another context.
        self.prompt_tokens = prompt_tokens


class Transcript:
    """The context of one session, as its clients' prompts write it. It keeps the arrays of the
    prompts passed to it, so the caller must not change them afterwards."""

    def __init__(self) -> None:
        # After drift, these are the ids of the client's prompt.
        self._ids = array("q")
        self._committed_tokens = 0
        self._is_unknown = False
        # What the KV depends on besides the tokens, such as the adapter. All turns have the same.
        self._cache_namespace: object = None
        self.turn: Turn | None = None

    def __len__(self) -> int:
        """Returns the number of ids that the transcript keeps."""
        return len(self._ids)

    @property
    def committed_tokens(self) -> int:
        """The number of tokens of the context, as the engine counts them."""
        return self._committed_tokens

    def plan(
        self,
        prompt: array,
        tokenizer: Tokenizer | None,
        cache_namespace: object = None,
        tokens_max: int = TOKENS_MAX,
    ) -> Plan:
        """Compares a full prompt with the context. `cache_namespace` is what the prompt's KV
        depends on besides its tokens. Without a tokenizer, drift is `Diverged`."""
        if refusal := self._refusal(cache_namespace):
            return refusal
        plan = self._compare(prompt, tokenizer)
        if isinstance(plan, Diverged):
            return plan
        prompt_tokens = plan.committed_tokens + len(plan.new_ids)
        if prompt_tokens <= tokens_max:
            return plan
        return TooLong(plan.shared_tokens, plan.committed_tokens, prompt_tokens)

    def _compare(
        self, prompt: array, tokenizer: Tokenizer | None
    ) -> Trimmed | Retokenized | Diverged:
        ids = self._ids
        shared_tokens = len(ids)
        if len(prompt) > shared_tokens and prompt[:shared_tokens] == ids:
            return Trimmed(shared_tokens, self._committed_tokens, prompt[shared_tokens:])
        shared_tokens = common_prefix_len(ids, prompt)
        if tokenizer is not None and (cut := _find_cut(ids, prompt, shared_tokens, tokenizer)):
            return Retokenized(shared_tokens, self._committed_tokens, prompt[cut:])
        return Diverged(shared_tokens, self._committed_tokens)

    def begin(self, prompt: array, new_ids: array, cache_namespace: object = None) -> Turn:
        """Starts a turn with this full prompt, of which the engine gets `new_ids`. Their plan must
        have been made since the last change of this transcript."""
        assert self.turn is None, "a turn begins in a session that has one"
        self._cache_namespace = cache_namespace
        self.turn = Turn(prompt, self._committed_tokens + len(new_ids))
        return self.turn

    def append(self, ids: array, bos_id: int | None, cache_namespace: object = None) -> Turn | None:
        """Starts a turn whose client sends only new ids. If the context is unknown, another turn
        runs, or the cache namespace differs, returns None and makes the context unknown."""
        if self._refusal(cache_namespace):
            self.discard_context()
            return None
        if self._committed_tokens and len(ids) and ids[0] == bos_id:
            ids = ids[1:]
        return self.begin(self._ids + ids, ids, cache_namespace)

    def commit(self, turn: Turn, outcome: Outcome) -> None:
        """Applies the end of a turn, unless the session was opened again or its context was
        discarded since the turn began."""
        if turn is not self.turn:
            return
        self.turn = None
        if isinstance(outcome, Finished):
            self._ids = turn.prompt
            self._ids.extend(outcome.answer)
            self._committed_tokens = turn.prompt_tokens + len(outcome.answer)
        elif isinstance(outcome, Lost):
            self.discard_context()

    def discard_context(self) -> None:
        """Makes the context unknown for good, even if a running turn finishes later."""
        self.turn = None
        self._is_unknown = True
        self._ids = array("q")
        self._committed_tokens = 0

    def has_other_kv(self, cache_namespace: object) -> bool:
        """Whether the context has KV of another adapter, extra key or salt."""
        return self._committed_tokens > 0 and cache_namespace != self._cache_namespace

    def _refusal(self, cache_namespace: object) -> Refused | None:
        """Returns why no turn with this cache namespace can begin; None if one can."""
        if self._is_unknown:
            return Refused("the session's context isn't known", can_run_elsewhere=True)
        if self.turn is not None:
            return Refused("a turn of the session runs")
        if self.has_other_kv(cache_namespace):
            return Refused("another adapter or salt than the session's", can_run_elsewhere=True)
        return None

    def check_invariants(self) -> None:
        is_empty = not self._ids
        assert is_empty == (not self._committed_tokens), "a length without ids, or ids without one"
        has_state = self._ids or self.turn
        assert not (self._is_unknown and has_state), "a lost context has ids or a turn"
        if self.turn is not None:
            is_growing = self.turn.prompt_tokens >= self._committed_tokens
            assert is_growing, "a turn that takes tokens away"


def guard_bos(new_ids: array, committed_tokens: int, bos_id: int | None) -> array:
    """Returns the ids to send so that the engine appends all of `new_ids`. In a session with a
    context, the engine removes one leading BOS (beginning-of-sequence token)."""
    if committed_tokens and len(new_ids) and new_ids[0] == bos_id:
        return array("q", [bos_id]) + new_ids
    return new_ids


def common_prefix_len(a: array, b: array) -> int:
    """Returns the number of leading items that are equal in both arrays."""
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


def _find_cut(ids: array, prompt: array, shared_tokens: int, tokenizer: Tokenizer) -> int | None:
    """Finds the cut of a prompt with drift; None if the texts can't be proven equal. The first
    `shared_tokens` ids must be equal."""
    earliest_start = len(ids) - DRIFT_TOKENS_MAX
    start = shared_tokens
    while start >= earliest_start and start > 0 and ids[start - 1] not in tokenizer.split_ids:
        start -= 1
    if start < earliest_start:
        return None
    # The texts are equal up to the position `begin` in `ids` and the position `cut` in the prompt.
    begin = cut = start
    while True:
        end = _next_special(ids, begin, tokenizer)
        reencoded_ids = _reencode(ids[begin:end], tokenizer)
        if reencoded_ids is None or list(prompt[cut : cut + len(reencoded_ids)]) != reencoded_ids:
            return None
        if not _have_equal_pieces(ids[begin:end], reencoded_ids, tokenizer):
            return None
        cut += len(reencoded_ids)
        if end == len(ids):
            break
        if cut >= len(prompt) or prompt[cut] != ids[end]:
            return None
        begin, cut = end + 1, cut + 1
    if cut >= len(prompt):
        return None
    # With a special token just before or just after the cut, the two sides encode independently.
    if begin == len(ids) or prompt[cut] in tokenizer.split_ids:
        return cut
    ids_after_cut = prompt[cut : _next_special(prompt, cut, tokenizer)]
    if len(ids_after_cut) > DRIFT_TOKENS_MAX:
        return None
    return cut if _reencode(ids_after_cut, tokenizer) == list(ids_after_cut) else None


def _next_special(ids: array, begin: int, tokenizer: Tokenizer) -> int:
    """Returns the position of the first special token from `begin` on, or else the end."""
    for position in range(begin, len(ids)):
        if ids[position] in tokenizer.split_ids:
            return position
    return len(ids)


def _have_equal_pieces(a: Sequence[int], b: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether both lists of ids spell the same text, as the model sees it."""
    pieces = tokenizer.pieces(a)
    return pieces is not None and pieces == tokenizer.pieces(b)


def _reencode(ids: array, tokenizer: Tokenizer) -> list[int] | None:
    """Decodes the ids and encodes the text again. Returns None if the text has a replacement
    character, which stands for bytes that are no complete character."""
    if not ids:
        return []
    decoded = tokenizer.decode(ids)
    if "\ufffd" in decoded:
        return None
    return tokenizer.encode(decoded)
