"""The tools of `cache-pressure`: what a fleet keeps of conversations that have no name.

`cache-pressure` fills all pools with contexts, one after another, and asks again for them, newest
first, until one is gone. `agent-sim` runs several conversations side by side, each with sub-agents,
and looks whether its main context is still there at the end. Both name no session.
"""

import json
from pathlib import Path

import pytest

from clients.places import LAUNCHES, Cluster, Target
from clients.plugin import Case
from clients.programs import HERE, environment, run

CONTEXT_TOKENS = 3000
KEPT_PERCENT_MIN = 95
SESSIONS, STEPS = 6, 15
# The tool sizes texts at four bytes for a token, and the model's tokens are bytes.
STEP_TOKENS = 1000


def keeps_all_pools(cluster: Cluster, where: Target, folder: Path) -> None:
    launch = cluster.launch
    capacity, report = launch.pool_tokens * launch.workers, folder / "report.json"
    status, printed = run("cache-pressure", [
        str(environment("pressure") / "bin/cache-pressure"),
        "--base-url", f"{where.url}/v1",
        "--kv-size", str(capacity),
        "--context-tokens", str(CONTEXT_TOKENS),
        "--output", str(report),
    ], folder)
    assert status == 0, f"the status: {status}\n{printed[-3000:]}"
    said = json.loads(report.read_text())
    print(f"{said['retained_pct']} % of {launch.workers} pools were kept")
    assert said["retained_pct"] >= KEPT_PERCENT_MIN, printed[-3000:]


QUICK = {"kinds": ("simulator",), "quick": ("simulator",)}


@pytest.mark.at(launch="pressure-2", **QUICK)
def test_two_pools_are_kept(
    cluster: Cluster, case: Case, target_of: Target, tmp_path: Path
) -> None:
    keeps_all_pools(cluster, target_of, tmp_path)


@pytest.mark.at(launch="pressure-4", **QUICK)
def test_four_pools_are_kept(
    cluster: Cluster, case: Case, target_of: Target, tmp_path: Path
) -> None:
    keeps_all_pools(cluster, target_of, tmp_path)


@pytest.mark.at(launch="pressure-8", kinds=("simulator",))
def test_eight_pools_are_kept(
    cluster: Cluster, case: Case, target_of: Target, tmp_path: Path
) -> None:
    keeps_all_pools(cluster, target_of, tmp_path)


@pytest.mark.at(launch="pressure-2-silent", **QUICK)
def test_pools_are_kept_without_shim_and_events(
    cluster: Cluster, case: Case, target_of: Target, tmp_path: Path
) -> None:
    keeps_all_pools(cluster, target_of, tmp_path)


@pytest.mark.at(launch="side-by-side", **QUICK)
def test_conversations_side_by_side_keep_their_pools(
    cluster: Cluster, case: Case, target_of: Target, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    _, printed = run("agent-sim", [
        str(environment("pressure") / "bin/python"),
        str(HERE / "inner/agent_sim.py"),
        "--base-url", f"{target_of.url}/v1",
        "--sessions", str(SESSIONS),
        "--max-concurrency", str(SESSIONS),
        "--step-tokens", str(STEP_TOKENS),
        "--main-tokens", str(STEPS * STEP_TOKENS),
        "--sub-tokens", str(4 * STEP_TOKENS),
        "--finalize-tokens", str(STEP_TOKENS // 2),
        "--max-context", str(LAUNCHES["side-by-side"].context_tokens),
        "--no-viz", "--output", str(report),
    ], tmp_path)
    # Its status also depends on how long answers took, which nothing here may decide.
    assert report.exists(), printed[-3000:]
    records = json.loads(report.read_text())["records"]
    main = [each for each in records if each["phase"] == "main" and each["step"] > 0]
    final = [each for each in records if each["phase"] == "finalize"]
    assert (len(main), len(final)) == (SESSIONS * (STEPS - 1), SESSIONS), printed[-3000:]
    lost = [each for each in main + final if each["reuse"] < 0.9]
    assert not lost, f"computed again: {lost[:3]}"
