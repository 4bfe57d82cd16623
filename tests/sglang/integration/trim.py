"""Tests full histories as turns of a streaming session, trimmed by the shim, without an agent.

The engine runs for these tests only, with the chat model. It writes down each whole prompt and each
session's context. After every trimmed turn, the context is the prompt and the answer: the same ids,
or the same text if an answer was retokenized. The answer is the engine's own to that context.
Nothing of the session was computed again. After an edit of the history, nothing is appended.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from integration import wire
from integration.fleet import MODEL, Fleet, engine_home, start_engine, wait_engine
from integration.planted import PLUGIN
from integration.processes import Process, shim_env
from integration.routes import HEADER, Reply, mark, send
from integration.trim_listener import Plan, TrimListener
from integration.turns import new_id, run_together

TURNS = 10
TOKENS = 24
LET = "the agent lets it run as it came"
# Questions. Conversations differ from the first page on, by the session ids in their prompts.
QUESTIONS = ("Which ships are in?", "And then, you say?", "", "What was that again, and why?")


class Engine:
    """The engine, and what it reports."""

    def __init__(self, fleet: Fleet):
        self.folder = fleet.folder / "trim"
        self.folder.mkdir(exist_ok=True)
        socket = self.folder / "shim.sock"
        self.contexts = self.folder / "contexts.jsonl"
        self.listener = TrimListener(Path(f"{socket}.trim"))
        env = shim_env(socket, fleet.bin_dir)
        env |= {
            "PYTHONPATH": f"{PLUGIN}:{env['PYTHONPATH']}",
            "BERTH_CONTEXTS": str(self.contexts),
            # While several turns run, every third step retracts one of them into the queue.
            "SGLANG_TEST_RETRACT": "true",
        }
        self.page_size = fleet.page_size
        # The same in each run: with other prompts, two tokens that are equally likely could make an
        # answer depend on how it was computed.
        self._names = random.Random(1)
        self.process: Process
        self.process, self.url = start_engine(
            self.folder, fleet.page_size, env=env, model="chat-model"
        )
        made = engine_home() / "chat-model/tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(made.resolve()))
        self.turn_end = self.tokenizer.token_to_id("<|im_end|>")

    def stop(self) -> None:
        self.process.stop(0)
        self.listener.close()

    def open(self) -> str:
        name = f"trim-{self._names.getrandbits(32):08x}"
        request = {"capacity_of_str_len": 1, "session_id": name, "streaming": True}
        return wire.post(f"{self.url}/open_session", request).json()

    def close(self, session: str) -> None:
        wire.post(f"{self.url}/close_session", {"session_id": session})

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def last_written(self, rid: str, what: str) -> list[int] | None:
        """Returns the request's `whole` prompt, or the `context` after its turn."""
        lines = map(json.loads, self.contexts.read_text().splitlines())
        found = [line[what] for line in lines if line["rid"] == rid and what in line]
        return found[-1] if found else None


