"""Staged prefill at the real engine: long prompts are computed in stages before their turns.

Prompts come as token ids and as chats. The turn finds in the cache what its stages computed, and
its answer is the engine's own.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from integration import wire
from integration.fleet import BERTH_START_SECONDS_MAX, CONTEXT_TOKENS, Fleet
from integration.processes import wait_until
from integration.turns import Turn, chat_body, chat_tokens, finished_turn, sampling

# The smallest stage that the agent uses; a prompt in the suite's small context has several.
STAGE_TOKENS = 256
LONG_TOKENS = CONTEXT_TOKENS - 200


class Cluster:
    """The suite's own fleet, with an agent that computes the smallest stages."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet

    def stages(self) -> int:
        return count(self.fleet.agent_admin, "berth_agent_staged_prefill_stages", "computed")

    def staged_prefills(self, outcome: str) -> int:
        return count(self.fleet.router_admin, "berth_router_staged_prefills", outcome)

    def generate(self, url: str, ids: list[int]) -> Turn:
        request = {"input_ids": ids, "sampling_params": sampling(8)}
        return finished_turn(wire.post(f"{url}/generate", request))

    def chat(self, url: str, messages: list[dict]) -> tuple[str, int]:
        """Sends a chat. Returns its answer, and how many tokens of its prompt were in the cache."""
        answer = wire.post(f"{url}/v1/chat/completions", chat_body(messages, 8))
        assert answer.status == 200, f"the status of {answer}"
        said = answer.json()
        assert said["usage"]["prompt_tokens"] == chat_tokens(messages), "tokens of the prompt"
        # Before SGLang 0.5.22 there are none if nothing was cached.
        details = said["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        return said["choices"][0]["message"]["content"], details["cached_tokens"]

    def empty_cache(self) -> None:
        """Empties the engine's cache, and waits until the router has heard of it."""
        self.fleet.flush()
        wait_until(self.fleet.router, "hearing of the flush",
                   lambda: self.kv() == ("live", 0), BERTH_START_SECONDS_MAX)

    def kv(self) -> tuple[str, int]:
        """The state of the router's index of the engine's blocks, and the number of resident
        blocks."""
        [worker] = wire.get(f"{self.fleet.router_url}/v1/workers").json()["workers"]
        return worker["kv"]["state"], worker["kv"]["resident_blocks"]

    def check_cached(self, cached: int, tokens: int) -> None:
        """Checks that all of the prompt was in the cache but the part that the turn computes
        itself."""
        least = tokens - STAGE_TOKENS - self.fleet.page_size
        assert least <= cached < tokens, f"{cached} of {tokens} tokens were in the cache"


@contextmanager
def cluster(fleet: Fleet) -> Iterator[Cluster]:
    shim = f'files.shim_socket = "{fleet.shim_socket}"\n'
    try:
        fleet.restart_agent(settings=f"{shim}engine.prefill_stage_ms = 1\n")
        one = Cluster(fleet)
        wait_until(fleet.router, "hearing of the engine's blocks",
                   lambda: one.kv()[0] == "live", BERTH_START_SECONDS_MAX)
        yield one
    finally:
        fleet.restart_agent()


def count(admin: str, name: str, outcome: str) -> int:
    text = wire.get(f"http://{admin}/metrics").body.decode()
    found = re.search(rf'^{name}_total{{outcome="{outcome}"}} (\d+)$', text, re.MULTILINE)
    return int(found[1]) if found else 0


def letters(topic: str, tokens: int) -> str:
    return (f"{topic}, and the tide goes out again at four. " * 60)[:tokens]


def test_a_long_prompt_is_computed_before_its_turn_and_answered_the_same(fleet: Fleet) -> None:
    with cluster(fleet) as one:
        ids = list(letters("A harbour by its ids", LONG_TOKENS).encode())
        alone = one.generate(fleet.engine_url, ids)
        one.empty_cache()
        before = one.stages()
        turn = one.generate(fleet.router_url, ids)
        assert turn.output_ids == alone.output_ids, "the answer"
        one.check_cached(turn.cached_tokens, LONG_TOKENS)
        stages = one.stages() - before
        assert stages >= LONG_TOKENS // (STAGE_TOKENS + 16) - 1, f"only {stages} stages"


def test_a_chat_is_computed_before_its_turn_once_an_engine_has_told_its_beginning(
    fleet: Fleet,
) -> None:
    with cluster(fleet) as one:
        system = {"role": "system", "content": letters("A harbour by its words", 300)}
        long = [system, {"role": "user", "content": letters("The pilot", LONG_TOKENS - 400)}]
        tokens = chat_tokens(long)
        one.empty_cache()
        # No engine has published a block of this chat, so the router can't be sure of its token
        # ids.
        before, stages = one.staged_prefills("no_ids"), one.stages()
        alone, _ = one.chat(fleet.router_url, long)
        assert (one.staged_prefills("no_ids"), one.stages()) == (before + 1, stages), (
            "no ids, and stages"
        )
        one.empty_cache()
        one.chat(fleet.router_url, [system, {"role": "user", "content": "Who is in?"}])
        wait_until(fleet.router, "hearing of the system prompt",
                   lambda: one.kv()[1] >= 300 // 64, BERTH_START_SECONDS_MAX)
        before, stages = one.staged_prefills("computed"), one.stages()
        answer, cached = one.chat(fleet.router_url, long)
        assert answer == alone, "the answer"
        one.check_cached(cached, tokens)
        assert one.staged_prefills("computed") == before + 1, "prompts computed before"
        assert one.stages() > stages, "no stage was computed"
