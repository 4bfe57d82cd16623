"""Tests which plans the trimmer sends to the agent, and which questions it asks the agent.

For each marked turn, exactly one plan holds. The agent is asked first only if another session, or
more room in this session, could help. The agent here is the integration suite's `trim_listener`,
on a socket.
"""

import asyncio
import itertools
import tempfile
import threading
import unittest
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from berth_shim import trimmer
from berth_shim.trimmer import NotContinued, Trimmer
from hypothesis import event, given, settings
from hypothesis import strategies as st
from integration.trim_listener import Plan, TrimListener

from .engine import Manager, Request, Tokenizer
from .model import ids_of, raw
from .test_trim import LETTERS
from .test_trimmer import ANSWER, House

NOT_ANSWERED = "the agent didn't answer in time"
LET = "the agent lets it run as it came"
# The trimmer waits for an agent that doesn't answer. The tests of silent agents wait less. The
# other tests wait longer, because a busy machine may delay the agent, a thread here, by seconds.
PATIENT = patch.object(trimmer, "ANSWER_SECONDS_MAX", 60)
IMPATIENT = patch.object(trimmer, "ANSWER_SECONDS_MAX", 0.05)


class AskedHouse(House):
    """The trimmer in an engine, with an agent."""

    def __init__(self, folder: str, instance: bytes = bytes(16)) -> None:
        self.manager, self.trimmer = Manager(), Trimmer(instance, "0")
        self.trimmer.ready(Tokenizer(), SimpleNamespace)
        self.agent = TrimListener(Path(folder) / "shim.sock.trim")
        self.trimmer.meet(f"{folder}/shim.sock", True)

    async def greeted(self) -> None:
        self.agent.connected()
        while not self.trimmer._link.connected:
            await asyncio.sleep(0)

    async def asks(self, asked: Request) -> Any:
        """Runs a request until it would go to the scheduler. Returns the pieces of the answer, or
        None for a batch."""
        if asked.fields.get("batch"):
            await self.trimmer._enter(self._batched, self.manager, asked, asked.http)
            return None
        return await self.begin(asked)

    async def _batched(self, manager: Manager, asked: Request, _http: Any) -> None:
        await self.trimmer._batch(Manager.batch, manager, asked)

    async def answered(self, asked: Request) -> Plan:
        """Runs a whole turn. Returns the plan that holds for the turn."""
        if (pieces := await self.asks(asked)) is not None:
            self.manager.generate(asked.rid, ANSWER, "length")
            await anext(pieces)
        [plan] = await asyncio.to_thread(self.agent.plans, asked.rid)
        return plan


Test = Callable[[Any, AskedHouse], Coroutine[Any, Any, None]]


def with_agent(test: Test) -> Callable[[Any], None]:
    def run(self: Any) -> None:
        async def steps() -> None:
            await house.greeted()
            await test(self, house)

        with tempfile.TemporaryDirectory() as folder, PATIENT:
            house = AskedHouse(folder)
            asyncio.run(steps())
            house.agent.close()

    return run


