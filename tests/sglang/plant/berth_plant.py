"""A plugin for SGLang, for tests: plants faults, lists the radix tree, and records contexts.

The faults are in the KV pool and in the publisher of KV events. Between two steps the scheduler
looks for the file that `BERTH_PLANT` names, does what it says, and removes it. The file is JSON:
`fault` is the fault's name, `sessions` its arguments, mostly engine-side ids of sessions.

The engine appends lines of JSON to the file that `BERTH_CONTEXTS` names. The line of a request has
the ids of the full prompt, as its tokenizer made them (`rid`, `whole`). The line of a finished turn
of a streaming session has the session's context after that turn (`rid`, `session`, `context`).
"""

import collections
import json
import math
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

# The engine's default for the messages that its publisher keeps.
BUFFER_MESSAGES = 10_000


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "sglang.srt.managers.scheduler" not in sys.modules:
        if "BERTH_CONTEXTS" in os.environ and multiprocessing.parent_process() is None:
            target = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
            HookRegistry.register(target + "_create_tokenized_object", _whole, HookType.BEFORE)
        return
    if "BERTH_PLANT" in os.environ:
        target = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
        HookRegistry.register(target, _look, HookType.BEFORE)
    if "BERTH_CONTEXTS" in os.environ:
        target = "sglang.srt.session.session_controller.Session.finish_req"
        HookRegistry.register(target, _context, HookType.AFTER)


def _append(line: dict[str, Any]) -> None:
    with open(os.environ["BERTH_CONTEXTS"], "a") as file:
        file.write(json.dumps(line) + "\n")


def _whole(_manager: Any, request: Any, _text: Any, ids: Any, *_: Any, **__: Any) -> None:
    _append({"rid": request.rid, "whole": list(ids)})


def _context(_result: None, session: Any, request: Any) -> None:
    answer = request.output_ids[: request.sampling_params.max_new_tokens]
    context = [*request.origin_input_ids, *answer]
    _append({"rid": request.rid, "session": session.session_id, "context": context})


def _look(scheduler: Any, *_: Any, **__: Any) -> None:
    path = Path(os.environ["BERTH_PLANT"])
    if path.exists():
        asked = json.loads(path.read_text())
        FAULTS[asked["fault"]](scheduler, *asked["sessions"])
        path.unlink()


def _row(scheduler: Any, id: str) -> int:
    return scheduler.tree_cache.session.slots[id].kv.req_pool_idx


def _written(scheduler: Any, id: str) -> None:
    """Changes the session's first page, as a stray write would."""
    slot = int(scheduler.req_to_token_pool.req_to_token[_row(scheduler, id), 0])
    scheduler.token_to_kv_pool_allocator.get_kvcache().k_buffer[0][slot] += 1


def _aliased(scheduler: Any, id: str, other: str) -> None:
    """Makes the last whole page of session `other` the first page of session `id` too."""
    table, page = scheduler.req_to_token_pool.req_to_token, scheduler.page_size
    theirs = scheduler.tree_cache.session.slots[other].kv.kv_committed_len // page * page
    table[_row(scheduler, id), :page] = table[_row(scheduler, other), theirs - page : theirs]


class _Dropping:
    """A socket that drops the first messages, or all of them."""

    def __init__(self, socket: Any, count: float):
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


def _socket(publisher: Any) -> Any:
    """Returns the publisher's own socket, which drops nothing."""
    socket = publisher._pub
    return socket._socket if isinstance(socket, _Dropping) else socket


def _dropped(scheduler: Any, count: str) -> None:
    """Drops the next `count` messages, in place of any earlier count. The publisher's buffer has
    them."""
    publisher = _publisher(scheduler)
    publisher._pub = _Dropping(_socket(publisher), int(count))


def _lost(scheduler: Any) -> None:
    """Drops every message from now on. The publisher's buffer stays empty too, so a replay returns
    nothing."""
    publisher = _publisher(scheduler)
    publisher._buffer = collections.deque(maxlen=0)
    publisher._pub = _Dropping(_socket(publisher), math.inf)


def _heard(scheduler: Any) -> None:
    """Ends `_lost`: messages arrive again, and the buffer keeps them."""
    publisher = _publisher(scheduler)
    # The messages still in the queue pass through the dropping socket first, so they are lost too.
    publisher._event_queue.join()
    publisher._pub = _socket(publisher)
    publisher._buffer = collections.deque(maxlen=BUFFER_MESSAGES)


def _forgotten(scheduler: Any) -> None:
    """Empties the publisher's buffer."""
    _publisher(scheduler)._buffer.clear()


def _slowly(_scheduler: Any, pages: str) -> None:
    """Makes the shim publish the tree in steps of this many pages."""
    from berth_shim import republish

    republish.CHUNK_SECONDS, republish.PART_PAGES_MAX = 0.0, int(pages)


def _tree(scheduler: Any) -> None:
    """Writes the tokens of each path from the root, as far as it is on the device, to a file. It
    plants no fault. Queued events are published first."""
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
    "dropped": _dropped, "lost": _lost, "heard": _heard, "forgotten": _forgotten,
    "slowly": _slowly, "tree": _tree,
}
