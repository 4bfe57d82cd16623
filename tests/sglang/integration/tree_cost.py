"""Measures the time of the scheduler's thread that publishing the radix tree again takes.

It uses SGLang's own tree and event recorder. The tree is a single node, which makes for the longest
step.

    tests/sglang/run --tree-cost
"""

import gc
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "worker-agent/shim"))
from berth_shim.republish import Republisher  # noqa: E402

TOKENS = 128_000
TIMES = 5


def tree_of_one_node(page_size: int) -> UnifiedTreeCore:
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=None,
        page_size=page_size, enable_kv_cache_events=True,
    )
    cache = SimpleNamespace(page_size=page_size, enable_session_radix_cache=False)
    tree = UnifiedTreeCore(params, {ComponentType.FULL: FullComponent(cache, params)})
    node = tree._new_node()
    node.parent, node.key = tree.root_node, RadixKey(array("q", range(TOKENS)))
    node.hash_value = [f"{page:064x}" for page in range(TOKENS // page_size)]
    node.component_data[ComponentType.FULL].value = torch.arange(TOKENS)
    tree.root_node.children[node.key.child_key(page_size)] = node
    return tree


def chunk_times(page_size: int, clock: Callable[[], float]) -> list[float]:
    """Publishes a tree again. Returns the milliseconds of each chunk."""
    tree = tree_of_one_node(page_size)
    publisher = SimpleNamespace(
        enable_kv_cache_events=True, publish_kv_events=lambda: tree.kv_events.take() and None
    )
    cache = SimpleNamespace(tree_core=tree)
    scheduler = SimpleNamespace(kv_events_publisher=publisher, tree_cache=cache)
    republisher = Republisher(scheduler, lambda: None)
    republisher.begin()
    spent = []
    while republisher.is_running:
        begin = clock()
        republisher.publish_chunk()
        spent.append((clock() - begin) * 1000)
    assert not republisher.refusal, republisher.refusal
    return spent


def main() -> None:
    # A full garbage collection takes 10 ms, whatever code runs at that moment.
    gc.disable()
    for page_size in (1, 16):
        # Other load on the machine shows in `perf_counter`, but not in `thread_time`.
        for clock in (time.thread_time, time.perf_counter):
            runs = [chunk_times(page_size, clock) for _ in range(TIMES)]
            longest = ", ".join(f"{max(run):.1f}" for run in runs)
            print(
                f"pages of {page_size:2}, {clock.__name__:12}: {len(runs[-1])} steps, "
                f"{sum(runs[-1]):.0f} ms in all; the longest, {TIMES} times: {longest} ms"
            )


if __name__ == "__main__":
    main()
