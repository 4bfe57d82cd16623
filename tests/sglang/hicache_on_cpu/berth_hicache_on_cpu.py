"""A plugin for SGLang, for tests: lets an engine on a CPU run its hierarchical cache.

The host's pool is registered with CUDA, and the copies between the two pools are functions of the
GPU's kernel wheel. Here the host's memory is plain memory, and torch makes the copies. All that
decides what is copied, when and where to is the engine's own code.

Indices are those of tokens, and whole pages in order. The layouts of the host's pool are
`layer_first`, a tensor (token, head, dim) for each layer, and `page_first_direct`, a tensor (page,
layer, token, head, dim). The device's pool is always the former. Lists of K and V have the K of all
layers first.
"""

import sys


def register() -> None:
    # Only the scheduler's process has pools.
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.mem_cache.pool_host import base, mha

    # The engine keeps 10 GiB free, which is more than a test machine may have.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    original = mha.MHATokenToKVPoolHost.__init__

    def init(self, *arguments, **named) -> None:
        original(self, *arguments, **{**named, "pin_memory": False})

    mha.MHATokenToKVPoolHost.__init__ = init
    mha.transfer_kv_direct = copy_layers
    mha.transfer_kv_per_layer_direct_pf_lf = copy_layer_to_device
    mha.transfer_kv_all_layer_direct_lf_pf = copy_layers_to_host


def copy_layers(src_layers, dst_layers, src_indices, dst_indices, page_size) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_layer_to_device(
    src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size
) -> None:
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def copy_layers_to_host(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size) -> None:
    pages, places, layers = dst_indices // page_size, dst_indices % page_size, len(src_ptrs) // 2
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[pages, number % layers, places] = source[src_indices]
