"""Makes a request table in torch, as SGLang does, and prints how to map it: a line about torch's own
handle, and a line with the driver's handle. Keeps the table until standard input ends."""

import ctypes
import sys

import torch

ROWS, ENTRIES = 65, 1 << 14

# SGLang's table is one of many tensors in a block of the caching allocator.
before = torch.zeros(1 << 10, dtype=torch.int32, device="cuda")
table = torch.arange(ROWS * ENTRIES, dtype=torch.int32, device="cuda").reshape(ROWS, ENTRIES)
torch.cuda.synchronize()

cuda = ctypes.CDLL("libcuda.so.1")
base, size = ctypes.c_uint64(), ctypes.c_size_t()
handle = (ctypes.c_uint8 * 64)()
address = ctypes.c_uint64(table.data_ptr())
answers = (
    cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address),
    cuda.cuIpcGetMemHandle(ctypes.byref(handle), base),
)
if any(answers):
    sys.exit(f"the driver returned {answers}")
own = table.untyped_storage()._share_cuda_()[1]
inside = bytes(handle) == own[2:66]
print(f"torch's handle has {len(own)} bytes, begins with {own[:2].hex()}, holds the driver's: {inside}")
print(bytes(handle).hex(), table.data_ptr() - base.value, table.numel() * 4, flush=True)
sys.stdin.read()
