"""A plugin for SGLang, for tests: lets an engine on a CPU hand its KV over by Mooncake.

A Mooncake sender says that it takes page numbers as a tensor that a CUDA event makes ready, so the
scheduler copies them to pinned memory and records an event: both need a GPU. A sender without this
property gets an array, as those of the other backends do. Nothing else is changed.
"""

import sys


def register() -> None:
    # Only the scheduler's process has senders.
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False
