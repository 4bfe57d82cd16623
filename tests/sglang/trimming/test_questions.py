"""Tests which plans the trimmer sends to the agent, and which questions it asks the agent.

Each marked turn has exactly one final plan. The agent is asked first only if another session, or
more room in this session, could help. The agent here is the integration suite's `trim_listener`,
on a socket.
"""

import asyncio
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from berth_shim import trimmer
from berth_shim.trimmer import NotContinued, Trimmer
from hypothesis import event, given, settings
from hypothesis import strategies as st
from integration.trim_listener import Plan, TrimListener

from .engine import Manager, Request, Tokenizer
from .model import ids_of, raw
from .test_trim import LETTERS
from .test_trimmer import ANSWER, Harness

NOT_ANSWERED = "the agent didn't answer in time"
LEFT_UNCHANGED = "the agent lets it run as it came"
# The trimmer waits for an agent that doesn't answer. The tests of silent agents wait less. The
# other tests wait longer, because a busy machine may delay the agent, a thread here, by seconds.
PATIENT = patch.object(trimmer, "ANSWER_SECONDS_MAX", 60)
IMPATIENT = patch.object(trimmer, "ANSWER_SECONDS_MAX", 0.05)


class AgentHarness(Harness):
    """The trimmer in an engine, with an agent."""

    def __init__(self, folder: str, instance: bytes = bytes(16)) -> None:
        self.manager, self.trimmer = Manager(), Trimmer(instance, "0")
        self.trimmer.enable(Tokenizer(), SimpleNamespace)
        self.agent = TrimListener(Path(folder) / "shim.sock.trim")
        self.trimmer.connect([f"{folder}/shim.sock"], True)
        self.agent.connected()
        while not self.trimmer._link.is_connected:
            time.sleep(0.001)


    async def send(self, request: Request) -> Any:
        """Runs a request until it would go to the scheduler. Returns the items of the answer, or
        None for a batch."""
        if request.fields.get("batch"):
            await self.trimmer._hook_generate(self._batched, self.manager, request, request.http)
            return None
        return await self.begin(request)

    async def _batched(self, manager: Manager, request: Request, _http: Any) -> None:
        await self.trimmer._hook_batch(Manager.batch, manager, request)

    async def run_for_plan(self, request: Request) -> Plan:
        """Runs a whole turn. Returns its final plan."""
        if (stream := await self.send(request)) is not None:
            self.manager.generate(request.rid, ANSWER, "length")
            await anext(stream)
        [plan] = await asyncio.to_thread(self.agent.plans, request.rid)
        return plan


@pytest.fixture
def harness() -> Iterator[AgentHarness]:
    with tempfile.TemporaryDirectory() as folder, PATIENT:
        harness = AgentHarness(folder)
        yield harness
        harness.agent.close()


# A session that takes delta turns: a full prompt must continue it, or is refused.


async def test_a_prompt_that_continues_runs_in_the_session(harness: AgentHarness) -> None:
    await harness.open("s")
    await harness.run_turn("<s>a<e>", "s", rid="first")
    on = Request("<s>a<e>ab<s>b", "s", "on", must_continue=True)
    assert (await harness.run_for_plan(on)).plan == "trimmed"
    assert harness.agent.questions("on") == []


@pytest.mark.parametrize(("text", "session", "plan"), [
    pytest.param("<s>b<e>", "s", "diverged", id="it diverged"),
    pytest.param("<s>a<e>ab", "s", "diverged", id="it adds nothing"),
    pytest.param("<s>a<e>ab<s>b", "lost", "refused", id="its context isn't known"),
    pytest.param("<s>a<e>ab<s>b", "closed", "refused", id="no such session"),
])
async def test_every_other_prompt_is_refused_and_reported(
    harness: AgentHarness, text: str, session: str, plan: str
) -> None:
    harness.agent.answer = lambda _: "elsewhere"
    await harness.open("elsewhere")
    for id in ("s", "lost"):
        await harness.open(id)
        await harness.run_turn("<s>a<e>", id, rid=f"first of {id}")
    retracted = await harness.begin(Request("<s>a<e>ab<s>", "lost", "retracted"))
    harness.manager.generate("retracted", ANSWER, "abort", num_retractions=1)
    await anext(retracted)
    sent = harness.manager.sent
    with pytest.raises(NotContinued):
        await harness.send(Request(text, session, "refused", must_continue=True))
    assert harness.manager.sent is sent, "the scheduler got the turn"
    [final] = await asyncio.to_thread(harness.agent.plans, "refused")
    assert (final.plan, harness.agent.questions("refused")) == (plan, [])


async def test_more_room_is_asked_for(harness: AgentHarness) -> None:
    await harness.open("s")
    await harness.run_turn("<s>a<e>", "s", rid="first")
    text = "<s>a<e>ab<s>b"
    answers = (("there is room", "s"), ("there is none", ""), ("it has closed", "closed"))
    for what, answer in answers:
        harness.agent.answer = lambda _, answer=answer: answer
        tokens_max = len(ids_of(text)) - 1
        request = Request(text, "s", what, tokens_max=tokens_max, must_continue=True)
        if answer == "s":
            assert (await harness.run_for_plan(request)).plan == "trimmed"
            text += "ab<s>b"
        else:
            with pytest.raises(NotContinued):
                await harness.send(request)
        assert len(harness.agent.questions(what)) == 1, what


