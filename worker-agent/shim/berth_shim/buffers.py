"""Finds where the engine keeps its KV, for the page audit: the device, and each layer's buffers.
"""

from typing import Any, NamedTuple


class Buffer(NamedTuple):
    """One layer's keys or values, or their scales. Page `p` begins at byte `p * page_bytes`."""

    address: int
    page_bytes: int


def buffers(scheduler: Any) -> list[Buffer]:
    """Returns the pool's buffers; none if a page's bytes aren't contiguous in each buffer."""
    tensors = _kv_tensors(scheduler.token_to_kv_pool_allocator.get_kvcache())
    page_tokens = scheduler.page_size
    # The engine's pools have one page more than they offer.
    slots_min = scheduler.max_total_num_tokens + page_tokens
    if not all(tensor.is_contiguous() and tensor.shape[0] >= slots_min for tensor in tensors):
        return []
    return [
        Buffer(tensor.data_ptr(), tensor.stride(0) * tensor.element_size() * page_tokens)
        for tensor in tensors
    ]


def device(scheduler: Any) -> tuple[str, int]:
    """Returns the GPU's UUID and CUDA ordinal; without CUDA, the torch device type and -1."""
    import torch

    torch_device = scheduler.req_to_token_pool.req_to_token.device
    if torch_device.type != "cuda":
        return torch_device.type, -1
    index = torch_device.index
    cuda_ordinal = index if index is not None else torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(cuda_ordinal).uuid), cuda_ordinal


def _kv_tensors(cache: Any) -> list[Any]:
    """Returns the tensors of the cache's only pool; none if it has several, or lists none."""
    if not hasattr(cache, "get_device_pool_infos"):
        # SGLang 0.5.20 and 0.5.21. Only of the plain pool all buffers are known.
        is_plain = type(cache).__name__ == "MHATokenToKVPool" and cache.k_scale_buffer is None
        return [*cache.k_buffer, *cache.v_buffer] if is_plain else []
    try:
        pool_infos = cache.get_device_pool_infos()
    except NotImplementedError:
        return []
    if len(pool_infos) != 1:
        return []
    info = pool_infos[0].buffer_info
    # With multi-head latent attention, keys and values share their buffers.
    has_keys = hasattr(info.buffers, "k")
    layer_lists = (info.buffers.k, info.buffers.v) if has_keys else (info.buffers,)
    scales = getattr(info, "scales", None)
    if scales is not None:
        layer_lists += (scales.k, scales.v) if hasattr(scales, "k") else (scales,)
    tensors = [tensor for layers in layer_lists for tensor in layers]
    return tensors if all(hasattr(tensor, "data_ptr") for tensor in tensors) else []
