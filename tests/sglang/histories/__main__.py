"""Replays a trace of real conversations as chats, by retention and size of the pool.

The chats resend their history. The replay prints one table, of how turns ran and when their first
token came, and asserts nothing.

All conversations run side by side. The tokens that they hold at their ends are the working set. It
is measured first, in a pool several times as large; then an engine is started for each ratio of it.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from integration import wire
from integration.fleet import MODEL, Fleet, binaries
from integration.processes import Failed

RETENTIONS = ("none", "tagged", "pinned", "auto")
# Without the plan of reopened sessions, which is one of the kinds below.
PLANS = ("trimmed", "retokenized", "diverged", "refused", "gone")
KINDS = ("pinned", "reopened", "tagged")
# The tiny model's context, less some tokens for its template.
CONTEXT_TOKENS = 4000
# Several times what ten conversations of that length can hold.
MEASURED_TOKENS = 1 << 17
# The trace's users think for a second; here they think for a tenth of that. A session that is idle
# for twice as long may be demoted.
TIME_SCALE = 0.1
AGENT = "sessions.demote_idle_ms = 200\n"


@dataclass(frozen=True)
class Row:
    """One replay, with its results."""

    pool: str
    retention: str
    report: dict
    # The number of full histories by what became of them, by the agent's count.
    plans: Counter[str]

    def cells(self) -> list[str]:
        report, turns = self.report, max(1, self.report["turns"])
        kinds = report["turns_by_kind"]

        def share(count: int) -> str:
            return f"{100 * count / turns:.1f} %" if count else "-"

        return [
            self.pool, self.retention, str(report["turns"]),
            *(share(self.plans[plan]) for plan in PLANS),
            *(share(kinds.get(kind, 0)) for kind in KINDS),
            f"{100 * (report['cached_ratio'] or 0):.1f} %",
            f"{report['ttft_ms_p50']:.0f}", f"{report['ttft_ms_p90']:.0f}",
            str(report["retries"]), str(report["errors"]),
        ]


HEAD = [
    "pool", "retention", "turns", *PLANS, *KINDS, "cached", "ttft p50", "p90", "retries", "errors",
]


def called_from(path: str) -> Path:
    return Path(os.environ.get("BERTH_CALLED_FROM", "."), path)


def trace(path: str) -> Path:
    """Returns the path of a trace that was named by the user: it must exist."""
    if not (found := called_from(path)).exists():
        raise argparse.ArgumentTypeError(f"there is no trace at {found}")
    return found


def arguments() -> argparse.Namespace:
    beside = Path(__file__).resolve().parents[4] / "shared/traces"
    folder = called_from(os.environ.get("BERTH_TRACES", str(beside)))
    parser = argparse.ArgumentParser(prog="tests/sglang/run", description=__doc__)
    parser.add_argument(
        "--histories", nargs="?", type=trace, metavar="TRACE", const=folder / "lmcache_miniswe",
        help="a trace in LMCache's form (default lmcache_miniswe in the folder BERTH_TRACES)",
    )
    parser.add_argument(
        "--ratios", type=lambda text: [float(one) for one in text.split(",")],
        default=[0.5, 1.0, 2.0], help="pool sizes by working set (default 0.5,1,2)",
    )
    parser.add_argument(
        "--scale", type=float, default=0.06, help="part of a message that is sent (default 0.06)"
    )
    parser.add_argument(
        "--page-size", type=int, default=16, help="the engine's page size (default 16)"
    )
    return parser.parse_args()


def print_line(text: str) -> None:
    print(f"histories: {text}", flush=True)


class Bench:
    """Engine, agent and router with a pool of one size."""

    def __init__(self, folder: Path, bin_dir: Path, options: argparse.Namespace, pool_tokens: int):
        folder.mkdir()
        self.options = options
        self.fleet = Fleet(folder, bin_dir, options.page_size, worker="histories")
        print_line(f"starting an engine with a pool of {pool_tokens} tokens")
        more = ["--context-length", "4096"]
        self.fleet.start_engine(model="chat-model", pool_tokens=pool_tokens, more=more)
        self.fleet.start_agent(settings=f'files.shim_socket = "{self.fleet.shim_socket}"\n{AGENT}')
        self.fleet.start_router()
        self.fleet.wait_placing()
        self.fleet.wait_trimming()

    def stop(self) -> None:
        self.fleet.stop()

    def row(self, pool: str, retention: str) -> Row:
        """Empties the cache and replays the trace."""
        wire.post(f"{self.fleet.engine_url}/flush_cache")
        before = self._plans()
        sessions = ["--sessions", "final", "--session-open", retention]
        command = [
            str(self.fleet.bin_dir / "berth-replay"), "--url", self.fleet.router_url,
            "--trace", str(self.options.histories), "--api", "chat", "--model", MODEL,
            "--scale-tokens", str(self.options.scale), "--max-context", str(CONTEXT_TOKENS),
            "--max-output", "24", "--stop-at-eos", "--users", "16",
            "--time-scale", str(TIME_SCALE), "--retries-max", "50",
            "--json", "--allow-errors", *(sessions if retention != "none" else []),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Failed(f"berth-replay ended with {done.returncode}:\n{done.stderr[-2000:]}")
        report = json.loads(done.stdout.splitlines()[-1])
        plans = self._plans()
        plans.subtract(before)
        row = Row(pool, retention, report, plans)
        print_line(f"{report['seconds']:.0f} s: {' '.join(row.cells())} {report['errors_by_kind'] or ''}")
        return row

    def _plans(self) -> Counter[str]:
        text = wire.get(f"http://{self.fleet.agent_admin}/metrics").body.decode()
        found = re.findall(r'^berth_agent_trim_turns_total\{plan="(\w+)"\} (\d+)', text, re.M)
        return Counter({plan: int(count) for plan, count in found})


def table(rows: list[Row]) -> str:
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines
    )


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    bin_dir = binaries(("berth-agent", "berth-router", "berth-replay"))
    rows: list[Row] = []

    def at(name: str, pool_tokens: int, retentions: tuple[str, ...]) -> None:
        bench = Bench(folder / name.replace(" ", "-"), bin_dir, options, pool_tokens)
        try:
            rows.extend(bench.row(name, retention) for retention in retentions)
        finally:
            bench.stop()

    at("endless", MEASURED_TOKENS, RETENTIONS)
    [working_set] = [row.report["context_tokens"] for row in rows if row.retention == "none"]
    print_line(f"the working set has {working_set} tokens")
    for ratio in options.ratios:
        pages = round(working_set * ratio) // options.page_size
        at(f"{ratio:g} x", pages * options.page_size, RETENTIONS)
    return rows


def on_term(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    options = arguments()
    if not options.histories.exists():
        print_line(f"skipped: no trace at {options.histories}")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_term)
    folder = Path(tempfile.mkdtemp(prefix="berth-histories-"))
    try:
        print(table(measure(options, folder)), flush=True)
    except (Failed, OSError) as error:
        print_line(f"{error}\nthe logs are in {folder}")
        return 1
    except KeyboardInterrupt:
        print_line("interrupted")
        return 130
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
