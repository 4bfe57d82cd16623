"""A plugin for SGLang that plants faults in its KV pool and in its publisher of KV events, and lists
its radix tree, for tests of what Berth makes of them.

Between two steps the scheduler looks for the file that `BERTH_PLANT` names, does what it says, and
removes it. The file is JSON: the fault, and engine-side ids of sessions or what else it is about.
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


class _Dropping:
    """A socket that loses the first messages."""

    def __init__(self, socket: Any, count: int):
        self._socket, self._left = socket, count

    def send_multipart(self, frames: Any) -> None:
        if self._left:
            self._left -= 1
        else:
            self._socket.send_multipart(frames)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def _publisher(scheduler: Any) -> Any:
    return scheduler.kv_events_publisher.kv_event_publisher


def _dropped(scheduler: Any, count: str) -> None:
    """The next messages don't arrive; the buffer has them."""
    publisher = _publisher(scheduler)
    publisher._pub = _Dropping(publisher._pub, int(count))


def _forgotten(scheduler: Any) -> None:
    """The buffer has nothing any more."""
    _publisher(scheduler)._buffer.clear()


def _tree(scheduler: Any) -> None:
    """No fault: the tokens of each way from the root that is on the device, as far as it goes. What
    is queued is published first."""
    scheduler.kv_events_publisher.publish_kv_events()
    paths, nodes = [], [(scheduler.tree_cache.tree_core.root_node, [])]
    while nodes:
        node, before = nodes.pop()
        children = [child for child in node.children.values() if not child.evicted]
        nodes += [(child, before + list(child.key.raw_token_ids())) for child in children]
        if not children:
            paths.append(before)
    Path(os.environ["BERTH_PLANT"]).with_suffix(".tree").write_text(json.dumps(paths))


FAULTS = {
    "written": _written, "aliased": _aliased,
    "dropped": _dropped, "forgotten": _forgotten, "tree": _tree,
}
