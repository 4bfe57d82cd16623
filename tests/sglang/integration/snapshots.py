"""The shim's snapshot of rows, for scheduler states that a CPU engine never reaches.

The device of a CPU engine is never behind its scheduler. The schedulers here have the fields that
the shim reads, and nothing else.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


sys.path.append(str(Path(__file__).resolve().parents[3] / "worker-agent/shim"))

from berth_shim import snapshot  # noqa: E402

COMMITTED = 48


def _kv(row: int | None, **more: int) -> SimpleNamespace:
    tokens = {"kv_committed_len": COMMITTED, "kv_allocated_len": 50, "cache_protected_len": 16}
    return SimpleNamespace(req_pool_idx=row, holds_kv=row is not None, **(tokens | more))


def _request(kv: Any, session: Any = None, beam: Any = None) -> SimpleNamespace:
    return SimpleNamespace(kv=kv, session=session, rid="r", beam_group=beam)


def _scheduler(sessions: dict[str, Any], slots: dict[str, Any], **queues: Any) -> Any:
    generations = SimpleNamespace(tolist=lambda: [0, 7, 8, 9])
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_generation=generations),
        tree_cache=SimpleNamespace(session=SimpleNamespace(slots=slots)),
        session_controller=SimpleNamespace(sessions=sessions),
        waiting_queue=queues.get("waiting", []),
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        chunked_req=queues.get("chunked"),
        collect_inflight_reqs=lambda: queues.get("running", []),
        result_queue=[(SimpleNamespace(reqs=queues.get("launched", [])), None)],
    )


def _one(inflight: bool = False, **queues: Any) -> tuple[Any, Any, Any]:
    """Returns a scheduler with one session that holds row 1, the session, and the session's KV
    record."""
    session, kv = SimpleNamespace(_inflight=inflight), _kv(1)
    slots = {"s": SimpleNamespace(kv=kv)}
    return _scheduler({"s": session}, slots, **queues), session, kv


def test_only_what_no_turn_may_still_write_is_sealed() -> None:
    idle, _, _ = _one()
    [row] = snapshot.list_rows(idle)[1]
    assert row.sealed_tokens == COMMITTED - 1, "sealed of an idle session"
    running, _, _ = _one(inflight=True)
    assert snapshot.list_rows(running)[1][0].sealed_tokens == 0, "sealed while a turn is in flight"
    # In all three cases the session's flag says idle, but a turn may still write: a turn has ended
    # and is in the batch that the device still works on, a turn was put back into the queue, or
    # another turn was refused beside a running one.
    for queue in ("running", "launched", "waiting"):
        scheduler, session, kv = _one()
        queued = [_request(kv, session)]
        scheduler = _scheduler({"s": session}, scheduler.tree_cache.session.slots, **{queue: queued})
        names, rows = snapshot.list_rows(scheduler)
        assert [row.sealed_tokens for row in rows] == [0], f"sealed, with a turn in {queue}"
        assert (names, rows[0].version == row.version) == (["s"], False), (
            "its name; the same version"
        )


def test_every_row_is_held_by_someone_once() -> None:
    session, kv = SimpleNamespace(_inflight=True), _kv(1)
    turn, plain, chunked = _request(kv, session), _request(_kv(2)), _request(_kv(3))
    waiting = _request(_kv(None))
    scheduler = _scheduler(
        {"s": session}, {"s": SimpleNamespace(kv=kv), "empty": SimpleNamespace(kv=_kv(None))},
        running=[turn, plain], launched=[plain], waiting=[waiting], chunked=chunked,
    )
    names, rows = snapshot.list_rows(scheduler)
    assert names == ["s"], "the named sessions"
    assert [row.row_index for row in rows] == [1, 2, 3], "rows"
    assert [row.holder_number for row in rows] == [0, 1, 2], "who holds them"


def test_there_is_no_snapshot_while_a_beam_search_runs() -> None:
    scheduler = _scheduler({}, {}, running=[_request(_kv(1), beam=object())])
    try:
        snapshot.take_snapshot(scheduler)
    except snapshot.AuditError as error:
        assert "beam" in str(error), error
    else:
        raise AssertionError("rows without a request were left out of a snapshot")
