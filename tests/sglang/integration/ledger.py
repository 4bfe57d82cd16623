"""Berth's figures for the KV pool equal the engine's."""

import time

from integration import wire
from integration.fleet import WORKER, Fleet
from integration.seams import written
from integration.turns import Pinned, wait_session

# The figures follow a turn by an engine sample and a load report, each about once a second, or
# later on a loaded machine.
REPORT_SECONDS_MAX = 30


def figures(fleet: Fleet) -> dict[str, int]:
    workers = wire.get(f"{fleet.router_url}/v1/workers").json()["workers"]
    load = next(worker for worker in workers if worker["agent"] == WORKER)["load"] or {}
    names = ("pinned_tokens", "pool_used_tokens", "pool_total_tokens", "rows_held", "foreign_tokens")
    return {name: load[name]["value"] for name in names if load.get(name)}


def wait_figures(fleet: Fleet, expected: dict[str, int]) -> None:
    deadline = time.monotonic() + REPORT_SECONDS_MAX
    while (found := _only(figures(fleet), expected)) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == expected, f"the figures {REPORT_SECONDS_MAX} s later"


def _only(found: dict[str, int], expected: dict[str, int]) -> dict[str, int]:
    return {name: found.get(name) for name in expected}


def test_pinned_sessions_to_the_page(fleet: Fleet) -> None:
    assert fleet.wait_pool(0) == 0, "what the tests before have left in the pool"
    # The sessions share no prefix, and their lengths end in the middle of a page.
    sessions = [Pinned(fleet) for _ in range(3)]
    for number, session in enumerate(sessions):
        session.turn("abc"[number] * (20 + 7 * number), 10)
        session.turn(" More.", 9)
        wait_session(fleet, session.id, "resident_tokens", len(session.history) - 1)
    pages = [-(-written(len(s.history)) // fleet.page_size) for s in sessions]
    held = sum(pages) * fleet.page_size
    assert fleet.wait_pool(held) == held, "the engine's own figure"
    wait_figures(fleet, {"pinned_tokens": held, "pool_used_tokens": held, "rows_held": 3})
    for session in sessions:
        session.close()
    wait_figures(fleet, {"pinned_tokens": 0, "pool_used_tokens": 0, "rows_held": 0})


def test_a_shared_prefix_is_never_counted_too_low(fleet: Fleet) -> None:
    assert fleet.wait_pool(0) == 0, "what the tests before have left in the pool"
    sessions = [Pinned(fleet) for _ in range(3)]
    for number, session in enumerate(sessions):
        session.turn("The same beginning of all of them. " * 3 + str(number), 10)
    # Berth's figure is older than the engine's. When both are equal, the engine's has settled.
    deadline = time.monotonic() + REPORT_SECONDS_MAX
    while (used := fleet.pool_used_tokens()) != figures(fleet)["pool_used_tokens"]:
        assert time.monotonic() < deadline, f"used: the engine says {used}, {figures(fleet)}"
        time.sleep(0.2)
    found = figures(fleet)["pinned_tokens"]
    assert found >= used > 0, f"pinned tokens: found {found}, the engine holds {used}"
    for session in sessions:
        session.close()
