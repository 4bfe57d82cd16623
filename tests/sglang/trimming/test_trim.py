"""Tests trimming with random histories, edits and outcomes.

After a turn, the engine's context is the client's prompt and the answer, equal to the byte. A turn
is never appended to any other context.

A client sends chats or plain text, resends everything each time, and edits as clients do. The
engine is `model.EngineSession`; the `trim` tests of the integration suite use SGLang.
"""

import unittest
from array import array

from berth_shim.transcripts import Transcripts
from berth_shim.trim import (
    DRIFT_TOKENS_MAX, TOKENS_MAX, Diverged, Finished, Healed, Lost, Nothing, RolledBack, TooLong,
    Transcript, Trimmed, askable, guarded,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .model import (
    BEGIN, BOS, FIRST_PIECE, ID_COUNT, PIECES, SPECIALS, TURN_BEGIN, TURN_END, TURN_END_ID,
    EngineSession, ToyText, ids_of, raw,
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
        self.engine, self.text = EngineSession(), ToyText()
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
        heals=st.booleans(), adapter=st.sampled_from((None, None, None, "lora")),
        room=st.one_of(st.none(), st.none(), st.integers(-3, 3)),
    )
    def asks(self, heals: bool, adapter: str | None, room: int | None = None) -> None:
        """Begins a turn, without a bound, or with a bound some tokens above or below the prompt's
        length."""
        prompt = self.prompt()
        transcript = self.transcripts.get(SESSION)
        before = raw(self.engine.context)
        tokens_max = TOKENS_MAX if room is None else max(0, len(prompt) + room)
        text = self.text if heals else None
        plan = transcript.plan(prompt, text, adapter, tokens_max)
        event(type(plan).__name__)
        # No turn runs, so another session or more room could help any prompt that can't be trimmed.
        assert askable(plan) != isinstance(plan, Trimmed | Healed)
        if isinstance(plan, TooLong):
            assert plan.tokens > tokens_max
            one_less = transcript.plan(prompt, text, adapter, plan.tokens - 1)
            assert one_less == plan, "there is room for fewer"
            tokens_max = plan.tokens
            plan = transcript.plan(prompt, text, adapter, tokens_max)
            assert isinstance(plan, Trimmed | Healed), "with as much room as it said"
        if isinstance(plan, Diverged):
            longer = raw(prompt).startswith(before) and len(raw(prompt)) > len(before)
            ids = list(prompt[: len(self.engine.context)]) == self.engine.context
            assert not (longer and ids), f"refused although it only goes on: {plan}"
            assert plan.at <= len(prompt)
        if not isinstance(plan, Trimmed | Healed):
            return
        whole = list(prompt)
        sent = guarded(plan.rest, plan.committed, BOS)
        assert plan.committed == len(self.engine.context), "the engine's count of its context"
        assert len(plan.rest), "a turn that brings nothing"
        reached = self.engine.accept(sent, adapter)
        assert raw(reached) == raw(whole), f"another context than the client's: {plan}"
        assert len(reached) <= tokens_max, "more than there is room for"
        if isinstance(plan, Healed) and "\ufffd" not in self.text.decode(plan.rest):
            alone = self.text.encode(self.text.decode(plan.rest))
            assert alone == list(plan.rest), "a cut where the sides depend on each other"
        begun = lambda it: it.begin(prompt, plan.rest, adapter)
        self.turn = self.transcripts.change(SESSION, begun)
        assert self.turn.prompt_tokens == len(reached), "the count the engine will report"
        overlap = transcript.plan(array("q", whole), self.text, adapter)
        assert isinstance(overlap, Nothing), "a second turn beside one that runs"
        assert not askable(overlap), "no other session is to have it"

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
        assert raw(self.turn.prompt) == raw(reached), "what was appended to, and what"
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
            self.parts.append(self.text.decode(shown))

    @precondition(lambda self: self.turn is None)
    @rule(said=TEXTS, ids=ANSWERS, ends=st.booleans())
    def has_a_whole_turn(self, said: str, ids: list[int], ends: bool) -> None:
        """Runs a whole turn, as most turns run. A diverged session is reopened with the full
        history."""
        self.parts.append(said)
        self.asks(heals=True, adapter=None)
        if self.turn is None:
            self.reopens()
            self.asks(heals=True, adapter=None)
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
            assert transcript.committed == len(self.engine.context), "the engine's count"
            assert raw(transcript._said) == raw(self.engine.context), "another text than is there"


Conversation.TestCase.settings = settings(
    max_examples=500, stateful_step_count=40, deadline=None, database=None, print_blob=True
)
TestConversation = Conversation.TestCase


class TestDrift(unittest.TestCase):
    """Answers whose text gets other tokens when the client sends it back."""

    @settings(max_examples=500, deadline=None, database=None, print_blob=True)
    @given(asked=TEXTS, ids=WORDS, ends=st.booleans(), more=TEXTS)
    def test_a_chat_goes_on_whatever_its_answers_spelling(
        self, asked: str, ids: list[int], ends: bool, more: str
    ) -> None:
        text, transcript = ToyText(), Transcript()
        first = f"{TURN_BEGIN}{asked}{TURN_END}\n{TURN_BEGIN}"
        prompt = ids_of(first)
        turn = transcript.begin(prompt, prompt)
        transcript.commit(turn, Finished([*ids, TURN_END_ID] if ends else ids))
        whole = f"{first}{text.decode(ids)}{TURN_END}\n{TURN_BEGIN}{more}"
        plan = transcript.plan(ids_of(whole), text)
        self.assertIsInstance(plan, Trimmed | Healed)
        self.assertEqual(raw(plan.rest), f"{'' if ends else TURN_END}\n{TURN_BEGIN}{more}".encode())

    def test_a_cut_in_plain_text_is_safe_only_where_the_rest_reads_alone_as_it_does_there(
        self,
    ) -> None:
        transcript, prompt = Transcript(), ids_of("a")
        transcript.commit(transcript.begin(prompt, prompt), Finished(LETTERS[:2]))
        self.assertIsInstance(transcript.plan(ids_of("aab a"), ToyText()), Healed)
        self.assertIsInstance(transcript.plan(ids_of("aabba"), ToyText()), Diverged)

    def test_another_special_token_is_another_text(self) -> None:
        transcript, prompt = Transcript(), ids_of("a")
        answer = Finished([*LETTERS[:2], TURN_END_ID])
        transcript.commit(transcript.begin(prompt, prompt), answer)
        for mark, plan in ((TURN_END, Healed), (TURN_BEGIN, Diverged)):
            self.assertIsInstance(transcript.plan(ids_of(f"aab{mark}\n"), ToyText()), plan)

    def test_the_same_text_again_brings_nothing(self) -> None:
        for end in ([], [TURN_END_ID]):
            transcript, prompt = Transcript(), ids_of("a")
            turn = transcript.begin(prompt, prompt)
            transcript.commit(turn, Finished([*LETTERS[:2], *end]))
            again = ids_of("aab" + TURN_END * len(end))
            self.assertIsInstance(transcript.plan(again, ToyText()), Diverged)

    def test_another_history_is_not_decoded(self) -> None:
        class Costly(ToyText):
            def decode(self, ids: object) -> str:
                raise AssertionError("decoded")

        transcript, long = Transcript(), array("q", LETTERS * DRIFT_TOKENS_MAX)
        prompt = ids_of(f"{TURN_BEGIN}a") + long
        transcript.commit(transcript.begin(prompt, prompt), Finished([]))
        other = ids_of(f"{TURN_BEGIN}b") + long + long
        self.assertEqual(transcript.plan(other, Costly()), Diverged(1, len(prompt)))

    def test_without_a_tokenizer_ids_must_be_equal(self) -> None:
        transcript, prompt = Transcript(), ids_of("a")
        transcript.commit(transcript.begin(prompt, prompt), Finished([LETTERS[0], LETTERS[1]]))
        self.assertIsInstance(transcript.plan(ids_of("aab" + TURN_END), ToyText()), Healed)
        self.assertIsInstance(transcript.plan(ids_of("aab" + TURN_END), None), Diverged)


class TestBos(unittest.TestCase):
    """The engine drops a BOS token at the beginning of what is appended to a context."""

    def test_a_begin_token_behind_the_context_reaches_it(self) -> None:
        transcript, engine = Transcript(), EngineSession()
        for whole in (f"{BEGIN}a", f"{BEGIN}a{BEGIN}b", f"{BEGIN}a{BEGIN}b{BEGIN}{BEGIN}a"):
            plan = transcript.plan(ids_of(whole), ToyText())
            reached = engine.accept(guarded(plan.rest, plan.committed, BOS), None)
            self.assertEqual(raw(reached), whole.encode())
            transcript.commit(transcript.begin(ids_of(whole), plan.rest), Finished([]))
            engine.finish(0)


class TestOthers(unittest.TestCase):
    """Turns that the trimmer didn't plan."""

    def test_a_turn_beside_one_that_runs_makes_the_context_unknown(self) -> None:
        transcript, prompt = Transcript(), ids_of("a")
        turn = transcript.begin(prompt, prompt)
        self.assertIsNone(transcript.append(ids_of("b"), BOS))
        transcript.commit(turn, Finished(LETTERS))
        self.assertIsInstance(transcript.plan(ids_of("a"), ToyText()), Nothing)
        transcript.check_invariants()


class TestBounds(unittest.TestCase):
    """At the bound, the session that was idle longest is dropped, and its turns are refused
    afterwards."""

    def test_who_was_idle_longest_gives_way(self) -> None:
        transcripts = Transcripts(sessions_max=3, tokens_max=10)
        prompt = ids_of("a b")
        for id in ("runs", "old", "new"):
            transcripts.open(id)
            turn = transcripts.change(id, lambda it: it.begin(prompt[:], prompt))
            transcripts.change(id, lambda it: it.commit(turn, Finished(LETTERS[:2])))
            if id == "runs":
                transcripts.change(id, lambda it: it.begin(prompt[:], prompt))
            transcripts.check_invariants()
        self.assertIsInstance(transcripts.get("old").plan(prompt, None), Nothing)
        self.assertIsInstance(transcripts.get("new").plan(prompt, None), Diverged)
        self.assertTrue(len(transcripts.get("runs")))
        transcripts.open("fourth")
        self.assertNotIn("old", transcripts)
        self.assertIn("runs", transcripts)
        transcripts.check_invariants()


if __name__ == "__main__":
    unittest.main()
