"""The soak through Berth: the workload, the checks whenever nothing runs, and the oracle."""

import argparse
from contextlib import ExitStack
from pathlib import Path

from soak import cluster, noise, operations, tampering, quiet
from soak.targets import BerthTarget
from soak.engine import Engine
from soak.oracle import Oracle, Turn
from soak.report import Report, Verdicts
from soak.workload import USERS, Workload

# Operations in a round; nothing runs between two rounds.
ROUND = 50
# After this many rounds, all sessions are closed and all answers are judged.
ROUNDS_TO_CLOSE = 3
# In a shorter run, chance decides whether each kind of refusal occurs.
COUNT_FOR_ALL = 300
# The share of wrong contexts that the oracle may miss: one changed token need not change an answer.
MISSED_RATIO_MAX = 0.02


def run(options: argparse.Namespace, folder: Path, verdicts: Verdicts, stack: ExitStack) -> None:
    fleet = cluster.running_at(*options.at) if options.at else _started(options, folder, stack)
    engine = Engine(fleet.engine_url)
    measured = noise.measure(engine, options.seed)
    print(f"noise: {measured}", flush=True)
    oracle = Oracle(engine, measured.bound)
    mix = ", ".join(f"{op.__name__} {weight}" for op, weight in operations.MIX.items())
    print(f"mix: {mix}; {USERS} users, seed {options.seed}", flush=True)

    report = Report("berth")
    workload = Workload(BerthTarget(fleet), engine, options.seed, options.count, report)
    found = _Found(audits=not (options.at or options.simulated))
    try:
        rounds = 0
        while workload.remaining() and not found.serving:
            workload.round(ROUND)
            rounds += 1
            found.check_quiet_point(fleet, engine, workload.done)
            if not found.serving and (rounds % ROUNDS_TO_CLOSE == 0 or not workload.remaining()):
                workload.close_all()
                found.check_all_closed(fleet, oracle, workload)
    finally:
        print(report.table(), flush=True)
    verdicts.add("nothing happens that Berth promises doesn't", report.problems)
    verdicts.add("the engine lives and answers at every quiet point", found.serving)
    verdicts.add("the ledger is the engine's own account", found.ledger, f"{found.points} points")
    if found.audits:
        verdicts.add("page by page too", found.pages, f"{found.points} points")
    verdicts.add("with all sessions closed nothing is held", found.held, f"{found.closes} times")
    detail = f"{len(found.turns)} judged, {found.ties} within the noise"
    verdicts.add("every answer is the one to its client's own context", found.wrong, detail)
    moves = bool(fleet.host_ratio) and not options.simulated
    verdicts.add("the workload met what it is for", _unmet(report, options.count, moves))
    _check_the_oracle(engine, oracle, found.turns, options.seed, verdicts)


def _started(options: argparse.Namespace, folder: Path, stack: ExitStack) -> cluster.Cluster:
    fleet = cluster.Cluster(
        folder,
        cluster.programs(options.simulated, guarded=True),
        options.page_size,
        simulated=options.simulated,
        pool_tokens=options.pool_tokens,
        host_ratio=options.host_ratio,
    )
    stack.callback(fleet.stop)
    fleet.start_engine()
    # Sessions are demoted early, so that they give way to others within the run.
    settings = f'sessions.demote_idle_ms = 300\nfiles.shim_socket = "{fleet.shim_socket}"\n'
    fleet.start_agent(settings=settings)
    fleet.start_router()
    return fleet


class _Found:
    """What the checks between rounds have found."""

    def __init__(self, audits: bool) -> None:
        # Whether the engine has a shim that audits pages.
        self.audits = audits
        self.pages: list[str] = []
        self.points = self.closes = self.ties = 0
        self.serving: list[str] = []
        self.ledger: list[str] = []
        self.held: list[str] = []
        self.wrong: list[str] = []
        self.turns: list[Turn] = []

    def check_quiet_point(self, fleet: cluster.Cluster, engine: Engine, done: int) -> None:
        self.points += 1
        at = f"after {done} operations: "
        self.serving += [at + problem for problem in quiet.serving_problems(fleet)]
        if self.serving:
            return
        engine.slow_down(0)
        problems, used = quiet.ledger_problems(fleet)
        self.ledger += [at + problem for problem in problems]
        if self.audits:
            self.pages += [at + problem for problem in quiet.page_problems(fleet)]
        print(f"  quiet {at}{used} tokens pinned, {len(problems)} figures differ", flush=True)

    def check_all_closed(self, fleet: cluster.Cluster, oracle: Oracle, workload: Workload) -> None:
        self.closes += 1
        at = f"after {workload.done} operations: "
        self.held += [at + problem for problem in quiet.held_after_close(fleet)]
        turns = workload.take_turns()
        wrong, ties = quiet.judge(oracle, turns)
        self.wrong += wrong
        self.ties += ties
        self.turns += turns
        print(f"  closed {at}{len(turns)} answers judged, {len(wrong)} wrong", flush=True)


def _unmet(report: Report, count: int, moves: bool) -> list[str]:
    """Returns what a run of this length must have met and hasn't: such a run shows nothing."""
    needed = {
        "an overlapping turn refused": report.count_of("overlapping turn", "409 session_busy"),
        "a client that stopped": report.count_of("stop", "left"),
        "a client that vanished in a stream": report.count_of("vanish in a stream", "left"),
        "a client that vanished from an unstreamed answer":
            report.count_of("vanish from an unstreamed answer", "left"),
        "a close during a turn": report.count_of("close while a turn runs", "finished"),
        "an expiry": report.count_of("turn after the expiry", "404 session_unknown"),
        "a client that stopped reading": report.count_of("stall", "finished"),
        "a tagged turn": report.count_of("tagged", "finished"),
        "a plain turn": report.count_of("plain", "finished"),
        "a turn that was too long": report.count_of("too long", "413 turn_too_large"),
        "a foreign id": report.count_of("foreign id", "400 token_out_of_vocabulary"),
        "a pin refused": report.count_with_status(429),
    }
    if moves:
        needed |= {
            "a session demoted": report.count_of("demote", "204 engine"),
            "a session's KV loaded": report.count_of("prefetch", "200 engine"),
        }
    if count < COUNT_FOR_ALL:
        return []
    return [f"not once: {what}" for what, times in needed.items() if not times]


def _check_the_oracle(
    engine: Engine, oracle: Oracle, turns: list[Turn], seed: int, verdicts: Verdicts
) -> None:
    caught = tampering.tamper_and_judge(engine, oracle, turns, seed)
    seen, all_of_them = caught.total
    problems = []
    if not all_of_them:
        problems.append("no turn was long enough to be tampered with")
    elif seen < all_of_them * (1 - MISSED_RATIO_MAX):
        problems.append(f"too many were missed: {caught}")
    verdicts.add("the oracle sees a wrong context", problems, str(caught))