async def test_an_error_of_the_trimmer_lets_nothing_run(harness: AgentHarness) -> None:
    await harness.open("s")
    request = Request("<s>a<e>", "s", "fails", must_continue=True)
    with patch.object(trimmer, "request_refusal", side_effect=KeyError("something")):
        with pytest.raises(NotContinued):
            await harness.send(request)
    assert harness.manager.sent is None


async def test_which_turns_ask_the_agent(harness: AgentHarness) -> None:
    harness.agent.answer = lambda _: ""
    for id in ("s", "lost", "runs"):
        await harness.open(id)
        await harness.run_turn("<s>a<e>", id, rid=f"first of {id}")
    retracted = await harness.begin(Request("<s>a<e>ab<s>", "lost", "retracted"))
    harness.manager.generate("retracted", ANSWER, "abort", num_retractions=1)
    await anext(retracted)
    await harness.begin(Request("<s>a<e>ab<s>", "runs", "running"))

    on, refused = "<s>a<e>ab<s>b", "refused"
    for what, request, plan in (
        ("it diverged", Request("<s>b<e>", "s"), "diverged"),
        ("its context isn't known", Request(on, "lost"), refused),
        ("another adapter", Request(on, "s", lora_id="other"), refused),
        ("no such session", Request(on, "closed"), refused),
        ("too long", Request(on, "s", tokens_max=len(ids_of(on)) - 1), refused),
    ):
        request.rid = what
        final = await harness.run_for_plan(request)
        [question] = harness.agent.questions(what)
        assert (question.plan, final.plan) == (plan, plan), what
        assert final.why == "; ".join(filter(None, (question.why, LEFT_UNCHANGED)))
        assert harness.sent == request.text, "the request must run unchanged"
    for what, request, plan in (
        ("it has room", Request(on, "s", tokens_max=len(ids_of(on))), "trimmed"),
        ("a turn runs", Request(on, "runs"), refused),
        ("an image", Request(on, "s", mm_inputs="an image"), refused),
        ("its mark can't be read", Request(on, mark="s"), refused),
        ("a batch", Request(on, "s", batch=True), refused),
    ):
        request.rid = what
        final = await harness.run_for_plan(request)
        assert final.plan == plan, what
        assert harness.agent.questions(what) == [], what


async def test_unreadable_marks_are_refused(harness: AgentHarness) -> None:
    await harness.open("1-2")
    marks = ("", "s", "s 1", "-1 s", "1", "1 ", " 1 s", "12345678901 s", "² s")
    for n, mark in enumerate(marks):
        final = await harness.run_for_plan(Request("<s>a", mark=mark, rid=f"{n}"))
        assert (final.plan, final.why) == ("refused", "its mark can't be read"), mark
        assert harness.manager.sent.session_params is None
    final = await harness.run_for_plan(Request("<s>a", "1-2", "last"))
    assert final.plan == "trimmed"


async def test_a_plan_carries_the_agents_id_of_the_turn(
    harness: AgentHarness,
) -> None:
    await harness.open("s")
    await harness.open("fresh")
    harness.agent.answer = lambda _: "fresh"
    for named, to in (("s", "s"), ("gone", "fresh")):
        await harness.send(Request("<s>a", mark=f"100 {named} turn to {to}", rid=named))
        [plan] = await asyncio.to_thread(harness.agent.plans, f"turn to {to}")
        assert (plan.plan, plan.session) == ("trimmed", to)


async def test_the_room_asked_for_is_enough(harness: AgentHarness) -> None:
    await harness.open()
    stream = await harness.begin(Request("<s>a<e>", "s", "first"))
    # The client's prompt has these two tokens' text in one token.
    harness.manager.generate("first", LETTERS[:2], "length")
    await anext(stream)

    def more(plan: Plan) -> str:
        harness.agent.tokens_max = plan.prompt
        return "s"

    harness.agent.answer = more
    text = "<s>a<e>ab<s>b"
    second = Request(text, "s", "second", tokens_max=len(ids_of(text)))
    final = await harness.run_for_plan(second)
    [question] = harness.agent.questions("second")
    assert (final.plan, question.prompt) == ("retokenized", len(ids_of(text)) + 1)
    assert len(harness.manager.prompt) == question.prompt
    assert final.committed + final.sent == question.prompt


async def test_a_late_answer_is_ignored(harness: AgentHarness) -> None:
    await harness.open("fresh")
    late = threading.Event()

    def answer(_: Plan) -> str:
        late.wait()
        return "fresh"

    harness.agent.answer = answer
    with IMPATIENT:
        stream = await harness.begin(Request("<s>a", "closed", "first"))
    assert harness.manager.sent.session_params is None
    late.set()
    harness.manager.generate("first", ANSWER, "length")
    await anext(stream)
    [final] = await asyncio.to_thread(harness.agent.plans, "first")
    assert final.why == f"no such session is open; {NOT_ANSWERED}"


