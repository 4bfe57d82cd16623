"""Turns go to the worker that has their blocks.

Two real engines, with pages of 16 tokens and of one, run behind one router. The engines' own usage
fields say how much of a prompt was found in the KV.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from integration import wire
from integration.fleet import BERTH_START_SECONDS_MAX, Fleet
from integration.processes import wait_until
from integration.turns import Turn, chat_body, delete_session, finished_turn, new_id, sampling

BLOCK_TOKENS = 64
# So long that saving its prefill is worth more than an even load.
SYSTEM_TOKENS = 900


@dataclass
class Pair:
    """Two workers behind one router."""

    fleets: tuple[Fleet, Fleet]

    @property
    def router(self) -> Fleet:
        return self.fleets[0]

    def resident_blocks(self, fleet: Fleet) -> int:
        """The number of blocks that the router knows to be resident on this fleet's worker."""
        workers = wire.get(f"{self.router.router_url}/v1/workers").json()["workers"]
        [kv] = [worker["kv"] for worker in workers if worker["agent"] == fleet.worker]
        return kv["resident_blocks"] if kv["state"] == "live" else 0

    def is_at_rest(self, fleet: Fleet) -> bool:
        """Whether the router knows that nothing runs on this fleet's worker any more."""
        workers = wire.get(f"{self.router.router_url}/v1/workers").json()["workers"]
        [load] = [worker["load"] for worker in workers if worker["agent"] == fleet.worker]
        used = load["pool_used_tokens"]["value"]
        return load["turns_running"] == 0 and used < SYSTEM_TOKENS

    def turn(self, ids: list[int], headers: dict | None = None) -> tuple[str, Turn]:
        """Sends a turn through the router. Returns the worker that took it, and its answer."""
        answer = wire.post(f"{self.router.router_url}/generate", request(ids), headers)
        turn = finished_turn(answer)
        return answer.headers["x-berth-worker"].split("/")[0], turn


def request(ids: list[int]) -> dict:
    return {"input_ids": ids, "sampling_params": sampling(8)}


@contextmanager
def pair(fleet: Fleet) -> Iterator[Pair]:
    """Puts one router before the suite's own fleet and a second one with the other page size."""
    folder = fleet.folder / "other"
    folder.mkdir(exist_ok=True)
    other = Fleet(folder, fleet.bin_dir, 1 if fleet.page_size > 1 else 16, worker="other")
    try:
        other.start_engine()
        other.start_agent()
        fleet.router.stop(BERTH_START_SECONDS_MAX)
        fleet.start_router(other)
        both = Pair((fleet, other))
        wait_until(
            fleet.router, "hearing of both engines' blocks", lambda: live(both),
            BERTH_START_SECONDS_MAX,
        )
        yield both
    finally:
        other.stop()
        fleet.router.stop(BERTH_START_SECONDS_MAX)
        fleet.start_router()
        fleet.wait_placing()


def live(both: Pair) -> bool:
    workers = wire.get(f"{both.router.router_url}/v1/workers").json()["workers"]
    return [worker["kv"]["state"] for worker in workers] == ["live", "live"]


def prompt(number: int) -> list[int]:
    """Returns a system prompt that differs by its number, as ids of visible characters."""
    words = f"{number} is your number, harbour master. " * 40
    return list(words.encode()[:SYSTEM_TOKENS])


@pytest.mark.since("0.5.22", "an engine on a CPU has pages of more than one token")
def test_turns_go_where_their_system_prompt_is(fleet: Fleet) -> None:
    with pair(fleet) as both:
        for number, there in enumerate(both.fleets * 2):
            conversation_by_ids(both, there, prompt(number))
        for number, there in enumerate(both.fleets):
            chat(both, there, bytes(prompt(10 + number)).decode())


def conversation_by_ids(both: Pair, there: Fleet, system: list[int]) -> None:
    with wait_for_blocks(both, there):
        # Sent directly to one agent, as another router may do.
        answer = wire.post(f"http://{there.agent_data}/generate",
                           request(system + list(b"Who is in?")))
        cached = finished_turn(answer).cached_tokens
        assert cached < BLOCK_TOKENS, f"{cached} tokens of a prompt never seen were cached"
    session = new_id("second")
    worker, second = both.turn(system + list(b"Who is out?"), {"x-berth-session-id": session})
    assert worker == there.worker, "the worker of the second conversation"
    common = len(system) + len(b"Who is ")
    assert second.cached_tokens == common // there.page_size * there.page_size, (
        f"cached tokens at a page size of {there.page_size}"
    )
    delete_session(both.router, session)


def chat(both: Pair, there: Fleet, system: str) -> None:
    """Does the same with a chat: the client sends text, and the router computes the engine's
    tokens."""

    def ask(url: str, question: str) -> wire.Answer:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        answer = wire.post(f"{url}/v1/chat/completions", chat_body(messages, 8))
        assert answer.status == 200, f"the status of {answer}"
        return answer

    with wait_for_blocks(both, there):
        ask(f"http://{there.agent_data}", "Who is in?")
    second = ask(both.router.router_url, "Who is out?")
    assert second.headers["x-berth-worker"].split("/")[0] == there.worker, "the worker of the chat"
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= SYSTEM_TOKENS, f"of the system prompt only {cached} tokens were cached"


@contextmanager
def wait_for_blocks(both: Pair, there: Fleet) -> Iterator[None]:
    """Waits, after the block, until the router has heard of what was computed in it."""
    before = both.resident_blocks(there)
    yield
    blocks = before + SYSTEM_TOKENS // BLOCK_TOKENS
    wait_until(both.router.router, "hearing of the blocks",
               lambda: both.resident_blocks(there) >= blocks and both.is_at_rest(there),
               BERTH_START_SECONDS_MAX)
