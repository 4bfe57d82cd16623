"""Tests which requests the shim keeps from the engine's storage, without an engine."""

from types import SimpleNamespace
from typing import Any

import berth_shim
import pytest
from berth_shim.guard import needs_no_prefetch, second_pool


def cache(holds_kv: bool | None) -> Any:
    """Returns a tree cache whose session `s` has a slot with or without KV; None: no slot."""
    slot = SimpleNamespace(kv=SimpleNamespace(holds_kv=holds_kv))
    return SimpleNamespace(session=SimpleNamespace(slots={} if holds_kv is None else {"s": slot}))


def request(streaming: bool | None = True, id: str = "s", to_finish: object = None) -> Any:
    """Returns a request of a session; `streaming` None: of none."""
    session = None if streaming is None else SimpleNamespace(streaming=streaming, session_id=id)
    return SimpleNamespace(session=session, to_finish=to_finish)


@pytest.mark.parametrize("tree_cache, of, left_out", [
    (cache(True), request(), True),
    # The first turn, and that after a demotion, an abort or a flush.
    (cache(None), request(), False),
    (cache(False), request(), False),
    (cache(True), request(id="other"), False),
    (cache(True), request(streaming=None), False),
    (cache(True), request(streaming=False), False),
    # The engine takes such a turn out of its session.
    (cache(True), request(to_finish="too long"), False),
])
def test_only_a_turn_on_its_sessions_kv_is_left_out(
    tree_cache: Any, of: Any, left_out: bool
) -> None:
    assert needs_no_prefetch(tree_cache, of) == left_out


def prefetch(tree_cache: Any, of: Any, shim: Any) -> tuple:
    """Calls the hook. Returns its result, and what the engine's function was called with."""
    calls = []
    original = lambda *a, **k: calls.append((a, k)) or "prefetched"  # noqa: E731
    scheduler = SimpleNamespace(tree_cache=tree_cache)
    result = shim._around_prefetch(original, scheduler, of, 7, more=8)
    return result, [(a[1:], k) for a, k in calls]


def test_what_isnt_left_out_reaches_the_engine_unchanged() -> None:
    shim, first = berth_shim._Shim(), request()
    assert prefetch(cache(None), first, shim) == ("prefetched", [((first, 7), {"more": 8})])
    assert prefetch(cache(True), first, shim) == (None, [])


def test_a_guard_that_fails_leaves_all_out_and_says_so_once() -> None:
    shim, failures = berth_shim._Shim(), []
    shim._sampler = object()
    shim._fail = lambda part, error: (failures.append(part), setattr(shim, "_sampler", None))
    for _ in range(2):
        assert prefetch(None, request(), shim) == (None, []), "the engine must live"
    assert failures == ["guard"]


def test_a_second_pool_is_named() -> None:
    for swa, ssm, named in (
        (False, False, ""), (True, False, "the KV of sliding-window layers"),
        (False, True, "the state of recurrent layers"),
        (True, True, "the KV of sliding-window layers and the state of recurrent layers"),
    ):
        assert second_pool(SimpleNamespace(is_hybrid_swa=swa, is_hybrid_ssm=ssm)) == named
