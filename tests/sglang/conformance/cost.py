"""Measures what `--enable-session-radix-cache` costs: it turns off the engine's native tree core.

The same requests go to one engine with the flag and to one without, in rounds of alternating order
(ABBA). The run prints figures and asserts nothing.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from conformance.engine import PORTS, Engine, ids
from conformance.groups import TAGS, Group
from integration.processes import free_ports
from integration.turns import new_id, run_together

ROUNDS = 6
SESSIONS = 8
TURNS = 6
LONG_PROMPTS = 5

_SIZES = {"pool_tokens": 32768, "context_tokens": 4096, "rows": 16, "chunk_tokens": 4096}
OFF = Group("without", 16, (), **_SIZES)
ON = Group("with", 16, (TAGS,), **_SIZES)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def turns(engine: Engine) -> list[float]:
    """Runs growing sessions, one turn at a time and then all sessions at once. Returns the
    seconds of each turn."""
    engine.flush()
    names = [new_id("cost") for _ in range(SESSIONS)]
    prompts = [ids(200, 10 + place) for place in range(SESSIONS)]
    seconds = []

    def turn(place: int) -> None:
        prompt = prompts[place]
        call = lambda: engine.turn(None, prompt, 8, session_id=names[place]).good()
        seconds.append(timed(call))
        prompts[place] = prompt + ids(100, 30 + place)

    for _ in range(TURNS):
        for place in range(SESSIONS):
            turn(place)
    run_together(*[lambda p=place: turn(p) for place in range(SESSIONS)])
    for name in names:
        engine.close(name)
    return seconds


def prefills(engine: Engine) -> list[float]:
    """Sends long prompts of which nothing is cached. Returns the seconds of each."""
    engine.flush()
    return [
        timed(lambda salt=salt: engine.turn(None, ids(3900, salt), 1, session_id="long").good())
        for salt in range(LONG_PROMPTS)
    ]


def measure(off: Engine, on: Engine) -> None:
    for name, what in (("median turn", turns), ("prefill of 3900 tokens", prefills)):
        for engine in (off, on):
            what(engine)  # Warm up.
        found: dict[str, list[float]] = {"without": [], "with": []}
        ratios = []
        for round in range(ROUNDS):
            order = (off, on) if round % 2 == 0 else (on, off)
            medians = {engine.group.name: statistics.median(what(engine)) for engine in order}
            for key, value in medians.items():
                found[key].append(value)
            ratios.append(medians["with"] / medians["without"])
        without, with_flag = (statistics.median(found[key]) * 1000 for key in ("without", "with"))
        print(
            f"{name}: {without:.2f} ms without the flag, {with_flag:.2f} ms with it; ratio "
            f"{statistics.median(ratios):.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/sglang/run --conformance", description=__doc__)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--engine-sim", type=Path, metavar="PATH")
    program = parser.parse_args().engine_sim
    with tempfile.TemporaryDirectory(prefix="berth-conformance-") as folder:
        engines = [
            Engine(group, Path(folder), free_ports(PORTS)[0], program, []) for group in (OFF, ON)
        ]
        try:
            for engine in engines:
                seconds = engine.launch()
                print(f"{engine.group.name} the flag: ready after {seconds:.1f} s", flush=True)
            measure(*engines)
        finally:
            for engine in engines:
                engine.stop()


if __name__ == "__main__":
    main()
