"""Finds where the pool's KV is stored: the device, and the buffers of keys and values."""

from typing import Any, NamedTuple


class Buffer(NamedTuple):
    """One layer's keys or values. Page `p` begins at byte `p * page_bytes`."""

    address: int
    page_bytes: int


def buffers(scheduler: Any) -> list[Buffer]:
    """Returns the pool's buffers on this rank; empty if a page is not a contiguous range."""
    tensors = _tensors(scheduler.token_to_kv_pool_allocator.get_kvcache())
    page = scheduler.page_size
    slots = scheduler.max_total_num_tokens + page
    if not all(tensor.is_contiguous() and tensor.shape[0] >= slots for tensor in tensors):
        return []
    return [
        Buffer(tensor.data_ptr(), tensor.stride(0) * tensor.element_size() * page)
        for tensor in tensors
    ]


def device(scheduler: Any) -> tuple[str, int]:
    """Returns the device's name for the agent and its CUDA ordinal in this process; -1 on a CPU."""
    import torch

    where = scheduler.req_to_token_pool.req_to_token.device
    if where.type != "cuda":
        return where.type, -1
    ordinal = where.index if where.index is not None else torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(ordinal).uuid), ordinal


def _tensors(cache: Any) -> list[Any]:
    try:
        infos = cache.get_device_pool_infos()
    except NotImplementedError:
        return []
    if len(infos) != 1:
        return []
    info = infos[0].buffer_info
    # Keys and values have separate buffers, or share one (multi-head latent attention).
    parts = (info.buffers.k, info.buffers.v) if hasattr(info.buffers, "k") else (info.buffers,)
    scales = getattr(info, "scales", None)
    if scales is not None:
        parts += (scales.k, scales.v) if hasattr(scales, "k") else (scales,)
    tensors = [tensor for part in parts for tensor in part]
    return tensors if all(hasattr(tensor, "data_ptr") for tensor in tensors) else []