class Conversation:
    """A client that resends its full history by one route, in one session."""

    def __init__(self, engine: Engine, api: str, stream: bool):
        self.engine, self.api, self.stream = engine, api, stream
        self.session = engine.open()
        self.chats = api not in ("generate", "completions")
        # Messages if the route has them, otherwise the text so far.
        self.messages: list[dict] = []
        self.system = f"{self.session}: you are the harbour master."
        self.text_so_far = f"{self.system}\n"
        self.tools: list[dict] = []
        self.count = 0
        # Whether an answer was retokenized, so that the context's ids differ from the prompt's.
        self.retokenized = False
        # Whether an abort has moved the KV to the radix tree: the next turn finds whole pages.
        self.in_tree = False
        # Whether other turns run too. A turn may then be retracted and computed again.
        self.crowded = False

    def body(self, tokens: int, **more: object) -> dict:
        # In plain text, an answer that ends by itself ends with a token that has no text.
        bias = {str(self.engine.turn_end): -100}
        if self.api == "generate":
            params = {"max_new_tokens": tokens, "temperature": 0, "logit_bias": bias, **more}
            return {"text": self.text_so_far, "sampling_params": params}
        if self.api == "completions":
            return {"prompt": self.text_so_far, "max_tokens": tokens, "logit_bias": bias, **more}
        if self.api == "responses":
            history = {"input": self.messages, "instructions": self.system, "store": False}
            return {**history, "max_output_tokens": tokens, **more}
        if self.api == "messages":
            system = {"system": self.system}
            return {"messages": self.messages, "max_tokens": tokens, **system, **more}
        messages = [{"role": "system", "content": self.system}, *self.messages]
        tools = {"tools": self.tools} if self.tools else {}
        return {"messages": messages, "max_tokens": tokens, **tools, **more}

    def add_question(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        self.text_so_far += f"\n{text}\n"

    def add_answer(self, reply: Reply) -> None:
        self.messages.append({"role": "assistant", "content": reply.text})
        self.text_so_far += reply.text

    def send_turn(self, tokens: int = TOKENS, session: str | None = None, **more: object) -> Reply:
        """Sends a turn and checks its answer, whatever the plan was."""
        body = self.body(tokens, **more)
        before = self.engine.listener.count(self.session)
        reply = send(self.engine.url, self.api, body, session or self.session, self.stream)
        # A plan comes by another way than the answer.
        plan = self.engine.listener.plans(self.session, more_than=before)[-1]
        if plan.plan in ("diverged", "refused"):
            assert self.engine.last_written(plan.rid, "context") is None, f"a context after {plan}"
            plain = send(self.engine.url, self.api, body, None, self.stream)
            assert reply.text == plain.text, f"the answer as it came, {plan}"
        else:
            self._check(plan, reply, body)
        self.count += 1
        return reply

    @property
    def plan(self) -> Plan:
        return self.engine.listener.plans(self.session)[-1]

    def _check(self, plan: Plan, reply: Reply, body: dict) -> None:
        engine = self.engine
        whole = engine.last_written(plan.rid, "whole")
        context = engine.last_written(plan.rid, "context")
        assert whole and context, f"turn {self.count}: not written down, {plan}"
        self.retokenized |= plan.plan == "retokenized"
        # Without figures the answer was empty: the token that ends a turn, and nothing else.
        tokens = reply.prompt_tokens or len(context) - 1
        prompt, answer = context[:tokens], context[tokens:]
        if self.retokenized:
            assert engine.text(prompt) == engine.text(whole), (
                f"turn {self.count}: the context's text"
            )
        else:
            assert prompt == whole, f"turn {self.count}: the context's ids"
        if self.in_tree:
            self.in_tree = False
            assert reply.cached_tokens % engine.page_size == 0, "cached tokens: whole pages"
        elif plan.committed and reply.prompt_tokens and not self.crowded:
            allowed = (plan.committed - 1, plan.committed)
            assert reply.cached_tokens in allowed, f"turn {self.count}: cached tokens, {plan}"
        # The same ids, sent as one prompt without a session.
        params = {"max_new_tokens": len(answer), "temperature": 0}
        if not self.chats:
            params["logit_bias"] = {str(engine.turn_end): -100}
        request = {"input_ids": prompt, "sampling_params": params}
        alone = wire.post(f"{engine.url}/generate", request).json()
        assert answer == alone["output_ids"], f"turn {self.count}: the answer, {plan}"
        if not self.retokenized:
            plain = send(engine.url, self.api, body, None, self.stream)
            assert reply.text == plain.text, f"turn {self.count}: the text without a session"
            assert reply.prompt_tokens == plain.prompt_tokens, f"turn {self.count}: prompt tokens"

    def send_next_turn(self, *plans: str) -> Reply:
        """Sends a turn with a new question, whose plan must be one of `plans`."""
        self.add_question(QUESTIONS[self.count % len(QUESTIONS)])
        reply = self.send_turn()
        allowed = plans or ("trimmed", "retokenized")
        assert self.plan.plan in allowed, f"turn {self.count}: {self.plan}"
        self.add_answer(reply)
        return reply


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> Iterator[Engine]:
    engine = Engine(fleet)
    try:
        wait_engine(engine.process, engine.url)
        assert engine.listener.connected() == "", "why nothing is trimmed"
        yield engine
    finally:
        engine.stop()


def test_ten_turns(engine: Engine) -> None:
    """Holds ten turns by every route, with and without streaming."""
    seen = {"trimmed": 0, "retokenized": 0}
    for api in ("generate", "completions", "chat", "messages", "responses"):
        for stream in (False, True):
            conversation = Conversation(engine, api, stream)
            for _ in range(TURNS):
                conversation.send_next_turn()
                seen[conversation.plan.plan] += 1
            engine.close(conversation.session)
    print(f"    {seen}", flush=True)
    assert min(seen.values()) > 0, f"both kinds of turns: {seen}"


def test_answers_cut_off_by_their_limit(engine: Engine) -> None:
    for api in ("chat", "completions"):
        conversation = Conversation(engine, api, stream=False)
        for tokens in (1, 3, 2, 1):
            conversation.add_question("Again, please.")
            conversation.add_answer(conversation.send_turn(tokens))
            assert conversation.plan.plan in ("trimmed", "retokenized"), "after a cut"
        engine.close(conversation.session)


def test_a_stop_string_is_in_the_context_and_not_in_the_text(engine: Engine) -> None:
    for stream in (False, True):
        conversation = Conversation(engine, "completions", stream)
        conversation.add_question("Tell me.")
        free = send(engine.url, "completions", conversation.body(TOKENS))
        stop = free.text.split(" ")[4]
        reply = conversation.send_turn(stop=[f" {stop}"])
        assert (reply.finish, conversation.plan.plan) == ("stop", "trimmed"), "how it ended"
        conversation.add_answer(reply)
        conversation.send_next_turn("diverged")
        left = conversation.plan.prompt - conversation.plan.at
        assert left < 40, f"it diverges where the stop string was: {conversation.plan}"
        engine.close(conversation.session)


def test_edits_append_nothing(engine: Engine) -> None:
    """Edits: regenerates the last answer, changes the system prompt, summarizes the history."""
    for api in ("chat", "messages", "completions"):
        conversation = Conversation(engine, api, stream=False)
        for _ in range(3):
            conversation.send_next_turn()
        committed = conversation.plan.committed
        kept = list(conversation.messages), conversation.text_so_far, conversation.system

        conversation.messages.pop()
        before_answer = conversation.text_so_far.rindex("\n") + 1
        conversation.text_so_far = conversation.text_so_far[:before_answer]
        conversation.send_turn()
        assert conversation.plan.plan == "diverged", "the last answer again"

        conversation.messages, conversation.text_so_far = list(kept[0]), f"Now {kept[1]}"
        conversation.system = f"Now {kept[2]}"
        conversation.send_next_turn("diverged")
        assert conversation.plan.at < 16, f"where an edited beginning differs: {conversation.plan}"

        conversation.messages = [{"role": "user", "content": "All was said."}]
        conversation.text_so_far, conversation.system = f"{kept[2]} All was said.", kept[2]
        conversation.send_next_turn("diverged")

        # The session's context is unchanged.
        conversation.messages = list(kept[0])
        conversation.text_so_far, conversation.system = kept[1:]
        conversation.count = 3
        conversation.send_next_turn()
        assert conversation.plan.committed > committed, f"it goes on: {conversation.plan}"
        engine.close(conversation.session)


def test_tools_and_empty_contents(engine: Engine) -> None:
    conversation = Conversation(engine, "chat", stream=False)
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    function = {"name": "weather", "description": "How it is there", "parameters": parameters}
    conversation.tools = [{"type": "function", "function": function}]
    conversation.send_next_turn()
    conversation.send_next_turn()
    # The client's form of an answer: two calls at once, in the template's own form.
    call = {"name": "weather", "arguments": json.dumps({"place": "the harbour"})}
    conversation.messages[-1:] = [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": f"call_{n}", "type": "function", "function": call} for n in range(2)
        ]},
        *({"role": "tool", "tool_call_id": f"call_{n}", "content": "rain"} for n in range(2)),
    ]
    conversation.send_next_turn("diverged")
    again = Conversation(engine, "chat", stream=True)
    again.messages, again.tools = conversation.messages, conversation.tools
    for _ in range(3):
        again.send_next_turn()
    again.add_answer(Reply("", "stop", 0, 0))
    again.send_next_turn()
    for one in (conversation, again):
        engine.close(one.session)


