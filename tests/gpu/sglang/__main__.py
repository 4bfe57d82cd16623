"""Runs SGLang with Berth on a GPU, asks what only a GPU shows, and prints figures as they come.

The most valuable parts come first, each with a limit of its own: what a cut-off run has printed
stands. `run` in the folder above starts this.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engines
import parts
from integration.fleet import binaries


LOG_LINES_KEPT = 200
PROGRAMS = ("berth-agent", "berth-router", "berth", "berth-pressure")


@dataclass(frozen=True)
class Part:
    """A part of the script: which engine it asks, for how long at most, and how."""

    name: str
    shape: str
    seconds: int
    ask: Callable[[engines.Lane, parts.Figures], None]
    on_gpu_alone: str = ""


PARTS = [
    Part("answers", "small", 90, parts.answers),
    Part("usage", "small", 60, parts.usage),
    Part("audits", "small", 90, parts.audits),
    Part("disturbances", "small", 120, parts.disturbances),
    Part("planted fault", "small", 30, parts.planted),
    Part("steps", "large", 120, parts.steps),
    Part("waits", "large", 150, parts.waits),
    Part("host, kernel", "tiered-kernel", 120, parts.tiers, "its copies are a GPU's kernels"),
    Part("host, direct", "tiered-direct", 120, parts.tiers),
    Part("pressure", "pressure", 150, parts.pressure),
    Part("pressure, host 2 x", "pressure-tiered", 150, parts.pressure),
]


class Results:
    """What the parts found. All of it is written after each figure."""

    def __init__(self, path: Path, about: dict[str, str]):
        self._path, self._begin = path, time.monotonic()
        self.parts: list[dict[str, Any]] = []
        self.about = about
        print(", ".join(f"{name}: {value}" for name, value in about.items()), flush=True)

    def begin(self, name: str) -> None:
        self.parts.append({"part": name, "outcome": "cut off", "figures": {}})
        self._write()

    def figure(self, name: str, value: Any) -> None:
        self.parts[-1]["figures"][name] = value
        print(f"[{time.monotonic() - self._begin:4.0f} s] {self.parts[-1]['part']}: {name}: {value}",
              flush=True)
        self._write()

    def end(self, outcome: str, why: str = "") -> None:
        self.parts[-1] |= {"outcome": outcome, "why": why}
        self._write()
        print(f"[{time.monotonic() - self._begin:4.0f} s] {self.parts[-1]['part']}: {outcome}"
              f"{': ' if why else ''}{why}", flush=True)

    def _write(self) -> None:
        text = json.dumps({"about": self.about, "parts": self.parts}, indent=1)
        self._path.write_text(f"{text}\n")

    def table(self) -> str:
        lines = ["| part | outcome | figures |", "|---|---|---|"]
        for part in self.parts:
            figures = "; ".join(f"{name}: {value}" for name, value in part["figures"].items())
            lines.append(f"| {part['part']} | {part['outcome']} | {figures} |")
        return "\n".join(lines)


class Script:
    """Runs the parts, each at an engine of its shape. An engine serves the parts that follow each
    other, as long as none of them fails."""

    def __init__(
        self, machine: engines.Machine, folder: Path, bin_dir: Path, results: Results, logs: Path
    ):
        self._machine, self._folder, self._logs = machine, folder, logs
        self._bin_dir, self._results = bin_dir, results
        self._lane: engines.Lane | None = None
        # Why the engines of a shape don't start, by the shape's name.
        self._unable: dict[str, str] = {}

    def run(self, part: Part) -> None:
        self._results.begin(part.name)
        if part.on_gpu_alone and not self._machine.has_gpu:
            self._results.end("skipped", part.on_gpu_alone)
            return
        try:
            lane = self._started(part.shape)
            # What else a dry run's machine does may take most of its time.
            with parts.limit(part.seconds * (1 if self._machine.has_gpu else 4)):
                part.ask(lane, self._results.figure)
        except KeyboardInterrupt:
            raise
        except Exception as error:
            self._results.end("failed", f"{type(error).__name__}: {error}"[:1000])
            self.stop()
            self._keep_logs(part)
        else:
            self._results.end("passed")

    def _keep_logs(self, part: Part) -> None:
        """Adds the ends of the logs to one file, which is there also if the run is cut off."""
        with self._logs.open("a") as kept:
            for log in sorted((self._folder / part.shape).glob("*.log")):
                end = log.read_text(errors="replace").splitlines()[-LOG_LINES_KEPT:]
                kept.write("\n".join([f"== {part.name}: {log.name}", *end, ""]))

    def _started(self, shape: str) -> engines.Lane:
        if self._lane and self._lane.shape.name == shape:
            return self._lane
        self.stop()
        if why := self._unable.get(shape):
            raise RuntimeError(f"its engine doesn't start: {why}")
        begin, given = time.monotonic(), self._machine.shapes[shape]
        tries = [given]
        if given.second_try:
            tries.append(replace(given, flags=(*given.flags, *given.second_try)))
        for number, tried in enumerate(tries, 1):
            self._lane = engines.lane(self._machine, tried, self._folder, self._bin_dir)
            try:
                with parts.limit(self._machine.start_seconds_max):
                    self._lane.start()
                break
            except Exception as error:
                self.stop()
                if number == len(tries):
                    self._unable[shape] = str(error)[:1000]
                    raise
                again = f"tried again with {' '.join(given.second_try)}, since"
                self._results.figure(again, str(error)[:1000])
        self._results.figure("engine, agent and router up after, s", round(time.monotonic() - begin))
        return self._lane

    def stop(self) -> None:
        if self._lane:
            self._lane.stop()
            self._lane = None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run --sglang", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--pack", type=Path, help="the folder into which the pack was unpacked")
    where.add_argument("--fake", action="store_true", help="a dry run on a CPU")
    parser.add_argument("--out", type=Path, default=Path("target/gpu"), help="folder of the results")
    parser.add_argument("-k", default="", help="run only the parts whose names contain this")
    parser.add_argument("--json", action="store_true", help="print the results as JSON at the end")
    return parser.parse_args()


def main() -> int:
    given = options()
    machine = engines.cpu() if given.fake else engines.gpu(given.pack.resolve())
    given.out.mkdir(parents=True, exist_ok=True)
    bin_dir = binaries(PROGRAMS) if given.fake else machine.pack / "bin"
    about = {"card": "none, a dry run" if given.fake else parts.card(), "date": time.strftime("%F")}
    results = Results(given.out / "sglang.json", about)
    # Short, because the paths of sockets are in it.
    folder = Path(tempfile.mkdtemp(prefix="berth-gpu-"))
    logs = given.out / "sglang.log"
    logs.unlink(missing_ok=True)
    script = Script(machine, folder, bin_dir, results, logs)
    try:
        for part in PARTS:
            if given.k in part.name:
                script.run(part)
    finally:
        script.stop()
    print(results.table(), flush=True)
    if given.json:
        print(json.dumps({"about": results.about, "parts": results.parts}))
    failed = [part["part"] for part in results.parts if part["outcome"] not in ("passed", "skipped")]
    if failed:
        print(f"not passed: {', '.join(failed)}; the ends of the logs: {logs}", file=sys.stderr)
    shutil.rmtree(folder)
    return 1 if failed or not results.parts else 0


if __name__ == "__main__":
    sys.exit(main())
