"""Tests full histories of unchanged clients, as pinned sessions.

OpenAI's and Anthropic's own Python clients are configured with a URL and two headers only. They
hold conversations of ten turns by each API, streamed and not, with tools, stop strings, edits and
reasoning. Each conversation is held twice without a session, which shows how far answers vary by
themselves; then tagged, then pinned, and some with the retention that the agent chooses. The
answers must be the same. If an answer was retokenized, so that the engine's prompt has other
tokens than the client's, the answers must be the engine's own to exactly those tokens. The engine
writes down each prompt and each context: no turn may run on another text than its client's, nor
compute again what its session has.

These tests run in an engine of their own, with the chat model and the parsers for tools and
reasoning.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from integration import wire
from integration.client_apis import APIS, CREDENTIAL, ClientAnswer, Clients, TurnOptions
from integration.client_scripts import (
    TURNS, Script, ScriptedClient, Step, TokenBiases, edits, questions, stops_and_thoughts, tools,
)
from integration.fleet import Fleet, engine_home
from integration.planted import PLUGIN
from integration.processes import shim_env
from integration.seams import is_before
from integration.turns import delete_session, new_id

RETENTIONS = ("tagged", "pinned", "auto")
# Each conversation, with the APIs that can hold it, streamed or not.
CONVERSATIONS: list[tuple[Script, str, bool]] = [
    *((questions, api, stream) for api in APIS for stream in (False, True)),
    (tools, "chat", False), (tools, "chat", True),
    (tools, "responses", True), (tools, "messages", False),
    (edits, "chat", True), (edits, "completions", False), (edits, "messages", True),
    (stops_and_thoughts, "chat", False), (stops_and_thoughts, "chat", True),
    (stops_and_thoughts, "completions", True), (stops_and_thoughts, "messages", False),
]


@dataclass(frozen=True)
class Turn:
    """A turn, as its client and the engine saw it."""

    said: ClientAnswer
    # The retention, as reported to the client.
    kind: str
    # Whether the turn was retokenized: the prompt's text is the client's, but its tokens are not.
    retokenized: bool = False


class Cluster:
    """An engine with an agent and a router of its own, and what the engine writes down."""

    def __init__(self, fleet: Fleet, name: str = "clients"):
        folder = fleet.folder / name
        folder.mkdir(exist_ok=True)
        self.fleet = Fleet(
            folder, fleet.bin_dir, fleet.page_size, worker=name, serves=fleet.serves
        )
        self.contexts = folder / "contexts.jsonl"
        self._read = 0
        made = engine_home() / "chat-model/tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(made.resolve()))
        self.words = TokenBiases(self.tokenizer)

    def start(
        self, env: dict[str, str] | None = None, flags: tuple[str, ...] = (), **more: Any
    ) -> None:
        """Starts engine, agent and router. The engine gets `env`, `flags`, and `more` arguments of
        `start_engine`."""
        shim = shim_env(self.fleet.shim_socket, self.fleet.bin_dir)
        env = (env or {}) | {
            "PYTHONPATH": f"{PLUGIN}:{shim['PYTHONPATH']}",
            "BERTH_CONTEXTS": str(self.contexts),
        }
        all_flags = [
            "--chat-template", str(Path(__file__).with_name("clients.jinja")),
            "--tool-call-parser", "qwen25",
            "--reasoning-parser", "qwen3",
            *flags,
        ]
        self.fleet.start_engine(env, model="chat-model", more=all_flags, **more)
        self.fleet.start_agent(settings=f'files.shim_socket = "{self.fleet.shim_socket}"\n')
        self.fleet.start_router()
        self.fleet.wait_placing()
        self.fleet.wait_trimming()
        self.skip_written()

    def stop(self) -> None:
        """Stops all processes at once. Sessions that are left at the engine end with it."""
        for process in self.fleet.processes():
            process.stop(0)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def clients(self, retention: str, session: str) -> Clients:
        headers = {"x-berth-session-id": session, "x-berth-retention": retention}
        return Clients(self.fleet.router_url, headers if retention else {})

    def kind(self, clients: Clients) -> str:
        return clients.headers.get("x-berth-session-turn", "")

    def agent_counts(self) -> dict[tuple[str, str], int]:
        """Returns the agent's counters that have one label, by name and label."""
        text = wire.get(f"http://{self.fleet.agent_admin}/metrics").body.decode()
        found = re.findall(r'^berth_agent_(\w+)\{\w+="(\w+)"\} (\d+)$', text, re.MULTILINE)
        return {(name, label): int(count) for name, label, count in found}

    def skip_written(self) -> None:
        """Skips what the engine wrote about a conversation that was left before its end."""
        self._read = self.contexts.stat().st_size

    def last_written(self) -> tuple[list[int], dict | None]:
        """Returns whole prompt and session's context of the only turn since the last call."""
        with self.contexts.open() as file:
            file.seek(self._read)
            lines = [json.loads(line) for line in file]
            self._read = file.tell()
        [whole] = [line for line in lines if "whole" in line]
        contexts = [line for line in lines if "context" in line]
        assert len(contexts) <= 1, f"one turn has {len(contexts)} contexts"
        return whole["whole"], contexts[0] if contexts else None


