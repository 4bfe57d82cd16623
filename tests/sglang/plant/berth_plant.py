"""A plugin for SGLang that plants faults in its KV pool, for tests of the page audit.

Between two steps the scheduler looks for the file that `BERTH_PLANT` names, does what it says, and
removes it. The file is JSON: the fault, and engine-side ids of sessions.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def register() -> None:
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
    HookRegistry.register(target, _look, HookType.BEFORE)


def _look(scheduler: Any, *_: Any, **__: Any) -> None:
    path = Path(os.environ["BERTH_PLANT"])
    if path.exists():
        asked = json.loads(path.read_text())
        FAULTS[asked["fault"]](scheduler, *asked["sessions"])
        path.unlink()


def _row(scheduler: Any, id: str) -> int:
    return scheduler.tree_cache.session.slots[id].kv.req_pool_idx


def _written(scheduler: Any, id: str) -> None:
    """Somebody has written into the session's first page."""
    slot = int(scheduler.req_to_token_pool.req_to_token[_row(scheduler, id), 0])
    scheduler.token_to_kv_pool_allocator.get_kvcache().k_buffer[0][slot] += 1


def _aliased(scheduler: Any, id: str, other: str) -> None:
    """The first page of one session is the other's last whole one."""
    table, page = scheduler.req_to_token_pool.req_to_token, scheduler.page_size
    theirs = scheduler.tree_cache.session.slots[other].kv.kv_committed_len // page * page
    table[_row(scheduler, id), :page] = table[_row(scheduler, other), theirs - page : theirs]


FAULTS = {"written": _written, "aliased": _aliased}
