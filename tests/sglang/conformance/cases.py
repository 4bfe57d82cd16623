"""Collects the cases, and runs them one after the other on a launch of the engine."""

import fnmatch
import time
from collections.abc import Callable
from dataclasses import dataclass

from conformance.engine import Engine
from integration.runner import problem_of

Run = Callable[[Engine], None]


@dataclass(frozen=True)
class Case:
    name: str
    run: Run
    group: str
    # Whether the case leaves the engine dead; such cases run after all others.
    kills: bool


_cases: list[Case] = []


def case(*groups: str, kills: bool = False) -> Callable[[Run], Run]:
    """Returns a decorator that registers a case for each of these groups."""

    def mark(run: Run) -> Run:
        module = run.__module__.rsplit(".", 1)[-1]
        for group in groups:
            name = f"{module}::{run.__name__}"
            if len(groups) > 1:
                name += f"[{group}]"
            _cases.append(Case(name, run, group, kills))
        return run

    return mark


def selected(pattern: str | None) -> list[Case]:
    """Returns the cases whose name contains the pattern, or matches it if it has wildcards."""
    ordered = sorted(_cases, key=lambda case: case.kills)
    if not pattern:
        return ordered
    wild = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return [case for case in ordered if fnmatch.fnmatchcase(case.name, wild)]


@dataclass(frozen=True)
class Result:
    case: Case
    seconds: float
    problem: str | None

    def line(self, width: int) -> str:
        verdict = "FAILED" if self.problem else "ok"
        return f"{self.case.name:{width}}  {verdict}  ({self.seconds:.2f} s)"


def run_one(case: Case, engine: Engine) -> Result:
    """Runs one case. Only a case that kills the engine may leave it dead."""
    begin = time.monotonic()

    def run() -> None:
        if not engine.alive():
            engine.launch()
        engine.case = case.name
        engine.clean()
        case.run(engine)
        if not case.kills:
            assert engine.alive(), f"the engine has ended\n{engine.process.log_tail(12)}"

    problem = problem_of(run)
    if problem and not case.kills:
        # What the failed case left behind must not make the next case fail.
        if problem_of(engine.clean):
            engine.stop()
    return Result(case, time.monotonic() - begin, problem)
