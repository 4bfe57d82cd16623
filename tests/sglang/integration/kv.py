"""Tests that the resident blocks an agent reports are the blocks of its engine's radix tree.

They are compared after conversations, evictions, a flush and lost messages, and with an engine that
ran before its agent. These tests run in an engine of their own, with a plugin that lists the tree,
drops messages of the publisher, and empties the buffer from which the publisher repeats them.
"""

import json
import subprocess
from functools import partial
from typing import Any

import xxhash

from integration import wire
from integration.fleet import Fleet
from integration.pages import AUDIT_SECONDS_MAX
from integration.planted import Planted, planted
from integration.processes import wait_until
from integration.seams import is_before
from integration.shim import text_of
from integration.turns import Pinned, generate, run_together

EQUAL_SECONDS_MAX = 60
ASK_SECONDS_MAX = 30
# The shortest interval allowed, so that no gap has to wait long after the previous gap.
SETTINGS = "engine.republish_interval_ms = 100\n"
# The conversation of each round. Another round follows if the tree was published before anything
# could change.
ROUNDS = "JKLMN"
ASKED = 'kv_resyncs_total{outcome="asked"}'
ORPHANS = 'kv_events_total{dp_rank="0",kind="orphan"}'
BLOCK = 64
MASK = (1 << 64) - 1


def _factors() -> list[int]:
    state, factors = int.from_bytes(b"berth_kv"), []
    for _ in range(BLOCK):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
        factors.append((mixed ^ mixed >> 31) | 1)
    return factors


FACTORS = _factors()


def blocks_of(tokens: list[int]) -> list[str]:
    """Returns a prompt's routing blocks, computed independently of proto/blocks/src/block.rs."""
    last = xxhash.xxh3_64_intdigest(bytes([1]) + BLOCK.to_bytes(4, "little") + bytes(3)) | 7
    blocks = []
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        local = sum(t * k for t, k in zip(tokens[begin : begin + BLOCK], FACTORS)) & MASK
        parts = (last.to_bytes(8, "little"), local.to_bytes(8, "little"))
        hash, place = xxhash.xxh3_64_intdigest(b"".join(parts)) & ~7, (last + 1) & 7
        group = last if place else hash
        last = group >> 40 << 40 | hash & ((1 << 40) - 1) | place
        blocks.append(f"{last:016x}")
    return blocks


def reported_blocks(fleet: Fleet) -> set[str] | str:
    """Returns the blocks of the only rank as routers get them, or why there are none."""
    agent = f"http://{fleet.agent_control}"
    command = [str(fleet.bin_dir / "berth"), "kv", "--json", "--agent", agent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_SECONDS_MAX)
    assert done.stdout, f"nothing was reported: {done.stderr}"
    [rank] = json.loads(done.stdout)["ranks"]
    return rank.get("unknown") or set(rank["device"])


def tree_blocks(fleet: Planted) -> set[str]:
    """Returns the blocks that are in the tree now."""
    fleet.plant("tree")
    paths: list[list[int]] = json.loads(fleet.file.with_suffix(".tree").read_text())
    return {block for path in paths for block in blocks_of(path)}


def wait_equal(fleet: Planted, what: str) -> set[str]:
    seen: dict[str, Any] = {}

    def equal() -> bool:
        seen["reported"], seen["in_tree"] = reported_blocks(fleet), tree_blocks(fleet)
        return seen["reported"] == seen["in_tree"]

    try:
        wait_until(fleet.agent, f"right {what}", equal, EQUAL_SECONDS_MAX)
    except Exception as error:
        known, real = seen["reported"], seen["in_tree"]
        if isinstance(known, str):
            raise AssertionError(f"{what}: nothing is reported: {known}") from error
        raise AssertionError(
            f"{what}: {len(real)} blocks are in the tree and {len(known)} are reported; "
            f"{len(real - known)} are missing, {len(known - real)} are not there"
        ) from error
    return seen["reported"]


def metric(fleet: Fleet, line: str) -> float:
    text = wire.get(f"http://{fleet.agent_admin}/metrics").body.decode()
    found = [each for each in text.splitlines() if each.startswith(f"berth_agent_{line} ")]
    return float(found[0].split()[-1]) if found else 0.0