class TestMustContinue(unittest.TestCase):
    """A session that takes delta turns: a full prompt must continue it, or is refused."""

    @with_agent
    async def test_a_prompt_that_continues_runs_in_the_session(self, house: AskedHouse) -> None:
        await house.open("s")
        await house.turn("<s>a<e>", "s", rid="first")
        on = Request("<s>a<e>ab<s>b", "s", "on", must_continue=True)
        self.assertEqual((await house.answered(on)).plan, "trimmed")
        self.assertEqual(house.agent.questions("on"), [])

    @with_agent
    async def test_every_other_prompt_is_refused_and_told_of(self, house: AskedHouse) -> None:
        house.agent.answer = lambda _: "elsewhere"
        await house.open("elsewhere")
        for id in ("s", "lost"):
            await house.open(id)
            await house.turn("<s>a<e>", id, rid=f"first of {id}")
        retracted = await house.begin(Request("<s>a<e>ab<s>", "lost", "retracted"))
        house.manager.generate("retracted", ANSWER, "abort", num_retractions=1)
        await anext(retracted)
        sent = house.manager.sent
        for what, text, session, plan in (
            ("it diverged", "<s>b<e>", "s", "diverged"),
            ("it adds nothing", "<s>a<e>ab", "s", "diverged"),
            ("its context isn't known", "<s>a<e>ab<s>b", "lost", "refused"),
            ("no such session", "<s>a<e>ab<s>b", "closed", "refused"),
        ):
            with self.assertRaises(NotContinued, msg=what):
                await house.asks(Request(text, session, what, must_continue=True))
            self.assertIs(house.manager.sent, sent, f"the scheduler got it: {what}")
            [held] = await asyncio.to_thread(house.agent.plans, what)
            self.assertEqual((held.plan, house.agent.questions(what)), (plan, []), what)

    @with_agent
    async def test_more_room_is_asked_for(self, house: AskedHouse) -> None:
        await house.open("s")
        await house.turn("<s>a<e>", "s", rid="first")
        text = "<s>a<e>ab<s>b"
        answers = (("there is room", "s"), ("there is none", ""), ("it has closed", "closed"))
        for what, answer in answers:
            house.agent.answer = lambda _, answer=answer: answer
            tokens_max = len(ids_of(text)) - 1
            asked = Request(text, "s", what, tokens_max=tokens_max, must_continue=True)
            if answer == "s":
                self.assertEqual((await house.answered(asked)).plan, "trimmed")
                text += "ab<s>b"
            else:
                with self.assertRaises(NotContinued):
                    await house.asks(asked)
            self.assertEqual(len(house.agent.questions(what)), 1, what)

    @with_agent
    async def test_an_error_of_the_trimmers_own_lets_nothing_run(self, house: AskedHouse) -> None:
        await house.open("s")
        asked = Request("<s>a<e>", "s", "fails", must_continue=True)
        with patch.object(trimmer, "unfit", side_effect=KeyError("something")):
            with self.assertRaises(NotContinued):
                await house.asks(asked)
        self.assertIsNone(house.manager.sent)


