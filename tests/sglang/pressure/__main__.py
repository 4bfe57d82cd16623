"""Plays a main agent beside growing background load, by ways of keeping KV, at the real engine.

The workloads, the ways and the tables are those of `berth-pressure`. Each run has an engine of its
own, because some of them end it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from integration import wire
from integration.fleet import SETTLE_SECONDS_MAX, Fleet, binaries
from integration.processes import TIER_FLAGS, Failed, shim_env, tier_env, wait_until

POOL_TOKENS = 4096
ROWS = 24
# As in production, but that idle sessions give way as soon as at the simulator.
SESSIONS = "sessions.demote_idle_ms = 1000\n"
PROGRAMS = ("berth-agent", "berth-router", "berth", "berth-pressure")


@dataclass(frozen=True)
class Scenario:
    """What `berth-pressure` is asked to play."""

    name: str
    flags: tuple[str, ...]


def scenarios(options: argparse.Namespace) -> list[Scenario]:
    """Each is a run of its own: what another one leaves in the cache would change it."""
    found = [
        Scenario(f"subagents of {ratio} x the pool", ("--only=trees", f"--ratios={ratio}"))
        for ratio in options.ratios.split(",")
    ]
    if options.trees > 1:
        flags = ("--only=more-trees", f"--trees={options.trees}")
        found.append(Scenario(f"{options.trees} main agents", flags))
    if options.trace:
        for count in options.conversations.split(","):
            flags = ("--only=conversations", f"--trace={options.trace}", f"--conversations={count}")
            found.append(Scenario(f"{count} conversations", flags))
    found.append(Scenario("sessions that nobody closes", ("--only=never-closed",)))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/sglang/run", description=__doc__)
    parser.add_argument("--pressure", action="store_true", help="play it")
    parser.add_argument("--arms", help="the ways of keeping KV, with commas (default all)")
    parser.add_argument(
        "--ratios", default="1,2,4", help="subagents' tokens by the pool's (default 1,2,4)"
    )
    parser.add_argument(
        "--trees", type=int, default=4, help="main agents at once, 1 for none (default 4)"
    )
    parser.add_argument("--trace", type=called_from, help="conversations, e.g. LMCache's")
    parser.add_argument(
        "--conversations", default="1,4,16", help="how many of them at once (default 1,4,16)"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each (default 1)")
    parser.add_argument("--page-size", type=int, default=16, help="of the engine (default 16)")
    parser.add_argument(
        "--guide", type=called_from, metavar="FOLDER", help="write tables and pictures there"
    )
    return parser.parse_args()


def called_from(path: str) -> Path:
    return Path(os.environ.get("BERTH_CALLED_FROM", "."), path).resolve()


def engine_flags(arm: dict) -> list[str]:
    flags = [*arm["engine_flags"], "--context-length", str(POOL_TOKENS)]
    return flags + (TIER_FLAGS if TIER_FLAGS[0] in flags else [])


def start(folder: Path, bin_dir: Path, options: argparse.Namespace, arm: dict) -> Fleet:
    fleet = Fleet(folder, bin_dir, options.page_size, worker="pressure")
    try:
        env = tier_env(shim_env(fleet.shim_socket, bin_dir))
        flags = engine_flags(arm)
        fleet.start_engine(
            env, model="chat-model", pool_tokens=POOL_TOKENS, rows=ROWS, more=flags,
        )
        settings = f'files.shim_socket = "{fleet.shim_socket}"\nreports.interval_ms = 50\n'
        fleet.start_agent(settings=settings, shares=SESSIONS)
        fleet.start_router()
        fleet.wait_placing()
        wait_until(fleet.agent, "hearing of the pool", lambda: usage(fleet), SETTLE_SECONDS_MAX)
        fleet.flush()
        return fleet
    except BaseException:
        fleet.stop()
        raise


def usage(fleet: Fleet) -> dict | None:
    """The pool's use, as the router shows it."""
    [worker] = wire.get(f"{fleet.router_url}/v1/workers").json()["workers"]
    return (worker["load"] or {}).get("kv_physical_usage")


def play(fleet: Fleet, arm: dict, scenario: Scenario, seed: int, out: Path) -> None:
    command = [
        str(fleet.bin_dir / "berth-pressure"), "--arms", arm["name"], *scenario.flags,
        "--at", fleet.engine_url, fleet.router_url, "--pool-tokens", str(POOL_TOKENS),
        "--page-tokens", str(fleet.page_size), "--first-seed", str(seed), "--seeds", "1",
        "--out", str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"berth-pressure ended with {done.returncode}:\n{done.stderr[-2000:]}")
    [outcome] = json.loads(out.read_text())
    failures = outcome["failures"] or ""
    print(
        f"pressure: {arm['name']}, {scenario.name}: {outcome['seconds']:.0f} s, "
        f"{len(outcome['turns'])} turns, {outcome['ending']} {failures}", flush=True,
    )


def run(options: argparse.Namespace, folder: Path) -> None:
    bin_dir = binaries(PROGRAMS)
    pressure = str(bin_dir / "berth-pressure")
    listed = json.loads(subprocess.check_output([pressure, "--list"]))["arms"]
    chosen = options.arms.split(",") if options.arms else [arm["name"] for arm in listed]
    if unknown := set(chosen) - {arm["name"] for arm in listed}:
        raise Failed(f"no such arms: {', '.join(sorted(unknown))}")
    results: list[Path] = []
    try:
        play_all(options, folder, bin_dir, [arm for arm in listed if arm["name"] in chosen], results)
    finally:
        if results:
            guide = ["--guide", str(options.guide), "--stage", "engine"] if options.guide else []
            subprocess.run([pressure, "--show", *map(str, results), *guide], check=True)


def play_all(
    options: argparse.Namespace, folder: Path, bin_dir: Path, arms: list[dict], results: list[Path]
) -> None:
    for number, scenario in enumerate(scenarios(options)):
        for arm in arms:
            for seed in range(options.seeds):
                place = folder / f"{number}-{arm['name']}-{seed}"
                place.mkdir()
                fleet = start(place, bin_dir, options, arm)
                try:
                    play(fleet, arm, scenario, seed, place / "results.json")
                    results.append(place / "results.json")
                finally:
                    fleet.stop()


def on_term(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    options = arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_term)
    folder = Path(tempfile.mkdtemp(prefix="berth-pressure-"))
    status = 1
    try:
        run(options, folder)
        status = 0
    except Failed as error:
        print(f"pressure: {error}", flush=True)
    except KeyboardInterrupt:
        print("pressure: interrupted", flush=True)
        return 130
    finally:
        if status == 0:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"pressure: the logs are in {folder}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
