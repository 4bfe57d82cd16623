"""Command line of the soak, which tests/sglang/README.md describes."""

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from integration.processes import Failed
from soak import bare, guarded
from soak.engine import EngineDead
from soak.cluster import POOL_TOKENS
from soak.report import Verdicts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/sglang/run", description=__doc__)
    count = parser.add_mutually_exclusive_group(required=True)
    count.add_argument("--soak", type=int, metavar="N", help="N operations at the real engine")
    count.add_argument("--soak-sim", type=int, metavar="N", help="N operations at the simulator")
    parser.add_argument("--bare", action="store_true", help="only directly at the engine")
    parser.add_argument("--guarded", action="store_true", help="only through Berth")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    parser.add_argument("--page-size", type=int, default=16, help="of the engine (default 16)")
    parser.add_argument(
        "--pool-tokens", type=int, default=POOL_TOKENS,
        help=f"size of the engine's pool (default {POOL_TOKENS})",
    )
    parser.add_argument(
        "--host-ratio", type=float, default=0, metavar="R",
        help="size of a host tier as a multiple of the pool (default: none); only through Berth",
    )
    parser.add_argument(
        "--at", nargs=4, metavar=("ENGINE", "ROUTER", "DATA", "ADMIN"),
        help="a fleet that runs: URLs of engine and router, the agent's data and admin address",
    )
    options = parser.parse_args()
    if options.bare and (options.guarded or options.at):
        parser.error("--bare starts an engine of its own, and nothing else")
    if options.host_ratio and (options.at or options.bare):
        parser.error("--host-ratio is for an engine that is started for Berth")
    options.simulated = options.soak is None
    options.count = options.soak_sim if options.simulated else options.soak
    return options


def on_term(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    options = arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_term)
    folder = Path(tempfile.mkdtemp(prefix="berth-soak-"))
    verdicts = Verdicts()
    begin = time.monotonic()
    status = 1
    try:
        with contextlib.ExitStack() as stack:
            if not options.bare:
                guarded.run(options, folder, verdicts, stack)
        if not options.guarded:
            bare.run(options, folder, verdicts)
        status = int(verdicts.failed > 0)
    except (Failed, EngineDead, OSError) as error:
        verdicts.add("the soak runs to its end", [f"{type(error).__name__}: {error}"])
    except KeyboardInterrupt:
        print("soak: interrupted", flush=True)
        return 130
    finally:
        if status == 0:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"soak: the logs are in {folder}", flush=True)
    print(f"soak: {time.monotonic() - begin:.0f} s, seed {options.seed}")
    print(f"{verdicts.passed} passed, {verdicts.failed} failed", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
