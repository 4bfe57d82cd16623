"""Tests trimming with random histories, edits and outcomes.

After a turn, the engine's context is the client's prompt and the answer, equal to the byte. A turn
is never appended to any other context.

A client sends chats or plain text, resends everything each time, and edits as clients do. The
engine is `model.EngineSession`; the `trim` tests of the integration suite use SGLang.
"""

from array import array

from berth_shim.transcripts import Transcripts
from berth_shim.trim import (
    DRIFT_TOKENS_MAX, TOKENS_MAX, Diverged, Finished, Lost, Refused, Retokenized, RolledBack,
    TooLong, Transcript, Trimmed, guard_bos, is_improvable,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .model import (
    BEGIN, BOS, FIRST_PIECE, ID_COUNT, PIECES, SPECIALS, TURN_BEGIN, TURN_END, TURN_END_ID,
    EngineSession, ToyTokenizer, ids_of, raw,
)

TEXTS = st.text(alphabet="ab \né\ufffd", max_size=6)
# Most answers are text; some have tokens that are halves of a character.
LETTERS = [FIRST_PIECE + PIECES.index(piece) for piece in (b"a", b"b", b" ", b" a", b"ba")]
WORDS = st.lists(st.sampled_from(LETTERS), max_size=6)
ANSWERS = st.one_of(
    WORDS,
    WORDS,
    st.lists(st.integers(FIRST_PIECE, ID_COUNT - 1), max_size=6),
)
SESSION = "s"


class Conversation(RuleBasedStateMachine):
    """One session: the client's messages, the engine's session, and the shim between them."""

    @initialize(chat=st.booleans(), system=TEXTS, bos=st.booleans())
    def begin(self, chat: bool, system: str, bos: bool) -> None:
        self.chat, self.bos = chat, bos
        # The parts that the client resends: text before the first answer, an answer, text after it,
        # and so on.
        self.parts: list[str] = [system]
        self.engine, self.tokenizer = EngineSession(), ToyTokenizer()
        self.transcripts = Transcripts(tokens_max=400)
        self.transcripts.open(SESSION)
        self.turn = None

    def prompt(self) -> array:
        if not self.chat:
            return ids_of((BEGIN if self.bos else "") + "".join(self.parts))
        turns = [f"{TURN_BEGIN}{part}{TURN_END}\n" for part in self.parts]
        return ids_of((BEGIN if self.bos else "") + "".join(turns) + TURN_BEGIN)

    # What the client does before it asks again.

    @rule(said=TEXTS, special=st.sampled_from(("", "", *SPECIALS)))
    def goes_on(self, said: str, special: str) -> None:
        """Adds text. Text that looks like a special token becomes one, from any source."""
        self.parts.append(special + said)

    @rule(place=st.integers(0, 3), said=TEXTS)
    def edits(self, place: int, said: str) -> None:
        self.parts[place % len(self.parts)] = said

    @rule()
    def drops_the_last(self) -> None:
        self.parts = self.parts[:-1] or [""]

    @rule(summary=TEXTS)
    def compacts(self, summary: str) -> None:
        self.parts = [self.parts[0], summary]

    # The steps of a turn.

    @precondition(lambda self: self.turn is None)
    @rule(
        has_tokenizer=st.booleans(), adapter=st.sampled_from((None, None, None, "lora")),
        room=st.one_of(st.none(), st.none(), st.integers(-3, 3)),
    )
    def asks(self, has_tokenizer: bool, adapter: str | None, room: int | None = None) -> None:
        """Begins a turn, without a bound, or with a bound some tokens above or below the prompt's
        length."""
        prompt = self.prompt()
        transcript = self.transcripts.get(SESSION)
        before = raw(self.engine.context)
        tokens_max = TOKENS_MAX if room is None else max(0, len(prompt) + room)
        tokenizer = self.tokenizer if has_tokenizer else None
        plan = transcript.plan(prompt, tokenizer, adapter, tokens_max)
        event(type(plan).__name__)
        # No turn runs, so another session or more room could help any prompt that can't be trimmed.
        assert is_improvable(plan) != isinstance(plan, Trimmed | Retokenized)
        if isinstance(plan, TooLong):
            assert plan.prompt_tokens > tokens_max
            one_less = transcript.plan(prompt, tokenizer, adapter, plan.prompt_tokens - 1)
            assert one_less == plan, "it asked for more room than needed"
            tokens_max = plan.prompt_tokens
            plan = transcript.plan(prompt, tokenizer, adapter, tokens_max)
            assert isinstance(plan, Trimmed | Retokenized), "the room asked for is too small"
        if isinstance(plan, Diverged):
            longer = raw(prompt).startswith(before) and len(raw(prompt)) > len(before)
            ids = list(prompt[: len(self.engine.context)]) == self.engine.context
            assert not (longer and ids), f"refused although it only goes on: {plan}"
            assert plan.shared_tokens <= len(prompt)
        if not isinstance(plan, Trimmed | Retokenized):
            return
        full = list(prompt)
        sent = guard_bos(plan.new_ids, plan.committed_tokens, BOS)
        context_tokens = len(self.engine.context)
        assert plan.committed_tokens == context_tokens, "the engine's count of its context"
        assert len(plan.new_ids), "a turn that brings nothing"
        reached = self.engine.accept(sent, adapter)
        assert raw(reached) == raw(full), f"another context than the client's: {plan}"
        assert len(reached) <= tokens_max, "more than there is room for"
        if isinstance(plan, Retokenized) and "\ufffd" not in self.tokenizer.decode(plan.new_ids):
            alone = self.tokenizer.encode(self.tokenizer.decode(plan.new_ids))
            assert alone == list(plan.new_ids), "a cut where the sides depend on each other"
        self.turn = self.transcripts.change(
            SESSION, lambda it: it.begin(prompt, plan.new_ids, adapter)
        )
        assert self.turn.prompt_tokens == len(reached), "the count the engine will report"
        overlap = transcript.plan(array("q", full), self.tokenizer, adapter)
        assert isinstance(overlap, Refused), "a second turn beside one that runs"
        assert not is_improvable(overlap), "the turn of a busy session went to another one"

    @precondition(lambda self: self.turn is None)
    @rule(said=TEXTS, bos=st.booleans())
    def appends(self, said: str, bos: bool) -> None:
        """Another client sends new tokens only. In plain text, this client resends them later."""
        ids = ids_of((BEGIN if bos else "") + said)
        if not (len(ids) or self.engine.context):
            return
        before = list(self.engine.context)
        adapter = self.engine.adapter
        reached = list(self.engine.accept(ids, adapter))
        self.turn = self.transcripts.change(SESSION, lambda it: it.append(ids, BOS, adapter))
        if self.turn is None:
            self.engine.abort()
            return
        assert raw(self.turn.prompt) == raw(reached), "another prompt than the engine's"
        assert self.turn.prompt_tokens == len(reached)
        if before and not self.chat:
            self.parts.append(said)

    @precondition(lambda self: self.turn is not None)
    @rule(ids=ANSWERS)
    def answers(self, ids: list[int]) -> None:
        self.engine.generate(ids)

    @precondition(lambda self: self.turn is not None)
    @rule()
    def is_retracted(self) -> None:
        self.engine.retract()

    @precondition(lambda self: self.turn is not None)
    @rule(over=st.integers(0, 3), ends=st.booleans(), keeps=st.booleans())
    def finishes(self, over: int, ends: bool, keeps: bool) -> None:
        """Ends the turn at its limit, or by the token that ends a turn. Speculation may have
        generated `over` tokens beyond the end."""
        if ends:
            self.engine.generate([TURN_END_ID])
        stop = len(self.engine.answer)
        self.engine.generate([FIRST_PIECE] * over)
        prompt = raw(self.turn.prompt)
        sent = self.engine.finish(stop)
        self.transcripts.change(SESSION, lambda it: it.commit(self.turn, Finished(sent)))
        assert raw(self.engine.context) == prompt + raw(sent), "not the prompt and the answer"
        self.turn = None
        if keeps:
            shown = sent[:-1] if ends else sent
            self.parts.append(self.tokenizer.decode(shown))

    @precondition(lambda self: self.turn is None)
    @rule(said=TEXTS, ids=ANSWERS, ends=st.booleans())
    def runs_a_complete_turn(self, said: str, ids: list[int], ends: bool) -> None:
        """Runs a whole turn, as most turns run. A diverged session is reopened with the full
        history."""
        self.parts.append(said)
        self.asks(has_tokenizer=True, adapter=None)
        if self.turn is None:
            self.reopens()
            self.asks(has_tokenizer=True, adapter=None)
        if self.turn is not None:
            self.answers(ids)
            self.finishes(over=0, ends=ends, keeps=True)

    @precondition(lambda self: self.turn is not None)
    @rule()
    def is_aborted(self) -> None:
        outcome = Lost() if self.engine.retracted else RolledBack()
        self.engine.abort()
        self.transcripts.change(SESSION, lambda it: it.commit(self.turn, outcome))
        self.turn = None

    @rule()
    def reopens(self) -> None:
        stale, self.turn = self.turn, None
        self.transcripts.open(SESSION)
        self.engine = EngineSession()
        if stale is not None:
            # The end of a turn from before the session was reopened.
            self.transcripts.change(SESSION, lambda it: it.commit(stale, Finished([FIRST_PIECE])))

    @invariant()
    def the_context_is_known(self) -> None:
        if not hasattr(self, "transcripts"):
            return
        self.transcripts.check_invariants()
        transcript = self.transcripts.get(SESSION)
        if isinstance(transcript.plan(array("q"), None, self.engine.adapter), Diverged):
            assert transcript.committed_tokens == len(self.engine.context), "the engine's count"
            assert raw(transcript._ids) == raw(self.engine.context), "not the engine's text"


# Answers whose text gets other tokens when the client sends it back.


@settings(max_examples=500)
@given(asked=TEXTS, ids=WORDS, ends=st.booleans(), more=TEXTS)
def test_a_chat_goes_on_however_its_answers_were_tokenized(
    asked: str, ids: list[int], ends: bool, more: str
) -> None:
    tokenizer, transcript = ToyTokenizer(), Transcript()
    first = f"{TURN_BEGIN}{asked}{TURN_END}\n{TURN_BEGIN}"
    prompt = ids_of(first)
    turn = transcript.begin(prompt, prompt)
    transcript.commit(turn, Finished([*ids, TURN_END_ID] if ends else ids))
    resent = f"{first}{tokenizer.decode(ids)}{TURN_END}\n{TURN_BEGIN}{more}"
    plan = transcript.plan(ids_of(resent), tokenizer)
    assert isinstance(plan, Trimmed | Retokenized)
    assert raw(plan.new_ids) == f"{'' if ends else TURN_END}\n{TURN_BEGIN}{more}".encode()


def test_a_cut_in_plain_text_is_safe_only_if_the_rest_encodes_alone_to_the_same_ids() -> None:
    transcript, prompt = Transcript(), ids_of("a")
    transcript.commit(transcript.begin(prompt, prompt), Finished(LETTERS[:2]))
    assert isinstance(transcript.plan(ids_of("aab a"), ToyTokenizer()), Retokenized)
    assert isinstance(transcript.plan(ids_of("aabba"), ToyTokenizer()), Diverged)


def test_texts_with_different_special_tokens_differ() -> None:
    transcript, prompt = Transcript(), ids_of("a")
    answer = Finished([*LETTERS[:2], TURN_END_ID])
    transcript.commit(transcript.begin(prompt, prompt), answer)
    for mark, plan in ((TURN_END, Retokenized), (TURN_BEGIN, Diverged)):
        assert isinstance(transcript.plan(ids_of(f"aab{mark}\n"), ToyTokenizer()), plan)


def test_a_prompt_that_adds_nothing_diverges() -> None:
    for end in ([], [TURN_END_ID]):
        transcript, prompt = Transcript(), ids_of("a")
        turn = transcript.begin(prompt, prompt)
        transcript.commit(turn, Finished([*LETTERS[:2], *end]))
        again = ids_of("aab" + TURN_END * len(end))
        assert isinstance(transcript.plan(again, ToyTokenizer()), Diverged)


def test_a_long_difference_is_not_decoded() -> None:
    class Costly(ToyTokenizer):
        def decode(self, ids: object) -> str:
            raise AssertionError("decoded")

    transcript, long = Transcript(), array("q", LETTERS * DRIFT_TOKENS_MAX)
    prompt = ids_of(f"{TURN_BEGIN}a") + long
    transcript.commit(transcript.begin(prompt, prompt), Finished([]))
    other = ids_of(f"{TURN_BEGIN}b") + long + long
    assert transcript.plan(other, Costly()) == Diverged(1, len(prompt))


def test_without_a_tokenizer_ids_must_be_equal() -> None:
    transcript, prompt = Transcript(), ids_of("a")
    transcript.commit(transcript.begin(prompt, prompt), Finished([LETTERS[0], LETTERS[1]]))
    again = ids_of("aab" + TURN_END)
    assert isinstance(transcript.plan(again, ToyTokenizer()), Retokenized)
    assert isinstance(transcript.plan(again, None), Diverged)


def test_a_tokenizer_that_folds_texts_proves_nothing() -> None:
    class Folding(ToyTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("é", "a"))

    for answer, plan_type in (("é", Diverged), ("ab", Retokenized)):
        transcript, prompt = Transcript(), ids_of(TURN_BEGIN)
        # The model spells its answer in the shortest pieces, which the tokenizer doesn't.
        pieces = [FIRST_PIECE + PIECES.index(bytes([byte])) for byte in answer.encode()]
        transcript.commit(transcript.begin(prompt, prompt), Finished(pieces))
        again = array("q", Folding().encode(f"{TURN_BEGIN}{answer}{TURN_END}"))
        assert isinstance(transcript.plan(again, Folding()), plan_type), answer


def test_a_begin_token_after_the_context_is_kept() -> None:
    """The engine drops a BOS token at the beginning of what is appended to a context."""
    transcript, engine = Transcript(), EngineSession()
    for text in (f"{BEGIN}a", f"{BEGIN}a{BEGIN}b", f"{BEGIN}a{BEGIN}b{BEGIN}{BEGIN}a"):
        plan = transcript.plan(ids_of(text), ToyTokenizer())
        reached = engine.accept(guard_bos(plan.new_ids, plan.committed_tokens, BOS), None)
        assert raw(reached) == text.encode()
        transcript.commit(transcript.begin(ids_of(text), plan.new_ids), Finished([]))
        engine.finish(0)


def test_an_overlapping_turn_that_was_not_planned_makes_the_context_unknown() -> None:
    transcript, prompt = Transcript(), ids_of("a")
    turn = transcript.begin(prompt, prompt)
    assert transcript.append(ids_of("b"), BOS) is None
    transcript.commit(turn, Finished(LETTERS))
    assert isinstance(transcript.plan(ids_of("a"), ToyTokenizer()), Refused)
    transcript.check_invariants()


def test_at_the_bound_the_session_idle_longest_is_dropped() -> None:
    """Afterwards its turns are refused."""
    transcripts = Transcripts(sessions_max=3, tokens_max=10)
    prompt = ids_of("a b")
    for id in ("runs", "old", "new"):
        transcripts.open(id)
        turn = transcripts.change(id, lambda it: it.begin(prompt[:], prompt))
        transcripts.change(id, lambda it: it.commit(turn, Finished(LETTERS[:2])))
        if id == "runs":
            transcripts.change(id, lambda it: it.begin(prompt[:], prompt))
        transcripts.check_invariants()
    assert isinstance(transcripts.get("old").plan(prompt, None), Refused)
    assert isinstance(transcripts.get("new").plan(prompt, None), Diverged)
    assert len(transcripts.get("runs"))
    transcripts.open("fourth")
    assert "old" not in transcripts
    assert "runs" in transcripts
    transcripts.check_invariants()


# Last, because it takes longest.
Conversation.TestCase.settings = settings(max_examples=500, stateful_step_count=40)
TestConversation = Conversation.TestCase
