"""Audits a KV pool of torch on a GPU with the shim's library, as the shim does in an engine.

Arguments: the folder of the shim's package, the seconds to measure, and how torch allocates:
`blocks`, or `mapped` for expandable segments.

Prints one JSON object per line. A line with `report` has the audit's report in hex, with the pages
by owner and the faults that it must show. A line with `result` is a figure.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

is_mapped = sys.argv[3] == "mapped"
if is_mapped:
    os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = (
        "expandable_segments:True"
    )

import torch

sys.path.insert(0, str(Path(sys.argv[1]).resolve()))

from berth_shim.buffers import Buffer
from berth_shim.library import Library
from berth_shim.snapshot import Row, Snapshot

SECONDS = float(sys.argv[2])
PAGE_TOKENS, PAGES, LAYERS = 16, 1 << 14, 4
# One token of one layer's keys, or values: 8 heads of 128 bfloat16.
TOKEN_SHAPE = (8, 128)
SESSIONS, CONTEXT = 64, 1 << 16
# Each session's leading pages are the tree's, the rest its own.
SHARED_PAGES, OWN_PAGES = 32, 96
# More than all sealed pages have.
DIGEST_BYTES_MAX = 8 << 30


class Pool:
    """The tensors of an engine's pool and request table, and the bookkeeping of its rows."""

    def __init__(self) -> None:
        slots = (PAGES + 1) * PAGE_TOKENS
        self.kv = [
            torch.zeros((slots, *TOKEN_SHAPE), dtype=torch.bfloat16, device="cuda")
            for _ in range(2 * LAYERS)
        ]
        self.table = torch.zeros((SESSIONS + 1, CONTEXT), dtype=torch.int32, device="cuda")
        pages = torch.randperm(PAGES, device="cuda") + 1
        self.tree, rest = pages[:SHARED_PAGES], pages[SHARED_PAGES:]
        own, self.free = rest[: SESSIONS * OWN_PAGES], rest[SESSIONS * OWN_PAGES :].contiguous()
        self.own = own.reshape(SESSIONS, OWN_PAGES)
        self.tokens = (SHARED_PAGES + OWN_PAGES) * PAGE_TOKENS
        self.versions = [1] * SESSIONS
        for number in range(SESSIONS):
            held = torch.cat([self.tree, self.own[number]])
            self.table[number + 1, : self.tokens] = slots_of(held).int()
        torch.cuda.synchronize()

    def rows(self) -> list[Row]:
        """The last page of each row isn't sealed: its session still writes."""
        sealed, protected = self.tokens - PAGE_TOKENS, SHARED_PAGES * PAGE_TOKENS
        return [
            Row(number + 1, self.tokens, number, self.versions[number], number + 1, sealed, protected)
            for number in range(SESSIONS)
        ]

    def snapshot(self) -> Snapshot:
        names = [f"session-{number}" for number in range(SESSIONS)]
        return Snapshot(names, self.rows(), self.free, slots_of(self.tree))


def slots_of(pages: torch.Tensor) -> torch.Tensor:
    """The token slots of these pages."""
    offsets = torch.arange(PAGE_TOKENS, device="cuda")
    return (pages[:, None] * PAGE_TOKENS + offsets).reshape(-1).contiguous()


