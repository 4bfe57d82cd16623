"""Pinned sessions on an engine whose hierarchical cache has a storage back end.

There, a pinned session's second turn ends SGLang itself. Berth's shim keeps such turns from the
storage; without it the agent offers no pins. A plugin (`hicache_on_cpu/`) lets an engine on a CPU
run the hierarchical cache.

If the last test fails because the engine lives, SGLang has mended the fault: then the rule in
`worker-agent/src/engine/retentions.rs` gets that version.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration import wire
from integration.fleet import (
    SETTLE_SECONDS_MAX,
    Fleet,
    binaries,
    launch_engine,
    wait_engine,
)
from integration.processes import TIER_FLAGS, free_ports, shim_env, tier_env, wait_until
from integration.turns import (
    Pinned,
    body,
    chat_body,
    finished_turn,
    get_session,
    new_id,
    refusal_code,
)

STORAGE_FLAGS = [*TIER_FLAGS, "--hicache-ratio", "4", "--hicache-storage-backend", "file"]
# Says what a worker doesn't offer after the time that its shims have to come.
LOG_LINE = "the engine doesn't offer a retention"
DEAD_SECONDS_MAX = 60


def storage_env(folder: Path, env: dict | None = None) -> dict[str, str]:
    """Returns the environment of an engine with its storage in this folder."""
    storage = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "storage")}
    return tier_env(env or {}) | storage


@pytest.fixture(scope="module")
def stored(pytestconfig: pytest.Config, folder: Path) -> Iterator[Fleet]:
    """A fleet whose engine has a storage back end and the shim. The agent doesn't listen for it."""
    place = folder / "stored"
    place.mkdir()
    fleet = Fleet(place, binaries(), pytestconfig.option.page_size, worker="stored")
    try:
        env = storage_env(place, shim_env(fleet.shim_socket, fleet.bin_dir))
        fleet.start_engine(env, more=STORAGE_FLAGS)
        fleet.start_agent()
        fleet.start_router()
        fleet.wait_placing()
        yield fleet
    finally:
        fleet.stop()


def worker(fleet: Fleet) -> dict:
    [shown] = wire.get(f"{fleet.router_url}/v1/workers").json()["workers"]
    return shown


def test_without_the_shim_no_pin_is_offered_and_the_reason_is_said(stored: Fleet) -> None:
    shown = worker(stored)
    assert shown["retentions"] == ["tagged", "none"], "what is offered"
    [off] = shown["retentions_off"]
    assert off["retention"] == "pinned", off
    assert "--hicache-storage-backend" in off["reason"] and "no shim" in off["reason"], off
    request = {"session_id": new_id("unsafe"), "retention": "pinned"}
    refused = wire.post(f"{stored.router_url}/v1/sessions", request)
    assert refusal_code(refused, 409, "an open") == "retention_unavailable"
    assert "--hicache-storage-backend" in refused.json()["error"]["message"], refused
    # The client of the other sessions notices nothing.
    id = new_id("safe")
    for _ in range(2):
        headers = {"x-berth-session-id": id}
        answer = wire.post(f"{stored.router_url}/v1/chat/completions", chat_body("Hi", 4), headers)
        assert answer.status == 200, f"a turn that isn't pinned: {answer}"
    assert get_session(stored, id).json()["retention"] == "tagged"
    wait_until(
        stored.agent, "sure that no shim comes", lambda: LOG_LINE in stored.agent.log.read_text(),
        SETTLE_SECONDS_MAX,
    )


def test_with_the_shim_a_pinned_session_lives_and_computes_nothing_again(stored: Fleet) -> None:
    stored.restart_agent(settings=f'files.shim_socket = "{stored.shim_socket}"\n')
    offers = lambda: "pinned" in worker(stored)["retentions"]  # noqa: E731
    wait_until(stored.agent, "offering pins", offers, SETTLE_SECONDS_MAX)
    assert worker(stored)["retentions_off"] == []
    session, other = Pinned(stored), Pinned(stored)
    for text in ("Which ships are in the harbour? " * 8, " And which are not?", " Why?"):
        session.turn(text, 24)
        other.turn(text, 12, stream=True)
    # A plain prompt reads from the storage what its first run has written.
    prompt = "The storage keeps this for another engine. " * 8
    first, again = (
        finished_turn(wire.post(f"{stored.router_url}/generate", body(prompt, 8))) for _ in "12"
    )
    assert first.text == again.text and again.cached_tokens > 0, again
    for each in (session, other):
        each.close()
    assert stored.engine.alive(), stored.engine.log_tail()


def test_the_bare_engine_still_ends_at_the_second_turn(
    folder: Path, pytestconfig: pytest.Config
) -> None:
    place = folder / "bare"
    place.mkdir()
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    flags = [
        "--page-size", str(pytestconfig.option.page_size), "--max-total-tokens", "2048",
        "--context-length", "1024", "--enable-streaming-session", *STORAGE_FLAGS,
    ]
    # Without tags the tree has its Rust core; the engine of the other tests has the Python core.
    engine = launch_engine(place, port, flags, storage_env(place))
    try:
        wait_engine(engine, url)
        opened = {"capacity_of_str_len": 1000, "session_id": "s", "streaming": True}
        assert wire.post(f"{url}/open_session", opened).status == 200
        turn = body("The first turn looks like any other.", 4, session_params={"id": "s"})
        finished_turn(wire.post(f"{url}/generate", turn))
        with pytest.raises(OSError):
            wire.post(f"{url}/generate", turn, seconds=DEAD_SECONDS_MAX)
        assert engine.wait(DEAD_SECONDS_MAX) is not None, "the engine lives"
        assert "in _prefetch_kvcache" in engine.log.read_text(errors="replace")
    finally:
        engine.stop(0)
