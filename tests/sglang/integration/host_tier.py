"""The host tier: KV that the engine copies to the host's memory, evicts, and loads back.

A plugin (`hicache_on_cpu/`) lets an engine on a CPU run its hierarchical cache. The engine says how
much of a prompt it had on the device and on the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration import wire
from integration.fleet import SETTLE_SECONDS_MAX, Fleet, binaries
from integration.pages import differences
from integration.processes import TIER_FLAGS, shim_env, tier_env, wait_until
from integration.seams import written
from integration.shim import text_of
from integration.turns import (
    Pinned,
    Turn,
    body,
    generate_at_engine,
    new_id,
    wait_session,
)

POOL_TOKENS, HOST_RATIO = 2048, 4
FLAGS = [*TIER_FLAGS, "--hicache-ratio", str(HOST_RATIO)]
HISTORY_TOKENS = 600


@pytest.fixture(scope="module", params=["write_through", "write_through_selective", "write_back"])
def tiered(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, folder: Path
) -> Iterator[Fleet]:
    """A fleet whose engine has a host tier with each of SGLang's write policies."""
    place = folder / f"host-{request.param}"
    place.mkdir()
    fleet = Fleet(place, binaries(), pytestconfig.option.page_size, worker="tiered")
    try:
        env = tier_env(shim_env(fleet.shim_socket, fleet.bin_dir))
        policy = ["--hicache-write-policy", request.param]
        fleet.start_engine(env, more=[*FLAGS, *policy], pool_tokens=POOL_TOKENS)
        fleet.start_agent(settings=f'files.shim_socket = "{fleet.shim_socket}"\n')
        fleet.start_router()
        fleet.wait_placing()
        wait_until(fleet.agent, "hearing of the host", lambda: host(fleet), SETTLE_SECONDS_MAX)
        yield fleet
    finally:
        fleet.stop()


def host(fleet: Fleet) -> dict[str, Any] | None:
    """The figures of the host tier, as the router shows them."""
    [worker] = wire.get(f"{fleet.router_url}/v1/workers").json()["workers"]
    return (worker["load"] or {}).get("host")


@dataclass(frozen=True)
class Found:
    """A turn, and how much of its prompt the engine had where."""

    turn: Turn
    device_tokens: int
    host_tokens: int


def send(fleet: Fleet, text: str, tokens: int = 4, headers: dict | None = None, **more: Any) -> Found:
    answer = wire.post(f"{fleet.router_url}/generate", body(text, tokens, **more), headers)
    assert answer.status == 200, answer
    details = answer.json()["meta_info"].get("cached_tokens_details") or {}
    turn = Turn.from_answer(answer.json())
    return Found(turn, details.get("device", 0), details.get("host", 0))


