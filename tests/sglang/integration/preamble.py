"""Tests Claude Code's volatile preamble, with which no turn would find its prompt in the cache.

Anthropic's own Python client sends what Claude Code sends: its headers, tools, `cache_control`,
`metadata.user_id`, and a system prompt of 5,000 tokens. The first block of the system prompt is a
preamble whose `cch` changes with each request. The client is configured with a URL only.

By default the router strips the preamble. Then every turn from the second on runs pinned and nearly
all of its prompt is cached; the answers equal the engine's own to the same bodies without the
preamble; sessions of other clients share the system prompt's blocks. If the router keeps the
preamble, nothing after it is cached and the session loses its pin.

These tests run in an engine of their own, with the chat model.
"""

import json
import random
import time
from dataclasses import dataclass

from make_chat_model import WORDS

from integration import wire
from integration.client_apis import Clients
from integration.clients import Cluster
from integration.fleet import BERTH_START_SECONDS_MAX, MODEL, Fleet
from integration.turns import new_id
from integration.waits import LONGER

TURNS = 10
ANSWER_TOKENS = 24
SYSTEM_TOKENS = 5_000
CONTEXT_TOKENS = 16_384
FLAGS = (
    "--context-length", str(CONTEXT_TOKENS),
    "--json-model-override-args", json.dumps({"max_position_embeddings": CONTEXT_TOKENS}),
)
CACHED = {"type": "ephemeral"}
TOOLS = [
    {
        "name": name, "description": f"To {name} a file",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
    for name in ("read", "write", "search")
]


def preamble(version: str = "2.1.177.01c") -> str:
    """Returns a preamble, a new one with each call."""
    cch = random.randrange(16**5)
    return (
        f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=sdk-cli; cch={cch:05x};"
    )


def system_prompt(cluster: Cluster) -> str:
    """Returns a prompt of words that are one token each."""
    encode = cluster.tokenizer.encode
    words = [word for word in WORDS if len(encode(f" {word}").ids) == 1]
    text = "".join(f" {word}" for word in random.Random(1).choices(words, k=SYSTEM_TOKENS))
    assert len(encode(text).ids) == SYSTEM_TOKENS, "tokens of the system prompt"
    return text


@dataclass(frozen=True)
class Turn:
    """A turn, as its client and the engine saw it."""

    sent: dict
    text: str
    kind: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    # The token ids of the client's prompt by the engine's tokenizer, and the session's context
    # after the turn if the turn ran in a session.
    whole: list[int]
    context: list[int] | None

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class ClaudeCode:
    """A session of Claude Code, which resends its full history with each turn."""

    def __init__(self, cluster: Cluster, version: str = "2.1.177.01c"):
        self.cluster, self.version = cluster, version
        self.system = system_prompt(cluster)
        self.id = new_id("claude")
        headers = {
            "user-agent": f"claude-cli/{version} (external, sdk-cli)", "x-app": "cli",
            "anthropic-beta": "claude-code-20250219", "x-claude-code-session-id": self.id,
        }
        self.clients = Clients(cluster.fleet.router_url, headers)
        self.history: list[dict] = []

    def turn(self, number: int) -> Turn:
        asked = {"type": "text", "text": f"Turn {number}: what now?", "cache_control": CACHED}
        self.history.append({"role": "user", "content": [asked]})
        call = {
            "model": MODEL, "max_tokens": ANSWER_TOKENS,
            "system": [
                {"type": "text", "text": preamble(self.version)},
                {"type": "text", "text": self.system, "cache_control": CACHED},
            ],
            "tools": [*TOOLS[:-1], TOOLS[-1] | {"cache_control": CACHED}],
            "metadata": {"user_id": json.dumps({"session_id": self.id})},
            "messages": self.history,
            "extra_body": {"temperature": 0},
        }
        begin = time.monotonic()
        # Not streamed: the engine reports no prompt tokens for an empty streamed answer.
        raw = self.clients.anthropic.messages.with_raw_response.create(**call)
        answer, sent = raw.parse(), raw.http_request.read()
        seconds = time.monotonic() - begin
        text = "".join(block.text for block in answer.content)
        self.history.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        cached = answer.usage.cache_read_input_tokens or 0
        tokens = (answer.usage.input_tokens or 0) + cached
        whole, context = self.cluster.last_written()
        if not context:
            assert tokens == len(whole), "prompt tokens"
        return Turn(
            json.loads(sent), text, self.cluster.kind(self.clients), tokens, cached, seconds, whole,
            context["context"] if context else None,
        )

    def ten_turns(self, what: str) -> list[Turn]:
        turns = [self.turn(number) for number in range(TURNS)]
        later = turns[1:]
        cached = sum(turn.cached_tokens for turn in later)
        share = cached / sum(turn.prompt_tokens for turn in later)
        seconds = sum(turn.seconds for turn in later) / len(later)
        print(
            f"    {what}: {turns[0].prompt_tokens} to {turns[-1].prompt_tokens} tokens, from turn 2"
            f" {share:.1%} cached ({min(turn.share for turn in later):.1%} to"
            f" {max(turn.share for turn in later):.1%}), {seconds:.2f} s a turn,"
            f" {' '.join(turn.kind for turn in turns)}",
            flush=True,
        )
        return turns

    def close(self) -> None:
        self.clients.close()


def test_a_changing_preamble_costs_neither_the_cache_nor_the_pin(fleet: Fleet) -> None:
    cluster = Cluster(fleet, "preamble")
    try:
        cluster.start(env=LONGER, flags=FLAGS, pool_tokens=4 * CONTEXT_TOKENS)
        _stripped(cluster)
        # The next session starts with an empty cache.
        cluster.fleet.router.stop(BERTH_START_SECONDS_MAX)
        cluster.fleet.start_router(settings='placement.preamble = "keep"\n')
        cluster.fleet.wait_placing()
        cluster.fleet.wait_trimming()
        cluster.skip_written()
        _kept(cluster)
    finally:
        cluster.stop()


def _stripped(cluster: Cluster) -> None:
    first = ClaudeCode(cluster)
    turns = first.ten_turns("stripped")
    for number, turn in enumerate(turns[1:], 2):
        where = f"turn {number}: {turn.kind}, {turn.cached_tokens} of {turn.prompt_tokens} cached"
        assert turn.kind == "pinned", f"how it ran, {where}"
        assert turn.share >= 0.97, where
    _shared(cluster)
    retokenized = sum(_check_answer_alone(cluster, turn) for turn in turns)
    print(
        f"    answers are the engine's own, {retokenized} of them to a retokenized prompt", flush=True
    )
    assert _removed(cluster) == TURNS + 2, "preambles that the router has counted"
    first.close()


def _shared(cluster: Cluster) -> None:
    """Checks that other sessions find the system prompt in the cache: a session of another Claude
    Code, and a session through a gateway that turns messages into chats."""
    least = SYSTEM_TOKENS - cluster.fleet.page_size
    other = ClaudeCode(cluster, version="2.1.180.9f3")
    turn = other.turn(77)
    other.close()
    gateway = Clients(cluster.fleet.router_url, {"x-session-id": new_id("gateway")})
    answer = gateway.openai.chat.completions.create(
        model=MODEL, temperature=0, max_tokens=4,
        messages=[
            {"role": "system", "content": f"{preamble()}\n\n{system_prompt(cluster)}"},
            {"role": "user", "content": "What is left to do?"},
        ],
    )
    gateway.close()
    cluster.last_written()
    by_chat = answer.usage.prompt_tokens_details.cached_tokens
    print(
        f"    first turns of others: {turn.cached_tokens} of {turn.prompt_tokens} cached by"
        f" messages, {by_chat} of {answer.usage.prompt_tokens} by chat", flush=True,
    )
    assert turn.cached_tokens >= least, f"{turn.cached_tokens} cached of another's first turn"
    assert by_chat >= least, f"{by_chat} cached of a gateway's first turn"


def _check_answer_alone(cluster: Cluster, turn: Turn) -> bool:
    """Checks the answer against the engine's own. Returns whether the turn was retokenized: it ran
    on other tokens of the same text."""
    prompt = turn.context[: turn.prompt_tokens] if turn.context else turn.whole
    if prompt != turn.whole:
        assert cluster.text(prompt) == cluster.text(turn.whole), "the context's text"
        answer = turn.context[turn.prompt_tokens:]
        params = {"max_new_tokens": len(answer), "temperature": 0}
        request = {"input_ids": prompt, "sampling_params": params}
        alone = wire.post(f"{cluster.fleet.engine_url}/generate", request).json()
        cluster.last_written()
        assert alone["output_ids"] == answer, "the answer to the retokenized context"
        return True
    without = turn.sent | {"system": turn.sent["system"][1:], "stream": False}
    alone = wire.post(f"{cluster.fleet.engine_url}/v1/messages", without)
    assert alone.status == 200, f"the status of {alone}"
    whole, _ = cluster.last_written()
    assert whole == turn.whole, "the prompt without the preamble"
    text = "".join(block["text"] for block in alone.json()["content"])
    assert turn.text == text, "the answer to the body without the preamble"
    return False


def _removed(cluster: Cluster) -> int:
    text = wire.get(f"http://{cluster.fleet.router_admin}/metrics").body.decode()
    name = 'berth_router_preambles_removed_total{client="claude_code"} '
    return next(int(l.removeprefix(name)) for l in text.splitlines() if l.startswith(name))


def _kept(cluster: Cluster) -> None:
    """Checks that only the tokens before the preamble are cached. The session is pinned at first,
    and loses its pin when it has diverged three times."""
    second = ClaudeCode(cluster)
    turns = second.ten_turns("kept")
    second.close()
    for number, turn in enumerate(turns[1:], 2):
        assert turn.share <= 0.05, f"turn {number}: {turn.cached_tokens} tokens cached"
    kinds = [turn.kind for turn in turns]
    assert set(kinds[TURNS // 2:]) == {"tagged"}, f"how the later turns ran, of {kinds}"
