"""Command line of the integration suite: starts the fleet, runs the tests, stops the fleet."""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from integration import runner
from integration.fleet import Fleet, binaries
from integration.processes import Failed
from integration.turns import clean_up

# Importing a module registers its tests; they run in this order.
from integration import (  # noqa: F401
    plain,
    bytes_untouched,
    pinned,
    tagged,
    together,
    lifecycle,
    ledger,
    refusals,
    owned_keys,
    vanishing,
    tapped,
    shim,
    with_shim,
    audit,
    snapshots,
    planted,
    kv,
    trim,
    clients,
    mixed,
    preamble,
    takeover,
    overlap,
    stages,
    ends,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/sglang/run", description=__doc__)
    parser.add_argument("-k", metavar="PATTERN", help="run only the tests whose name contains it")
    parser.add_argument("--list", action="store_true", help="list the tests and exit")
    parser.add_argument("--page-size", type=int, default=16, help="the engine's (default 16)")
    parser.add_argument("--keep", action="store_true", help="leave the fleet running until Ctrl-C")
    parser.add_argument("--only-engine", action="store_true", help="run the engine alone, no tests")
    return parser.parse_args()


def print_line(text: str) -> None:
    print(f"integration: {text}", flush=True)


def on_term(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    options = arguments()
    tests = runner.selected(options.k)
    if options.list:
        print("\n".join(test.name for test in tests))
        return 0
    if not tests:
        print_line(f"no test name contains {options.k!r}; --list shows all names")
        return 2

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_term)
    folder = Path(tempfile.mkdtemp(prefix="berth-integration-"))
    fleet = None
    status = 1
    try:
        bin_dir = Path() if options.only_engine else binaries()
        begin = time.monotonic()
        fleet = Fleet(folder, bin_dir, options.page_size)
        fleet.start_engine()
        if options.only_engine:
            keep(fleet)
            return 0
        fleet.start_agent()
        fleet.start_router()
        print_line(f"agent and router ready; {time.monotonic() - begin:.0f} s in all")
        passed, failed = runner.run(tests, fleet, clean_up)
        print_line(f"{time.monotonic() - begin:.0f} s with the start")
        status = 0 if failed == 0 else 1
        if options.keep:
            keep(fleet)
    except Failed as error:
        print_line(str(error))
        if fleet is None:
            return 1
        passed, failed = 0, len(tests)
    except KeyboardInterrupt:
        print_line("interrupted")
        return 130
    finally:
        # A second Ctrl-C must not interrupt the cleanup.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if fleet:
            fleet.stop()
        if status == 0 or options.only_engine:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print_line(f"the logs are in {folder}")
    print(f"{passed} passed, {failed} failed", flush=True)
    return status


def keep(fleet: Fleet) -> None:
    """Prints the addresses of the running processes, and waits for Ctrl-C or TERM."""
    print_line("running; Ctrl-C ends it")
    print(f"  engine  {fleet.engine_url}")
    if fleet.agent and fleet.router:
        print(f"  agent   http://{fleet.agent_data}  admin http://{fleet.agent_admin}")
        print(f"  router  {fleet.router_url}  admin http://{fleet.router_admin}", flush=True)
    sys.stdout.flush()
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    sys.exit(main())
