"""A plugin for SGLang, for the script that runs it on a GPU.

It lets a dense model run without a package that such a model doesn't use, and writes down how long
the shim works after each step. `BERTH_STEP_TIMES` names the file: a line for each step, in
nanoseconds.
"""

import os
import sys
import time

# Steps whose times are written at once.
BLOCK = 64


def register() -> None:
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    import torch

    if torch.cuda.is_available():
        from sglang.srt.layers.dual_gemm import DualGemm

        # A kernel for SM100 alone. To ask whether it fits imports nvidia-cutlass-dsl.
        DualGemm._select_mode = lambda *_: None
    if "BERTH_STEP_TIMES" in os.environ:
        _write_times(os.environ["BERTH_STEP_TIMES"])


def _write_times(path: str) -> None:
    from berth_shim.sampler import Sampler

    end_step, times = Sampler.end_step, []

    def timed(self, batch) -> None:
        begin = time.perf_counter_ns()
        end_step(self, batch)
        times.append(time.perf_counter_ns() - begin)
        if len(times) >= BLOCK:
            with open(path, "a") as file:
                file.write("".join(f"{each}\n" for each in times))
            times.clear()

    Sampler.end_step = timed
