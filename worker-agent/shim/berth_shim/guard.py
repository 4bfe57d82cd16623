"""Keeps an engine safe from pinned sessions, where SGLang itself doesn't.

With a storage back end, the engine looks there for a request's prompt, from the node of the radix
tree at which its resident part ends. A turn of a streaming session that has KV has no such node,
but SGLang asks the tree all the same, and the error ends the engine. Such turns lose nothing
without the look: storage has nothing of what follows a session's own KV.

A model with sliding-window or recurrent layers has a second pool, of which the agent can't count
what sessions hold.
"""

from typing import Any


def needs_no_prefetch(tree_cache: Any, request: Any) -> bool:
    """Whether the request is a turn that runs on KV of its session."""
    session = request.session
    # The engine takes an aborted turn out of its session before it asks the tree.
    if session is None or not session.streaming or request.to_finish is not None:
        return False
    slot = tree_cache.session.slots.get(session.session_id)
    return slot is not None and slot.kv.holds_kv


def second_pool(scheduler: Any) -> str:
    """Returns what the engine keeps in a second pool; empty if there is none."""
    kept = {
        "the KV of sliding-window layers": scheduler.is_hybrid_swa,
        "the state of recurrent layers": scheduler.is_hybrid_ssm,
    }
    return " and ".join(what for what, is_there in kept.items() if is_there)