def fill(fleet: Fleet, name: str) -> None:
    """Has the engine compute so many other prompts that it evicts all that is idle."""
    for number in range(2 * POOL_TOKENS // HISTORY_TOKENS):
        send(fleet, f"{name} {number}: {text_of(HISTORY_TOKENS)}", 1)


def pages_of(fleet: Fleet, tokens: int) -> int:
    """The tokens of the whole pages."""
    return tokens // fleet.page_size * fleet.page_size


def test_the_tier_is_counted(tiered: Fleet) -> None:
    total = host(tiered)["total_tokens"]
    assert total["source"] == "shim"
    assert HOST_RATIO * POOL_TOKENS <= total["value"] <= HOST_RATIO * POOL_TOKENS + 64, total
    # Nothing was loaded: the rate is the setting's, for the size of this model's tokens.
    assert host(tiered)["load_tokens_per_s"]["source"] == "setting"
    text = text_of(HISTORY_TOKENS)
    for _ in range(2):
        send(tiered, text)
    fill(tiered, "counted")

    def holds_what_was_evicted() -> bool:
        figures = host(tiered)
        used, evictable = (figures[f"{each}_tokens"]["value"] for each in ("used", "evictable"))
        is_used = HISTORY_TOKENS // 2 < used <= total["value"]
        # At most what the device has is not evictable.
        return is_used and max(0, used - POOL_TOKENS) <= evictable <= used

    wait_until(tiered.agent, "counting copies", holds_what_was_evicted, SETTLE_SECONDS_MAX)
    again = send(tiered, text)
    assert again.device_tokens == 0 and again.host_tokens > HISTORY_TOKENS // 2, again
    # The agent's account of the device is that of its pages.
    assert differences(tiered) == []


def test_tagged_sessions_come_back_from_the_host(tiered: Fleet) -> None:
    # More than fit on the device: other KV would be evicted before theirs.
    ids = [new_id("tagged") for _ in range(2 * POOL_TOKENS // HISTORY_TOKENS)]
    histories = {id: f"{id}. " + text_of(HISTORY_TOKENS) for id in ids}
    loaded = 0
    for turn in range(3):
        for id in ids:
            kept = pages_of(tiered, written(len(histories[id]))) if turn else 0
            found = send(tiered, histories[id], 8, {"x-berth-session-id": id})
            # Without the new text at the end, and the page that it begins in.
            assert found.turn.cached_tokens >= kept - 32, found
            loaded += found.host_tokens
            # Used twice, so that each policy copies it.
            again = send(tiered, histories[id], 8, {"x-berth-session-id": id})
            assert again.turn.output_ids == found.turn.output_ids, "from the device and the host"
            histories[id] += found.turn.text + f" And then? {turn}"
    assert loaded > len(ids) * HISTORY_TOKENS // 2, "most of what comes back was evicted"
    assert send(tiered, histories[ids[0]]).turn.text == computed_anew(tiered, histories[ids[0]])
    for id in ids:
        assert wire.request("DELETE", f"{tiered.router_url}/v1/sessions/{id}").status == 204
    # Their KV goes as that of others now, and the accounts agree.
    fill(tiered, "released")
    assert differences(tiered) == []


def computed_anew(fleet: Fleet, text: str) -> str:
    """The engine's answer without any KV that it had."""
    wait_until(fleet.engine, "flushed", lambda: flushed(fleet), SETTLE_SECONDS_MAX)
    found = send(fleet, text)
    assert found.device_tokens + found.host_tokens == 0, found
    return found.turn.text


def flushed(fleet: Fleet) -> bool:
    return wire.post(f"{fleet.engine_url}/flush_cache", {}).status == 200


@pytest.mark.needs("demotion")
def test_a_demotion_copies_what_was_in_the_tree_before(tiered: Fleet) -> None:
    session = Pinned(tiered)
    # Its answer fills no page, so the tree has all whole pages since the prompt. No other request
    # uses them.
    prompt = "Short. " + text_of(HISTORY_TOKENS + 3)
    history = prompt + send(tiered, prompt, 2, session_params={"id": session.id}).turn.text
    url = f"{tiered.router_url}/v1/sessions/{session.id}/demote"
    assert wire.post(url, {}).status == 204
    wait_session(tiered, session.id, "state", "demoted")
    fill(tiered, "short")
    found = send(tiered, " Where were we?", 8, session_params={"id": session.id})
    kept = pages_of(tiered, written(len(history)))
    assert (found.device_tokens, found.host_tokens) == (0, kept), found
    session.close()


@pytest.mark.needs("demotion")
def test_a_demoted_session_costs_a_load_and_no_computing(tiered: Fleet) -> None:
    session = Pinned(tiered)
    session.turn("Pinned. " + text_of(HISTORY_TOKENS), 20)
    fill(tiered, "while pinned")
    session.turn(" Its KV stays on the device.", 8)
    url = f"{tiered.router_url}/v1/sessions/{session.id}/demote"
    assert wire.post(url, {}).status == 204
    wait_session(tiered, session.id, "state", "demoted")
    fill(tiered, "demoted")
    kept = pages_of(tiered, written(len(session.history)))
    found = send(tiered, " Where were we?", 8, session_params={"id": session.id})
    assert found.turn.prompt_tokens == len(session.history + " Where were we?")
    assert found.host_tokens > 0, f"nothing was evicted: {found}"
    assert found.device_tokens + found.host_tokens == kept == found.turn.cached_tokens, found
    alone = generate_at_engine(tiered, session.history + " Where were we?", 8)
    assert found.turn.output_ids == alone.output_ids, "the answer to the full history"
    session.close()
    assert differences(tiered) == []


def tagged(id: str) -> dict[str, str]:
    return {"x-berth-session-id": id, "x-berth-retention": "tagged"}


def prefetch(fleet: Fleet, id: str) -> wire.Answer:
    return wire.post(f"{fleet.router_url}/v1/sessions/{id}/prefetch", {})


@pytest.mark.needs("prefetching")
def test_a_prefetched_session_finds_its_kv_on_the_device(tiered: Fleet) -> None:
    # More than fit on the device: other KV would be evicted before theirs.
    ids = [new_id("ahead") for _ in range(2 * POOL_TOKENS // HISTORY_TOKENS)]
    texts = {id: f"{id}. " + text_of(HISTORY_TOKENS) for id in ids}
    for id in ids:
        # Used twice, so that each policy copies it.
        for _ in range(2):
            send(tiered, texts[id], 4, tagged(id))
    answer = prefetch(tiered, ids[0])
    assert answer.status == 200, answer
    assert answer.json()["tokens"] >= HISTORY_TOKENS, answer
    assert prefetch(tiered, ids[0]).json()["tokens"] == 0, "it is on its way, or there"

    def loads_another() -> bool:
        return prefetch(tiered, ids[1]).status == 200

    # One load at a time; and what was loaded for one is not what makes room for the next.
    wait_until(tiered.agent, "loading another", loads_another, SETTLE_SECONDS_MAX)
    found = send(tiered, texts[ids[0]], 4, tagged(ids[0]))
    assert found.host_tokens == 0 and found.device_tokens >= HISTORY_TOKENS - 32, found
    again = computed_anew(tiered, texts[ids[0]])
    assert found.turn.text == again, "the answer on KV that was loaded ahead"
    assert prefetch(tiered, new_id("nobody")).status == 404
    for id in ids:
        assert wire.request("DELETE", f"{tiered.router_url}/v1/sessions/{id}").status == 204
    assert differences(tiered) == []


@pytest.mark.needs("demotion")
@pytest.mark.needs("prefetching")
def test_a_demoted_session_is_prefetched(tiered: Fleet) -> None:
    session = Pinned(tiered)
    session.turn("Soon. " + text_of(HISTORY_TOKENS), 20)
    assert prefetch(tiered, session.id).json()["tokens"] == 0, "pinned: the device has it"
    url = f"{tiered.router_url}/v1/sessions/{session.id}/demote"
    assert wire.post(url, {}).status == 204
    wait_session(tiered, session.id, "state", "demoted")
    fill(tiered, "ahead of a demoted one")
    kept = pages_of(tiered, written(len(session.history)))
    assert prefetch(tiered, session.id).json()["tokens"] == kept
    found = send(tiered, " Where were we?", 8, session_params={"id": session.id})
    assert (found.device_tokens, found.host_tokens) == (kept, 0), found
    session.close()


def test_the_rate_of_loads_is_measured(tiered: Fleet) -> None:
    def is_measured() -> bool:
        rate = host(tiered)["load_tokens_per_s"]
        return rate["source"] == "shim" and rate["value"] > 0

    texts = [f"Measured {number}. " + text_of(HISTORY_TOKENS) for number in range(3)]
    loaded = 0
    for _ in range(4):
        for text in texts:
            # Used twice, so that each policy copies it.
            loaded += sum(send(tiered, text, 1).host_tokens for _ in range(2))
        fill(tiered, "measured")
    assert loaded > 0
    wait_until(tiered.agent, "measuring loads", is_measured, SETTLE_SECONDS_MAX)
    assert tiered.engine.alive(), tiered.engine.log_tail()