class HeldConversation:
    """A conversation while it is held."""

    def __init__(self, cluster: Cluster, api: str, stream: bool, script: Script, retention: str):
        self.cluster, self.retention = cluster, retention
        self.client = ScriptedClient(api, stream, cluster.words)
        self.script = script
        # The committed tokens of each session in the engine after its last turn.
        self.committed: dict[str, int] = {}
        self.turns: list[Turn] = []

    def run(self) -> list[Turn]:
        session = new_id("clients")
        clients = self.cluster.clients(self.retention, session)
        for step in self.script(self.client):
            client = self.client
            said = client.heard(clients.send(
                client.api, client.stream, client.system, client.history, step.options
            ))
            self.turns.append(self._check_turn(said, self.cluster.kind(clients), step))
            client.add_answer(said)
        clients.close()
        if self.retention:
            closed = delete_session(self.cluster.fleet, session, CREDENTIAL)
            assert closed.status == 204, "the status of the close"
        assert len(self.turns) == TURNS, "turns"
        return self.turns

    def _check_turn(self, said: ClientAnswer, kind: str, step: Step) -> Turn:
        where = f"turn {len(self.turns)}, {said}"
        whole, context = self.cluster.last_written()
        assert kind == self._expected_kind(step), f"the turn's kind, {where}"
        assert (context is None) == (kind not in ("pinned", "reopened")), f"it ran beside, {where}"
        if context is None:
            if said.prompt_tokens:
                assert said.prompt_tokens == len(whole), f"prompt tokens, {where}"
            return Turn(said, kind)
        return self._check_session_turn(said, kind, step, whole, context)

    def _expected_kind(self, step: Step) -> str:
        if self.retention == "pinned" or (self.retention == "auto" and self.turns):
            return "reopened" if step.edited else "pinned"
        return "tagged" if self.retention else ""

    def _check_session_turn(
        self, said: ClientAnswer, kind: str, step: Step, whole: list[int], context: dict
    ) -> Turn:
        where = f"turn {len(self.turns)}, {said}"
        ids, committed = context["context"], self.committed.get(context["session"])
        # Without figures the answer was empty: the token that ends a turn, and nothing else.
        tokens = said.prompt_tokens or len(ids) - 1
        prompt, answer = ids[:tokens], ids[tokens:]
        begins = step.edited or len(self.committed) == 0
        assert (committed is None) == begins, f"an incarnation begins, {where}"
        if committed is not None and said.prompt_tokens:
            allowed = (committed - 1, committed)
            assert said.cached_tokens in allowed, f"cached tokens, {where}"
        self.committed[context["session"]] = len(ids)
        if prompt == whole:
            return Turn(said, kind)
        assert self.cluster.text(prompt) == self.cluster.text(whole), f"the context's text, {where}"
        if not (step.options.regex or step.options.forced or step.options.stop):
            self._check_answer_alone(prompt, answer, step.options, where)
        return Turn(said, kind, retokenized=True)

    def _check_answer_alone(
        self, prompt: list[int], answer: list[int], options: TurnOptions, where: str
    ) -> None:
        """Checks the answer against the same ids sent as one prompt without a session."""
        params = {"max_new_tokens": len(answer), "temperature": 0, "logit_bias": options.bias}
        request = {"input_ids": prompt, "sampling_params": params}
        alone = wire.post(f"{self.cluster.fleet.engine_url}/generate", request).json()
        self.cluster.last_written()
        assert alone["output_ids"] == answer, f"the answer to the retokenized context, {where}"


