"""Measures how long short prompts wait beside long ones, with and without staged prefill.

It prints one table and asserts nothing.

The real engine has a context of 32,768 tokens. One client sends long prompts, one after the other,
of which nothing is cached; three clients send short ones. All stream, and the time to the first
token counts. The agents with and without staged prefill alternate, so that other load on the
machine affects both.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from integration import wire
from integration.fleet import BERTH_START_SECONDS_MAX, Fleet, binaries
from integration.processes import Failed, wait_until
from integration.turns import sampling

CONTEXT_TOKENS = 32_768
# Longer than the tiny model's own context; the content of its answers doesn't matter here.
LONGER = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
FLAGS = [
    "--context-length", str(CONTEXT_TOKENS),
    "--json-model-override-args", json.dumps({"max_position_embeddings": CONTEXT_TOKENS}),
]
SHORT_TOKENS = 100
SHORT_CLIENTS = 3
# The agent's default.
STAGE_MS = 600
ANSWER_SECONDS_MAX = 300


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/sglang/run", description=__doc__)
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each kind (default 7)")
    parser.add_argument("--seconds", type=float, default=20, help="length of a round (default 20)")
    parser.add_argument(
        "--long-tokens", type=int, default=12_000, help="length of a long prompt (default 12000)"
    )
    parser.add_argument(
        "--page-size", type=int, default=16, help="the engine's page size (default 16)"
    )
    return parser.parse_args()


def print_line(text: str) -> None:
    print(f"waits: {text}", flush=True)


def first_token_ms(url: str, ids: list[int]) -> float:
    begun = time.monotonic()
    body = {"input_ids": ids, "sampling_params": sampling(4), "stream": True}
    answer = wire.stream(f"{url}/generate", body, seconds=ANSWER_SECONDS_MAX)
    first = next(answer.events(), "")
    waited = time.monotonic() - begun
    if answer.status != 200 or "output_ids" not in first:
        raise Failed(f"no token, but status {answer.status}: {first[:300]}")
    answer.rest()
    answer.close()
    return 1000 * waited


def prompt(tokens: int) -> list[int]:
    """Returns a prompt that was never sent before."""
    return [random.randrange(32, 127) for _ in range(tokens)]


def clients(url: str, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Runs one round. Returns how long each short and each long prompt waited for its first
    token."""
    ends = time.monotonic() + options.seconds
    waits: tuple[list[float], list[float]] = ([], [])

    def client(kind: int, tokens: int, pause: float) -> None:
        while time.monotonic() < ends:
            waits[kind].append(first_token_ms(url, prompt(tokens)))
            time.sleep(pause)

    with ThreadPoolExecutor(SHORT_CLIENTS + 1) as pool:
        all_of_them = [pool.submit(client, 1, options.long_tokens, 0.5)]
        for _ in range(SHORT_CLIENTS):
            all_of_them.append(pool.submit(client, 0, SHORT_TOKENS, 0.3))
        for one in all_of_them:
            one.result()
    return waits


def measure(fleet: Fleet, options: argparse.Namespace) -> dict[int, list[tuple]]:
    """Runs the rounds of both agents. Returns them by `prefill_stage_ms`, which is 0 without staged
    prefill."""
    rounds: dict[int, list[tuple]] = {0: [], STAGE_MS: []}
    for number in range(options.rounds):
        order = (0, STAGE_MS) if number % 2 == 0 else (STAGE_MS, 0)
        for prefill_stage_ms in order:
            shim = f'files.shim_socket = "{fleet.shim_socket}"\n'
            fleet.restart_agent(settings=f"{shim}engine.prefill_stage_ms = {prefill_stage_ms}\n")
            wait_until(fleet.router, "hearing of the engine's blocks",
                       lambda: known(fleet) == "live", BERTH_START_SECONDS_MAX)
            # The agent measures the engine's rate with this prompt, before anything counts.
            first_token_ms(fleet.router_url, prompt(options.long_tokens))
            short, long = clients(fleet.router_url, options)
            rounds[prefill_stage_ms].append((short, long))
            setting = f"prefill_stage_ms {prefill_stage_ms}"
            print_line(f"round {number + 1}, {setting}: {cells(short)} {cells(long)}")
    return rounds


def known(fleet: Fleet) -> str:
    [worker] = wire.get(f"{fleet.router_url}/v1/workers").json()["workers"]
    return worker["kv"]["state"]


def cells(waits: list[float]) -> str:
    """Formats the count, median, 90th percentile and mean of these milliseconds."""
    ordered = sorted(waits)
    p90 = ordered[int(0.9 * (len(ordered) - 1))]
    mean = statistics.mean(ordered)
    return f"{len(ordered):>6} {statistics.median(ordered):>8.0f} {p90:>8.0f} {mean:>8.0f}"


def table(rounds: dict[int, list[tuple]]) -> str:
    head = f"{'':>9} {'prompts':>6} {'ttft p50':>8} {'p90':>8} {'mean':>8}"
    lines = [head]
    for kind, name in enumerate(("short", "long")):
        for prefill_stage_ms, done in rounds.items():
            waits = [wait for one in done for wait in one[kind]]
            lines.append(f"{name:>5} {prefill_stage_ms:>3}  {cells(waits)}")
        ratios = [
            statistics.mean(staged[kind]) / statistics.mean(whole[kind])
            for whole, staged in zip(rounds[0], rounds[STAGE_MS])
        ]
        lines.append(
            f"{name:>5}, mean with staged prefill by mean without: median of rounds "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return "\n".join(lines)


def on_term(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    options = arguments()
    # Without these handlers the engine would outlive this process.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_term)
    folder = Path(tempfile.mkdtemp(prefix="berth-waits-"))
    fleet = Fleet(folder, binaries(), options.page_size, worker="waits")
    try:
        fleet.start_engine(LONGER, pool_tokens=1 << 17, more=FLAGS)
        fleet.start_agent()
        fleet.start_router()
        fleet.wait_placing()
        print(table(measure(fleet, options)), flush=True)
    except (Failed, OSError) as error:
        print_line(f"{error}\nthe logs are in {folder}")
        return 1
    except KeyboardInterrupt:
        print_line("interrupted")
        return 130
    finally:
        fleet.stop()
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