class TestAsked(unittest.TestCase):
    @with_agent
    async def test_who_is_asked(self, house: AskedHouse) -> None:
        house.agent.answer = lambda _: ""
        for id in ("s", "lost", "runs"):
            await house.open(id)
            await house.turn("<s>a<e>", id, rid=f"first of {id}")
        retracted = await house.begin(Request("<s>a<e>ab<s>", "lost", "retracted"))
        house.manager.generate("retracted", ANSWER, "abort", num_retractions=1)
        await anext(retracted)
        await house.begin(Request("<s>a<e>ab<s>", "runs", "running"))

        on, refused = "<s>a<e>ab<s>b", "refused"
        for what, asked, plan in (
            ("it diverged", Request("<s>b<e>", "s"), "diverged"),
            ("its context isn't known", Request(on, "lost"), refused),
            ("another adapter", Request(on, "s", lora_id="other"), refused),
            ("no such session", Request(on, "closed"), refused),
            ("too long", Request(on, "s", tokens_max=len(ids_of(on)) - 1), refused),
        ):
            asked.rid = what
            held = await house.answered(asked)
            [question] = house.agent.questions(what)
            self.assertEqual((question.plan, held.plan), (plan, plan), what)
            self.assertEqual(held.why, "; ".join(filter(None, (question.why, LET))))
            self.assertEqual(house.sent, asked.text, "it runs as it came")
        for what, asked, plan in (
            ("it has room", Request(on, "s", tokens_max=len(ids_of(on))), "trimmed"),
            ("a turn runs", Request(on, "runs"), refused),
            ("an image", Request(on, "s", mm_inputs="an image"), refused),
            ("its mark can't be read", Request(on, mark="s"), refused),
            ("a batch", Request(on, "s", batch=True), refused),
        ):
            asked.rid = what
            held = await house.answered(asked)
            self.assertEqual(held.plan, plan, what)
            self.assertEqual(house.agent.questions(what), [], what)

    @with_agent
    async def test_unreadable_marks_are_refused(self, house: AskedHouse) -> None:
        await house.open("1-2")
        marks = ("", "s", "s 1", "-1 s", "1", "1 ", " 1 s", "12345678901 s", "² s")
        for n, mark in enumerate(marks):
            held = await house.answered(Request("<s>a", mark=mark, rid=f"{n}"))
            self.assertEqual((held.plan, held.why), ("refused", "its mark can't be read"), mark)
            self.assertIsNone(house.manager.sent.session_params)
        self.assertEqual((await house.answered(Request("<s>a", "1-2", "last"))).plan, "trimmed")

    @with_agent
    async def test_a_plan_is_told_under_the_name_that_the_agent_gave_the_turn(
        self, house: AskedHouse
    ) -> None:
        await house.open("s")
        await house.open("fresh")
        house.agent.answer = lambda _: "fresh"
        for named, to in (("s", "s"), ("gone", "fresh")):
            await house.asks(Request("<s>a", mark=f"100 {named} turn to {to}", rid=named))
            [plan] = await asyncio.to_thread(house.agent.plans, f"turn to {to}")
            self.assertEqual((plan.plan, plan.session), ("trimmed", to))

    @with_agent
    async def test_the_room_that_it_asks_for_is_enough(self, house: AskedHouse) -> None:
        await house.open()
        pieces = await house.begin(Request("<s>a<e>", "s", "first"))
        # The client's prompt has these two tokens' text in one token.
        house.manager.generate("first", LETTERS[:2], "length")
        await anext(pieces)

        def more(plan: Plan) -> str:
            house.agent.tokens_max = plan.prompt
            return "s"

        house.agent.answer = more
        text = "<s>a<e>ab<s>b"
        held = await house.answered(Request(text, "s", "second", tokens_max=len(ids_of(text))))
        [question] = house.agent.questions("second")
        self.assertEqual((held.plan, question.prompt), ("healed", len(ids_of(text)) + 1))
        self.assertEqual(len(house.manager.prompt), question.prompt)
        self.assertEqual(held.committed + held.sent, question.prompt)

    @with_agent
    async def test_a_late_answer_means_nothing(self, house: AskedHouse) -> None:
        await house.open("fresh")
        late = threading.Event()

        def answer(_: Plan) -> str:
            late.wait()
            return "fresh"

        house.agent.answer = answer
        with IMPATIENT:
            pieces = await house.begin(Request("<s>a", "closed", "first"))
        self.assertIsNone(house.manager.sent.session_params)
        late.set()
        house.manager.generate("first", ANSWER, "length")
        await anext(pieces)
        [held] = await asyncio.to_thread(house.agent.plans, "first")
        self.assertEqual(held.why, f"no such session is open; {NOT_ANSWERED}")

    @with_agent
    async def test_an_abort_while_it_asks_is_not_the_last_that_the_engine_hears(
        self, house: AskedHouse
    ) -> None:
        await house.open("fresh")

        def aborted(_: Plan) -> str:
            house.manager.rid_to_state["first"].abort_sent = True
            return "fresh"

        house.agent.answer = aborted
        await house.begin(Request("<s>a", "closed", "first"))
        self.assertFalse(house.manager.rid_to_state["first"].abort_sent)

    @with_agent
    async def test_an_agent_that_did_not_read_hears_the_rest_when_it_does(
        self, house: AskedHouse
    ) -> None:
        reads, wrong = threading.Event(), Request("<s>a", mark="wrong")
        house.agent.answer = lambda _: "" if reads.wait() else None
        with IMPATIENT:
            await house.begin(Request("<s>a", "closed", "asks"))
            while house.trimmer._link.ready():
                await house.tokenize(wrong)
            for wrong.rid in ("one more", "the last"):
                await house.tokenize(wrong)
        reads.set()
        for rid in ("one more", "the last"):
            await asyncio.to_thread(house.agent.plans, rid)

    def test_another_engines_questions_have_other_numbers(self) -> None:
        async def number(house: AskedHouse) -> int:
            await house.greeted()
            await house.answered(Request("<s>a", "closed", "asks"))
            [question] = house.agent.questions("asks")
            return question.question

        numbers = set()
        for engine in range(3):
            with tempfile.TemporaryDirectory() as folder:
                house = AskedHouse(folder, bytes([engine] * 16))
                numbers.add(asyncio.run(number(house)))
                house.agent.close()
        self.assertEqual(len(numbers), 3)