async def test_an_abort_during_a_question_can_be_repeated(
    harness: AgentHarness,
) -> None:
    await harness.open("fresh")

    def aborted(_: Plan) -> str:
        harness.manager.rid_to_state["first"].abort_sent = True
        return "fresh"

    harness.agent.answer = aborted
    await harness.begin(Request("<s>a", "closed", "first"))
    assert not harness.manager.rid_to_state["first"].abort_sent


async def test_an_agent_that_reads_again_gets_the_waiting_plans(
    harness: AgentHarness,
) -> None:
    reads, wrong = threading.Event(), Request("<s>a", mark="wrong")
    harness.agent.answer = lambda _: "" if reads.wait() else None
    with IMPATIENT:
        await harness.begin(Request("<s>a", "closed", "asks"))
        while harness.trimmer._link.flush():
            await harness.tokenize(wrong)
        for wrong.rid in ("one more", "the last"):
            await harness.tokenize(wrong)
    reads.set()
    for rid in ("one more", "the last"):
        await asyncio.to_thread(harness.agent.plans, rid)


def test_questions_of_different_engines_have_different_numbers() -> None:
    async def number(harness: AgentHarness) -> int:
        await harness.run_for_plan(Request("<s>a", "closed", "asks"))
        [question] = harness.agent.questions("asks")
        return question.question

    numbers = set()
    for engine in range(3):
        with tempfile.TemporaryDirectory() as folder:
            harness = AgentHarness(folder, bytes([engine] * 16))
            numbers.add(asyncio.run(number(harness)))
            harness.agent.close()
    assert len(numbers) == 3


# What a client sends next, how the turn is marked, and what the agent answers.
TURNS = st.fixed_dictionaries({
    "text": st.sampled_from(("goes on", "goes on", "the same", "another")),
    "marked": st.sampled_from(("well", "well", "well", "closed", "wrong")),
    "room": st.sampled_from((None, None, -1, 0, 1)),
    "more": st.sampled_from(({}, {}, {}, {"mm_inputs": "an image"}, {"batch": True})),
    "answer": st.sampled_from(("fresh", "fresh", "the same", "closed", "", None)),
    "answers_room": st.sampled_from((None, -1, 0)),
})


def test_each_marked_turn_gets_exactly_one_final_plan() -> None:
    """For any sequence of turns: the plan is sent before the engine gets the turn, and the engine
    gets what the plan says."""
    names = map(str, itertools.count())
    runner = asyncio.Runner()

    @settings(max_examples=150)
    @given(turns=st.lists(TURNS, min_size=1, max_size=8))
    def check(turns: list[dict[str, Any]]) -> None:
        runner.run(conversation(harness, turns, names))

    with tempfile.TemporaryDirectory() as folder, runner:
        harness = AgentHarness(folder)
        check()
        harness.agent.close()


async def conversation(harness: AgentHarness, turns: list[dict[str, Any]], names: Any) -> None:
    manager, agent, session = harness.manager, harness.agent, f"s{next(names)}"
    await harness.open(session)
    told: list[str] = []
    for turn in turns:
        said = raw(manager.sessions[session].context).decode()
        text = {"goes on": f"{said}<s>a<e>", "the same": said or "<s>", "another": "<s>b<e>"}
        text = text[turn["text"]]
        tokens, fresh, rid = len(ids_of(text)), f"s{next(names)}", f"r{next(names)}"
        await harness.open(fresh)
        room = 1 << 20 if turn["room"] is None else max(0, tokens + turn["room"])
        marked = {"well": session, "closed": "closed", "wrong": None}[turn["marked"]]
        request = Request(
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

        # Only an agent that never answers may be given up soon.
        with IMPATIENT if turn["answer"] is None else PATIENT:
            stream = await harness.send(request)
        prompt = [] if stream is None else manager.prompt
        if stream is not None:
            manager.generate(rid, ANSWER, "length")
            await anext(stream)
        final = (await asyncio.to_thread(agent.plans, rid))[-1]
        told.append(rid)
        event(f"{final.plan}, {'asked' if asks else 'not asked'}")
        assert len(agent.questions(rid)) == asks, f"whether the agent is asked: {turn}"
        assert (final.plan in ("trimmed", "retokenized")) == runs, f"{final} of {turn}"
        if runs:
            assert (manager.sent.session_params.id, final.session) == (where, where)
            assert final.committed + final.sent == len(prompt) == final.prompt <= bound
            assert raw(prompt).decode() == text, "the client's context"
            session = where
        else:
            assert final.sent == 0 and (final.why or final.plan == "diverged")
            named_session = where if asks and named else marked or ""
            assert final.session == named_session, f"{final} of {turn}"
            if stream is not None:
                assert manager.sent.session_params is None, "the request must run unchanged"
                assert harness.sent == text
    # This turn's plan comes after all earlier plans, so none of them is still on its way.
    await harness.run_for_plan(Request("<s>", mark="wrong", rid=f"r{next(names)}"))
    for rid in told:
        assert len(agent.plans(rid)) == 1, "exactly one plan is final"