def test_reported_blocks_are_the_blocks_of_the_tree(fleet: Fleet) -> None:
    with planted(fleet, "kv", SETTINGS) as own:
        _check(own)


def _converse(fleet: Fleet, letter: str, turns: int = 2) -> None:
    """Runs a conversation that begins like all others."""
    history = text_of(200) + letter * 30
    for number in range(turns):
        generate(fleet, history, 20)
        history += f" {letter} and then {number}?" + text_of(90)


def _converse_with_lost_events(fleet: Planted, letter: str) -> None:
    """Sends a conversation whose KV events are all lost, and can't be replayed."""
    fleet.plant("lost")
    _converse(fleet, letter)
    fleet.plant("heard")


def wait_tree_requested(fleet: Fleet, before: float) -> None:
    """Waits until the agent has requested the tree more than `before` times."""
    wait_until(
        fleet.agent, "requesting the tree", lambda: metric(fleet, ASKED) > before, ASK_SECONDS_MAX
    )


def _change_while_published(fleet: Planted) -> None:
    """Has long nodes split, evicted and stored again between two chunks of publishing them."""
    fleet.plant("slowly", str(max(1, 32 // fleet.page_size)))
    for letter in ROUNDS:
        known = [text_of(900) for _ in range(3)]
        for text in known:
            generate(fleet, text, 4)
        asked = metric(fleet, ASKED)
        _converse_with_lost_events(fleet, letter)

        def go_on(text: str) -> None:
            for tokens in range(800, 0, -100):
                generate(fleet, text[:tokens] + text_of(300), 8)

        run_together(*(partial(go_on, text) for text in known))
        wait_tree_requested(fleet, asked)
        wait_equal(fleet, "after changes while the tree was published")
        orphans = metric(fleet, ORPHANS)
        print(f"    {orphans:.0f} stores came behind what was still to be published", flush=True)
        if orphans > 0:
            return
    raise AssertionError("nothing came behind what was still to be published")


def _check(fleet: Planted) -> None:
    for letter in "abc":
        _converse(fleet, letter)
    assert len(wait_equal(fleet, "after conversations")) > 6, "hardly anything is resident"
    session = Pinned(fleet)
    session.turn(text_of(300) + "pinned", 20)
    session.turn(" More?", 20)
    wait_equal(fleet, "while a session is pinned")
    for letter in "defghijklmnopqrstuvwxyz":
        generate(fleet, letter * 600, 4)
    wait_equal(fleet, "after evictions")
    session.close()
    assert metric(fleet, 'kv_events_total{dp_rank="0",kind="removed"}') > 0, "nothing was evicted"

    fleet.plant("dropped", "3")
    for letter in "ABCD":
        _converse(fleet, letter)
    wait_equal(fleet, "after a gap that the engine's buffer fills")
    asked = metric(fleet, ASKED)
    # The agent can't read the replays of older engines, and requests their tree.
    assert asked == 0 or is_before("0.5.22"), "the tree was requested"

    _converse_with_lost_events(fleet, "E")
    for letter in "FG":
        _converse(fleet, letter)
    wait_tree_requested(fleet, asked)
    wait_equal(fleet, "after a gap that nothing fills")
    _change_while_published(fleet)

    fleet.plant("forgotten")
    fleet.restart_agent(settings=f'files.shim_socket = "{fleet.shim_socket}"\n{SETTINGS}')
    assert len(wait_equal(fleet, "beside an engine that ran before")) > 6
    assert metric(fleet, ASKED) >= 1, "the tree was not requested"
    _converse(fleet, "H")
    wait_equal(fleet, "after what came then")

    fleet.flush()
    wait_equal(fleet, "after a flush")
    _converse(fleet, "I")
    wait_equal(fleet, "after a turn behind it")
    for kind in ("orphan", "mismatch", "refused", "malformed"):
        count = metric(fleet, f'kv_events_total{{dp_rank="0",kind="{kind}"}}')
        print(f"    {count:.0f} {kind}", flush=True)
        assert kind == "orphan" or count == 0, f"{count} events were {kind}"