# What a client sends next, how the turn is marked, and what the agent answers.
TURNS = st.fixed_dictionaries({
    "text": st.sampled_from(("goes on", "goes on", "the same", "another")),
    "marked": st.sampled_from(("well", "well", "well", "closed", "wrong")),
    "room": st.sampled_from((None, None, -1, 0, 1)),
    "more": st.sampled_from(({}, {}, {}, {"mm_inputs": "an image"}, {"batch": True})),
    "answer": st.sampled_from(("fresh", "fresh", "the same", "closed", "", None)),
    "answers_room": st.sampled_from((None, -1, 0)),
})


class TestOnePlanHolds(unittest.TestCase):
    """For any sequence of turns: the plan is sent before the engine gets the turn, and the engine
    gets what the plan says."""

    def test_exactly_one_plan_holds_of_each_marked_turn(self) -> None:
        names = map(str, itertools.count())
        runner = asyncio.Runner()

        @settings(max_examples=150, deadline=None, database=None, print_blob=True)
        @given(turns=st.lists(TURNS, min_size=1, max_size=8))
        def check(turns: list[dict[str, Any]]) -> None:
            runner.run(conversation(house, turns, names))

        with tempfile.TemporaryDirectory() as folder, IMPATIENT, runner:
            house = AskedHouse(folder)
            runner.run(house.greeted())
            check()
            house.agent.close()


async def conversation(house: AskedHouse, turns: list[dict[str, Any]], names: Any) -> None:
    manager, agent, session = house.manager, house.agent, f"s{next(names)}"
    await house.open(session)
    told: list[str] = []
    for turn in turns:
        said = raw(manager.sessions[session].context).decode()
        text = {"goes on": f"{said}<s>a<e>", "the same": said or "<s>", "another": "<s>b<e>"}
        text = text[turn["text"]]
        tokens, fresh, rid = len(ids_of(text)), f"s{next(names)}", f"r{next(names)}"
        await house.open(fresh)
        room = 1 << 20 if turn["room"] is None else max(0, tokens + turn["room"])
        marked = {"well": session, "closed": "closed", "wrong": None}[turn["marked"]]
        asked = Request(
            text, marked, rid, room, mark=None if marked else "wrong", **turn["more"]
        )

        named = {"fresh": fresh, "the same": session}.get(turn["answer"], turn["answer"])
        others = turn["answers_room"]
        agent.answer = lambda _, named=named: named
        agent.tokens_max = 1 << 20 if others is None else max(0, tokens + others)

        def fits(id: str | None, room: int) -> bool:
            context = raw(manager.sessions[id].context).decode() if id in manager.sessions else text
            return text.startswith(context) and text != context and tokens <= room

        able = marked is not None and not turn["more"]
        asks = able and not fits(marked, room)
        where, bound = (named, agent.tokens_max) if asks else (marked, room)
        runs = able and fits(where, bound)

        pieces = await house.asks(asked)
        prompt = [] if pieces is None else manager.prompt
        if pieces is not None:
            manager.generate(rid, ANSWER, "length")
            await anext(pieces)
        held = (await asyncio.to_thread(agent.plans, rid))[-1]
        told.append(rid)
        event(f"{held.plan}, {'asked' if asks else 'not asked'}")
        assert len(agent.questions(rid)) == asks, f"who is asked: {turn}"
        assert (held.plan in ("trimmed", "healed")) == runs, f"{held} of {turn}"
        if runs:
            assert (manager.sent.session_params.id, held.session) == (where, where)
            assert held.committed + held.sent == len(prompt) == held.prompt <= bound
            assert raw(prompt).decode() == text, "the client's context"
            session = where
        else:
            assert held.sent == 0 and (held.why or held.plan == "diverged")
            assert held.session == (where if asks and named else marked or ""), f"{held} of {turn}"
            if pieces is not None:
                assert manager.sent.session_params is None, "it runs as it came"
                assert house.sent == text
    # This turn's plan comes after all earlier plans, so none of them is still on its way.
    await house.answered(Request("<s>", mark="wrong", rid=f"r{next(names)}"))
    for rid in told:
        assert len(agent.plans(rid)) == 1, "exactly one plan holds"


if __name__ == "__main__":
    unittest.main()