class Decoding:
    """A step of decoding as a CUDA graph: reads weights, and writes each session's last slot."""

    def __init__(self, pool: Pool) -> None:
        self.weights = torch.randn((16, 8192, 8192), dtype=torch.bfloat16, device="cuda")
        self.hidden = torch.randn((SESSIONS, 8192), dtype=torch.bfloat16, device="cuda")
        # Kept: a graph replays with the addresses of its capture.
        self.last_slots = slots_of(pool.own[:, -1])[PAGE_TOKENS - 1 :: PAGE_TOKENS].clone()

        def step() -> None:
            hidden = self.hidden
            for weight in self.weights:
                hidden = torch.nn.functional.layer_norm(hidden @ weight, (8192,))
            for tensor in pool.kv:
                tensor[self.last_slots] = hidden[:, :1024].reshape(SESSIONS, *TOKEN_SHAPE)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()

    def step_ms(self, seconds: float, after_each_step) -> list[float]:
        """Replays steps, one ahead as the engine does; returns the time of each."""
        times, ahead, end = [], None, time.perf_counter() + seconds
        begin = time.perf_counter()
        while begin < end:
            self.graph.replay()
            done = torch.cuda.Event()
            done.record()
            after_each_step()
            if ahead is not None:
                ahead.synchronize()
            ahead = done
            now = time.perf_counter()
            times.append((now - begin) * 1e3)
            begin = now
        torch.cuda.synchronize()
        return times[2:]


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    pool = Pool()
    decoding = Decoding(pool)
    page_bytes = pool.kv[0].stride(0) * 2 * PAGE_TOKENS
    buffers = [Buffer(tensor.data_ptr(), page_bytes) for tensor in pool.kv]
    begin = time.perf_counter()
    audits = Library().open_audits(PAGE_TOKENS, PAGES, pool.table, buffers, 0)
    say(what="opening the pool", result=f"{(time.perf_counter() - begin) * 1e3:.0f} ms")

    def audit(snapshot: Snapshot | None = None) -> bytes:
        stream = torch.cuda.current_stream().cuda_stream
        audits.begin(snapshot or pool.snapshot(), stream, DIGEST_BYTES_MAX)
        while not audits.is_copied():
            pass
        return audits.finish(pool.rows())

    sound = {
        "free": len(pool.free), "private": SESSIONS * OWN_PAGES, "cached": 0,
        "cached_in_use": SHARED_PAGES, "leaked": 0, "corrupt": 0,
    }

    def expect(what: str, owners: dict[str, int], snapshot: Snapshot | None = None, **faults: int):
        say(what=what, report=audit(snapshot).hex(), owners=owners, faults=faults)

    expect("a sound pool", sound)
    decoding.graph.replay()
    expect("after a step that a graph replayed", sound)

    sealed_slot = slots_of(pool.own[5][:1])[7]
    pool.kv[1][sealed_slot, 0, 0] = 1.0
    expect("a write into a sealed page", sound, changed=1)
    pool.kv[1][sealed_slot, 0, 0] = 0.0

    other = pool.snapshot()
    extra = torch.cat([pool.free, pool.free[:1]])
    expect("a page freed twice", sound, other._replace(free_pages=extra), double_free=1)
    expect(
        "a page that nobody holds", {**sound, "free": sound["free"] - 1, "leaked": 1},
        other._replace(free_pages=pool.free[1:].contiguous()), leaked=1,
    )
    place = SHARED_PAGES * PAGE_TOKENS
    kept = pool.table[8, place : place + PAGE_TOKENS].clone()
    pool.table[8, place : place + PAGE_TOKENS] = slots_of(pool.own[2][:1]).int()
    pool.versions[7] += 1
    expect(
        "a page in two sessions' rows",
        {**sound, "private": sound["private"] - 1, "leaked": 1}, aliased=1, leaked=1,
    )
    pool.table[8, place : place + PAGE_TOKENS] = kept
    pool.versions[7] += 1
    audit()

    if not is_mapped:
        measure(pool, decoding, audits)


def measure(pool: Pool, decoding: Decoding, audits) -> None:
    """Times steps alone and with ten audits a second, by turns, and what an audit takes of the
    scheduler's thread."""
    on_thread: list[float] = []
    state = {"next": 0.0, "running": False}

    def advance() -> None:
        begin = time.perf_counter()
        if not state["running"]:
            if begin < state["next"]:
                return
            state["next"] = begin + 0.1
            snapshot = pool.snapshot()
            begin = time.perf_counter()
            audits.begin(snapshot, torch.cuda.current_stream().cuda_stream, 256 << 20)
            on_thread.append((time.perf_counter() - begin) * 1e6)
            state["running"] = True
        elif audits.is_copied():
            audits.finish(pool.rows())
            state["running"] = False

    alone, beside = [], []
    for _ in range(3):
        alone += decoding.step_ms(SECONDS / 6, lambda: None)
        beside += decoding.step_ms(SECONDS / 6, advance)
    mean_alone, mean_beside = statistics.fmean(alone), statistics.fmean(beside)
    say(what="a graph's steps, ten audits a second", result=(
        f"step {mean_beside:.3f} ms, alone {mean_alone:.3f}: "
        f"{(mean_beside / mean_alone - 1) * 100:+.2f} %, {len(on_thread)} audits"
    ))
    say(what="an audit's begin on the scheduler's thread", result=(
        f"{statistics.median(on_thread):.0f} us for {SESSIONS} rows"
    ))


main()
