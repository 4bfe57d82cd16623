"""The same workload directly at the engine: shows that it does harm there, and what came first.

Harm is one of three things: an answer that isn't the one to its client's context, an engine that
answers no request any more, or an engine that has ended. An engine usually gets stuck before the
others can happen. So each seed is tried on a fresh engine, and it is enough that one of them does
harm within `COUNT_MAX` operations.
"""

import argparse
import http.client
from pathlib import Path

from soak import cluster, quiet
from soak.targets import BareTarget
from soak.engine import Engine, EngineDead
from soak.oracle import Oracle
from soak.report import Report, Verdicts
from soak.workload import Workload

SEEDS = 3
ROUND = 20
COUNT_MAX = 100


def run(options: argparse.Namespace, folder: Path, verdicts: Verdicts) -> None:
    count = min(options.count, COUNT_MAX)
    tried = []
    for seed in range(options.seed, options.seed + SEEDS):
        harm = _one(options, folder, seed, count)
        tried.append(f"seed {seed}: {harm or f'no harm in {count} operations'}")
        print(f"bare: {tried[-1]}", flush=True)
        if harm:
            return verdicts.add("the same workload harms a bare engine", [], tried[-1])
    verdicts.add("the same workload harms a bare engine", tried)


def _one(options: argparse.Namespace, folder: Path, seed: int, count: int) -> str | None:
    """Runs the workload of one seed on a fresh engine. Returns the first harm, or None."""
    fleet = cluster.Cluster(
        folder,
        cluster.programs(options.simulated, guarded=False),
        options.page_size,
        simulated=options.simulated,
        pool_tokens=options.pool_tokens,
    )
    try:
        fleet.start_engine()
        report = Report("bare")
        engine = Engine(fleet.engine_url)
        workload = Workload(BareTarget(fleet), engine, seed, count, report)
        # A wrong answer differs by far more than the noise that the guarded phase measures.
        oracle = Oracle(engine, noise=0.01)
        harm = None
        while workload.remaining() and not harm:
            harm = _round(fleet, engine, workload, oracle)
        print(report.table(), flush=True)
        return harm
    finally:
        fleet.stop()


def _round(
    fleet: cluster.Cluster, engine: Engine, workload: Workload, oracle: Oracle
) -> str | None:
    try:
        workload.round(ROUND)
        engine.slow_down(0)
    except (EngineDead, OSError, http.client.HTTPException):
        pass  # The checks below find out what is wrong.
    at = f"after {workload.done} operations"
    if not fleet.engine.alive():
        return f"crashed {at}, exit status {fleet.engine.popen.returncode}"
    if problem := quiet.plain_turn_problem(fleet.engine_url):
        return f"{problem}, {at}"
    wrong, _ = quiet.judge(oracle, workload.take_turns())
    wrong += workload.report.problems
    return f"corrupted {at}: {wrong[0]}" if wrong else None