def differing(turns: list[Turn], plain: list[Turn]) -> list[str]:
    """Returns the turns whose answers differ, up to the first turn that was retokenized."""
    found = []
    for number, (turn, other) in enumerate(zip(turns, plain, strict=True)):
        if turn.retokenized:
            break
        same = replace(other.said, cached_tokens=turn.said.cached_tokens)
        if turn.said != same:
            found.append(f"turn {number}: {turn.said}, without a session {other.said}")
    return found


@pytest.fixture(scope="module")
def cluster(fleet: Fleet) -> Iterator[Cluster]:
    cluster = Cluster(fleet)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """Counts how the turns of all conversations ran, as their clients were told."""
    return Counter()


@pytest.mark.parametrize(
    ("script", "api", "stream"), CONVERSATIONS,
    ids=[f"{each.__name__}-{api}{'-streamed' * stream}" for each, api, stream in CONVERSATIONS],
)
def test_full_histories_of_unchanged_clients_are_pinned_turns(
    cluster: Cluster, seen: Counter[str], script: Script, api: str, stream: bool
) -> None:
    """Holds a conversation with each retention, and checks that the answers are the same."""

    if script is tools and (api, stream) == ("messages", False) and is_before("0.5.23"):
        pytest.skip("before SGLang 0.5.23, tool arguments that are no JSON object are answered with 500")

    def run_with(retention: str) -> list[Turn]:
        return HeldConversation(cluster, api, stream, script, retention).run()

    cluster.skip_written()
    plain = run_with("")
    noise = len(differing(run_with(""), plain))
    seen["noise"] += noise
    asked_for = ("tagged", "pinned") if stream or script is not questions else RETENTIONS
    for retention in asked_for:
        turns = run_with(retention)
        found = differing(turns, plain)
        assert len(found) <= noise, f"{retention}, with {noise} turns of noise: {found[0]}"
        seen.update(turn.kind for turn in turns)
        seen["retokenized"] += sum(turn.retokenized for turn in turns)


def test_the_agents_counters_equal_what_clients_were_told(
    cluster: Cluster, seen: Counter[str]
) -> None:
    print(f"    {dict(seen)}", flush=True)
    counts = cluster.agent_counts()
    ran = {kind: counts.get(("session_turns_total", kind), 0) for kind in ("pinned", "reopened")}
    assert ran == {kind: seen[kind] for kind in ran}, "turns by kind"
    names = ("trimmed", "retokenized", "reopened", "diverged", "refused", "gone")
    plans = {plan: counts.get(("trim_turns_total", plan), 0) for plan in names}
    assert plans["trimmed"] + plans["retokenized"] == ran["pinned"], f"pinned turns, of {plans}"
    assert plans["reopened"] == ran["reopened"], f"turns of fresh incarnations, of {plans}"
    assert plans["gone"] == 0, f"turns gone before their plans, of {plans}"
    assert plans["retokenized"] > 0, f"both kinds of plans: {plans}"