def test_an_aborted_turn_leaves_no_trace(engine: Engine) -> None:
    conversation = Conversation(engine, "chat", stream=True)
    conversation.send_next_turn()
    conversation.send_next_turn()
    conversation.add_question("A long one.")
    with slowly(engine):
        _vanish(engine, conversation, chunks=4)
        running = conversation.plan
        conversation.in_tree = True
        # Slowly until then: else the turn may end by itself before the engine hears of the abort.
        reply = _ask_until_it_is_over(conversation)
    assert conversation.plan.committed == running.committed, f"the context after it: {reply}"
    conversation.add_answer(reply)
    conversation.send_next_turn()
    engine.close(conversation.session)


def test_retracted_turns_are_committed_once(engine: Engine) -> None:
    def converse(api: str, stream: bool) -> Callable[[], None]:
        conversation = Conversation(engine, api, stream)
        conversation.crowded = True

        def run() -> None:
            for _ in range(6):
                conversation.send_next_turn()
            engine.close(conversation.session)

        return run

    ways = [(api, stream) for api in ("chat", "generate") for stream in (False, True)]
    run_together(*(converse(api, stream) for api, stream in ways))


def test_an_abort_after_a_retraction_leaves_an_unknown_context(engine: Engine) -> None:
    noise = {"text": "Noise", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    for _ in range(5):
        conversation = Conversation(engine, "chat", stream=True)
        conversation.send_next_turn()
        conversation.add_question("A long one.")
        with slowly(engine):
            beside = [lambda: wire.post(f"{engine.url}/generate", noise)] * 3
            run_together(*beside, lambda: _vanish(engine, conversation, chunks=12))
        running = conversation.plan
        conversation.in_tree = True
        _ask_until_it_is_over(conversation)
        if conversation.plan.plan == "refused":
            break
        engine.close(conversation.session)
    assert conversation.plan.why == f"the session's context isn't known; {LET}", "why it is refused"
    delta = {"text": "So", "session_params": {"id": conversation.session}}
    params = {"max_new_tokens": 1, "temperature": 0}
    answer = wire.post(f"{engine.url}/generate", delta | {"sampling_params": params}).json()
    left = answer["meta_info"]["prompt_tokens"] - len(engine.tokenizer.encode("So").ids)
    assert left > running.prompt > running.committed, f"the engine has {left} tokens, {running}"
    engine.close(conversation.session)


@contextmanager
def slowly(engine: Engine) -> Iterator[None]:
    url = f"{engine.url}/slow_down"
    assert wire.post(url, {"forward_sleep_time": 0.05}).status == 200, "slow_down"
    try:
        yield
    finally:
        assert wire.post(url, {"forward_sleep_time": 0}).status == 200, "slow_down off"


def _vanish(engine: Engine, conversation: Conversation, chunks: int) -> None:
    """Requests a long answer and disconnects before its end."""
    more = {"ignore_eos": True, "model": MODEL, "temperature": 0, "stream": True}
    headers = mark(conversation.session)
    url = f"{engine.url}/v1/chat/completions"
    before = engine.listener.count(conversation.session)
    vanishing = wire.stream(url, conversation.body(400, **more), headers)
    events = vanishing.events()
    for _ in range(chunks):
        next(events)
    engine.listener.plans(conversation.session, more_than=before)
    vanishing.vanish()


def _ask_until_it_is_over(conversation: Conversation) -> Reply:
    deadline = time.monotonic() + 60
    while True:
        reply = conversation.send_turn(1)
        if conversation.plan.why != "a turn of the session runs" or time.monotonic() > deadline:
            return reply
        time.sleep(0.05)


def test_deltas_beside_full_prompts(engine: Engine) -> None:
    """Two clients share a session: one sends new tokens only (SGLang's way), one full histories."""
    conversation = Conversation(engine, "generate", stream=False)
    conversation.send_next_turn()
    params = {"max_new_tokens": 5, "temperature": 0, "logit_bias": {str(engine.turn_end): -100}}
    delta = {"text": "\nMore.", "session_params": {"id": conversation.session}}
    answer = wire.post(f"{engine.url}/generate", delta | {"sampling_params": params}).json()
    conversation.text_so_far += "\nMore." + answer["text"]
    conversation.retokenized = True
    conversation.send_next_turn()
    meta = answer["meta_info"]
    left = meta["prompt_tokens"] + meta["completion_tokens"]
    assert conversation.plan.committed == left, "what the turn before has left"
    engine.close(conversation.session)


def test_a_delta_of_another_salt_is_refused_and_changes_nothing(engine: Engine) -> None:
    conversation = Conversation(engine, "generate", stream=False)
    conversation.send_next_turn()
    delta = {"text": "\nMore.", "session_params": {"id": conversation.session}}
    for other in ({"cache_salt": "b"}, {"extra_key": "k"}):
        answer = wire.post(f"{engine.url}/generate", delta | other)
        assert answer.status == 400 and "extra_key" in answer.body.decode(), f"{answer}"
    conversation.send_next_turn()
    engine.close(conversation.session)


def test_begin_tokens_stay(engine: Engine) -> None:
    """The engine drops a BOS token at the beginning of what is appended."""
    conversation = Conversation(engine, "generate", stream=False)
    conversation.text_so_far = f"<|bos|>{conversation.text_so_far}"
    conversation.send_next_turn()
    conversation.text_so_far += "<|bos|>"
    conversation.add_answer(conversation.send_turn())
    assert conversation.plan.plan in ("trimmed", "retokenized"), "with a begin token first"
    conversation.send_next_turn()
    engine.close(conversation.session)


def test_untrimmable_prompts_are_reported(engine: Engine) -> None:
    session = engine.open()
    params = {"max_new_tokens": 3, "temperature": 0}
    for body, why in (
        ({"text": ["One", "Two"]}, "it is a batch, or has n > 1"),
        ({"text": "One", "sampling_params": params | {"n": 2}}, "it is a batch, or has n > 1"),
        ({"text": "One", "return_logprob": True, "logprob_start_len": 0},
         "it wants the prompt's log probabilities"),
    ):
        asked = {"sampling_params": params} | body
        before = engine.listener.count(session)
        answer = wire.post(f"{engine.url}/generate", asked, mark(session))
        assert answer.status == 200, f"the status of {answer}"
        plan = engine.listener.plans(session, more_than=before)[-1]
        assert (plan.plan, plan.why) == ("refused", why), f"of {body}"
    assert engine.listener.questions(session) == [], "no session could help"
    engine.close(session)
    one = {"text": "One", "sampling_params": params}
    for header, why in (
        (mark(session), f"no such session is open; {LET}"),
        ({HEADER: session}, "its mark can't be read"),
    ):
        one["rid"] = new_id("mark")
        answer = wire.post(f"{engine.url}/generate", one, header)
        assert answer.status == 200, f"the status of {answer}"
        [plan] = engine.listener.plans(one["rid"])
        assert (plan.plan, plan.why) == ("refused", why), f"of {header}"


def test_the_agent_names_another_session(engine: Engine) -> None:
    conversation = Conversation(engine, "chat", stream=False)
    conversation.send_next_turn()
    conversation.system = "Another one now."
    fresh = engine.open()
    engine.listener.answer = lambda plan: fresh if plan.plan == "diverged" else ""
    try:
        conversation.add_question("So?")
        body = conversation.body(TOKENS)
        reply = send(engine.url, "chat", body, conversation.session)
    finally:
        engine.listener.answer = lambda plan: ""
    asked = engine.listener.questions(conversation.session)[-1]
    moved = engine.listener.plans(fresh)[-1]
    assert (asked.plan, moved.plan, moved.committed) == ("diverged", "trimmed", 0), "the plans"
    engine.close(conversation.session)
    conversation.session, conversation.retokenized = fresh, False
    conversation._check(moved, reply, body)
    conversation.add_answer(reply)
    conversation.send_next_turn()
    engine.close(fresh)


def test_more_room_is_requested(engine: Engine) -> None:
    """The engine tokenizes the prompt, so only the engine can tell that it is too long."""
    conversation = Conversation(engine, "chat", stream=False)
    conversation.send_next_turn()
    before, room = conversation.plan, conversation.plan.prompt
    for answer in ("", conversation.session):
        conversation.add_question("More, please.")
        engine.listener.answer = lambda _, answer=answer: answer
        body, count = conversation.body(TOKENS), engine.listener.count(conversation.session)
        reply = send(engine.url, "chat", body, conversation.session, tokens_max=room)
        held = engine.listener.plans(conversation.session, more_than=count)[-1]
        engine.listener.answer = lambda _: ""
        asked = engine.listener.questions(conversation.session)[-1]
        assert (asked.plan, asked.sent) == ("refused", 0), f"it asks: {asked}"
        # `retokenized` if the previous answer was retokenized.
        runs = ("trimmed", "retokenized") if answer else ("refused",)
        assert held.plan in runs, f"of {answer}: {held}"
        assert asked.prompt > room >= before.prompt, f"too long: {asked}"
        if answer:
            conversation._check(held, reply, body)
        else:
            assert engine.last_written(held.rid, "context") is None, f"a context after {held}"
            conversation.messages.pop()
    engine.close(conversation.session)
