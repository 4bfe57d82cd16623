"""Runs page audits as an operator does, and compares them with the engine's own account."""

import json
import subprocess
import time
from typing import Any

from integration import wire
from integration.fleet import SETTLE_SECONDS_MAX, Fleet
from integration.seams import written

AUDIT_SECONDS_MAX = 60


def run_audit_command(fleet: Fleet, *more: str) -> subprocess.CompletedProcess:
    command = [str(fleet.bin_dir / "berth"), "audit", "--agent", f"http://{fleet.agent_control}"]
    return subprocess.run(
        [*command, *more], capture_output=True, text=True, timeout=AUDIT_SECONDS_MAX
    )


def audit(fleet: Fleet) -> Any:
    """Runs an audit now and returns its report on the only rank."""
    done = run_audit_command(fleet, "--json")
    assert done.stdout, f"no audit: {done.stderr}"
    [rank] = json.loads(done.stdout)["ranks"]
    assert "pages" in rank, f"no audit: {rank}"
    sound = not faults(rank["pages"])
    assert done.returncode == (0 if sound else 1), f"exit status {done.returncode} of {rank}"
    return rank


def faults(pages: Any) -> list[Any]:
    """The faults that were found, out of all that the audit looked for."""
    return [finding for finding in pages["findings"] if finding["count"]]


def whole_pages(fleet: Fleet, tokens: int) -> int:
    return -(-tokens // fleet.page_size)


def differences(fleet: Fleet) -> list[str]:
    """Returns where the audit of an idle engine differs from the engine's counts: the parts of
    the pool, and the pages of each session. Empty if all is equal and there are no faults. The
    router's report of the counts may be older than the audit: compares until both are equal."""
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while (found := _differences(fleet)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _differences(fleet: Fleet) -> list[str]:
    rank, counted = audit(fleet), _counted(fleet)
    pages, classes = rank["pages"], rank["pages"]["classes"]
    if classes is None:
        return [f"{pages['rows_moved']} rows moved in an engine at rest"]
    sessions = rank["sessions"]
    held = classes["private"] + classes["cached_in_use"]
    pairs = {
        "the pool": (pages["pages"], counted["pool_total"]),
        "free pages": (classes["free"], counted["pool_available"]),
        "pages in the tree alone": (classes["cached"], counted["pool_evictable"]),
        "pages held": (held, counted["pool_used"]),
        "distinct pages of rows": (pages["held_pages"], held),
        "pages of each session": (sorted(one["pages"] for one in sessions), _sessions(fleet)),
        "pages that closing all would free": (
            sum(one["freed_by_close_pages"] for one in sessions), classes["private"]
        ),
    }
    shares = sum(one["share_milli"] for one in sessions)
    wrong = [f"{what}: {found}, the engine says {said}" for what, (found, said) in pairs.items()
             if found != said]
    if abs(shares - 1000 * held) > len(sessions):
        wrong.append(f"shares of {shares / 1000} pages, {held} are held")
    return wrong + [f"found {finding}" for finding in faults(pages)]


def _counted(fleet: Fleet) -> dict[str, int]:
    """The parts of the pool in pages, by the engine's own counters."""
    [worker] = wire.get(f"{fleet.router_url}/v1/workers").json()["workers"]
    names = ("pool_available_tokens", "pool_evictable_tokens", "pool_used_tokens",
             "pool_total_tokens")
    return {
        name.removesuffix("_tokens"): worker["load"][name]["value"] // fleet.page_size
        for name in names
    }


def _sessions(fleet: Fleet) -> list[int]:
    """The pages of each session that holds any, from the usage that the engine reported for its
    turns."""
    listed = wire.get(f"{fleet.router_url}/v1/sessions").json()["sessions"]
    tokens = [one["resident_tokens"] for one in listed
              if one.get("retention") == "pinned" and one["state"] != "demoted"]
    # The agent doesn't count the last token of an answer.
    return sorted(whole_pages(fleet, written(each + 1)) for each in tokens if each)
