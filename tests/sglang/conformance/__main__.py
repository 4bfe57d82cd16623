"""Command line of the conformance suite: starts the engines, runs the cases, stops the engines."""

import argparse
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conformance import cases, cost
from conformance.cases import Case
from conformance.differences import Difference, listed
from conformance.engine import PORTS, Engine
from conformance.groups import GROUPS
from integration.processes import Failed, free_ports

# Importing a module registers its cases; they run in this order.
from conformance import (  # noqa: F401
    upstream_kit,
    refusals,
    lives,
    held_kv,
    interruptions,
    overlap,
    wedges,
    figures,
    pressure,
    tags,
    kv_events,
    crashes,
)

# Launches that run at the same time. A real engine occupies one core while it starts, and 2 GB of
# memory. A simulator starts at once and mostly waits, so the cases of a group are split over
# several simulators.
SIDE_BY_SIDE = 2
SIMULATORS_SIDE_BY_SIDE = 8
SIMULATORS_PER_GROUP = 4

_print = threading.Lock()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("-k", metavar="PATTERN", help="run only the cases whose name contains it")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument(
        "--engine-sim", type=Path, metavar="PATH",
        help="the simulator's program; not given: the real engine",
    )
    parser.add_argument(
        "--cost", action="store_true",
        help="run no cases; measure the cost of --enable-session-radix-cache",
    )
    parser.add_argument("--first-port", type=int, help="the first port to try")
    return parser.parse_args()


def print_line(text: str) -> None:
    with _print:
        print(text, flush=True)


def dealt(chosen: list[Case], parts: int) -> list[list[Case]]:
    """Splits the chosen cases into launches: the cases of each group, in at most `parts`
    launches."""
    groups = [[case for case in chosen if case.group == name] for name in GROUPS]
    return [some for group in groups for part in range(parts) if (some := group[part::parts])]


def ports_for(engines: int, first: int | None) -> list[int]:
    """Returns the first port of each engine; an engine uses `PORTS` consecutive ports."""
    return free_ports(PORTS * engines, first)[::PORTS]


def run_launch(group_cases: list[Case], engine: Engine, width: int) -> list[cases.Result]:
    """Runs all cases of one launch. If the engine doesn't start, all of them fail."""
    name = engine.group.name
    begin = time.monotonic()
    results = []
    try:
        seconds = engine.launch()
        print_line(f"{name}: ready after {seconds:.1f} s")
        for case in group_cases:
            result = cases.run_one(case, engine)
            problem = "\n".join(f"    {line}" for line in (result.problem or "").splitlines())
            print_line(result.line(width) + (f"\n{problem}" if problem else ""))
            results.append(result)
    except Failed as error:
        missing = group_cases[len(results):]
        print_line(f"{name}: {error}")
        results += [cases.Result(case, 0.0, str(error)) for case in missing]
    finally:
        engine.stop()
    passed = sum(1 for result in results if not result.problem)
    seconds = time.monotonic() - begin
    print_line(f"{name}: {passed} of {len(results)} passed, {seconds:.1f} s with the start")
    return results


def unasked(differences: list[Difference], engines: list[Engine], ran: set[str]) -> list[str]:
    """Returns a message for each listed difference that no case asked for: such an entry is out
    of date."""
    seen = set().union(*(engine.seen for engine in engines))
    known = {case.name for case in cases.selected(None)}
    return [
        f"{entry.case}: {entry.what!r} is listed as a difference, but the case doesn't check it"
        for entry in differences
        if entry.case not in known
        or (entry.case in ran and (entry.case, entry.what) not in seen)
    ]


def measure_cost(options: argparse.Namespace) -> int:
    """Measures the cost of the flag for tagged sessions, with one engine at work at a time."""
    with tempfile.TemporaryDirectory(prefix="berth-conformance-") as folder:
        groups = (cost.OFF, cost.ON)
        engines = [
            Engine(group, Path(folder), port, options.engine_sim, [])
            for group, port in zip(groups, ports_for(len(groups), options.first_port))
        ]
        try:
            for engine in engines:
                print_line(f"{engine.group.name} the flag: ready after {engine.launch():.1f} s")
            cost.measure(*engines)
        finally:
            for engine in engines:
                engine.stop()
    return 0


def main() -> int:
    options = arguments()
    if options.cost:
        return measure_cost(options)
    chosen = cases.selected(options.k)
    if options.list:
        print("\n".join(f"{case.group:8}  {case.name}" for case in chosen))
        return 0
    if not chosen:
        print_line(f"no case name contains {options.k!r}; --list shows all names")
        return 2

    folder = Path(tempfile.mkdtemp(prefix="berth-conformance-"))
    differences = listed()
    launches = dealt(chosen, SIMULATORS_PER_GROUP if options.engine_sim else 1)
    ports = ports_for(len(launches), options.first_port)
    engines = [
        Engine(GROUPS[some[0].group], folder, port, options.engine_sim, differences)
        for some, port in zip(launches, ports)
    ]
    width = max(len(case.name) for case in chosen)
    begin = time.monotonic()
    try:
        side_by_side = SIMULATORS_SIDE_BY_SIDE if options.engine_sim else SIDE_BY_SIDE
        with ThreadPoolExecutor(side_by_side) as pool:
            runs = [
                pool.submit(run_launch, some, engine, width)
                for some, engine in zip(launches, engines)
            ]
            results = [result for run in runs for result in run.result()]
    finally:
        for engine in engines:
            engine.stop()
    sound = {result.case.name for result in results if not result.problem}
    stale = unasked(differences, engines, sound)
    for line in stale:
        print_line(line)
    failed = sum(1 for result in results if result.problem) + len(stale)
    if failed:
        print_line(f"the logs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    print_line(f"{time.monotonic() - begin:.0f} s in all")
    print(f"{len(results) + len(stale) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
