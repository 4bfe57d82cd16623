"""Tests with the shim: an exact ledger, confirmed closes, idle sessions that give up their KV.

An idle session keeps its history. The suite's other tests run the agent without the shim's
connection, on its slower sources. Each test here restarts the agent on the socket where the
engine's shim looks for it, and afterwards without it.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from integration import wire
from integration.fleet import POOL_TOKENS, SETTLE_SECONDS_MAX, Fleet
from integration.ledger import wait_figures
from integration.processes import wait_until
from integration.routes import send
from integration.seams import written
from integration.shim import Direct, text_of
from integration.turns import (
    Pinned, Turn, chat_body, delete_session, finished_turn, generate_at_engine, new_id,
    wait_session,
)

CLOSES = 200


@contextmanager
def with_shim(fleet: Fleet, settings: str = "") -> Iterator[None]:
    """Connects the agent to the shim, with nothing in the pool."""
    assert fleet.wait_pool(0) == 0, "what the tests before have left in the pool"
    fleet.restart_agent(settings=f'files.shim_socket = "{fleet.shim_socket}"\n{settings}')
    try:
        wait_until(fleet.agent, "hearing from the shim", lambda: by_shim(fleet), SETTLE_SECONDS_MAX)
        yield
    finally:
        fleet.restart_agent()


def by_shim(fleet: Fleet) -> bool:
    load = wire.get(f"{fleet.router_url}/v1/workers").json()["workers"][0]["load"]
    used = (load or {}).get("pool_used_tokens") or {}
    return used.get("source") == "shim"


def test_shared_prefixes_count_once(fleet: Fleet) -> None:
    with with_shim(fleet):
        sessions = [Pinned(fleet) for _ in range(3)]
        for number, session in enumerate(sessions):
            session.turn("The same beginning of all of them. " * 3 + str(number), 10)
        used = fleet.pool_at_rest()
        alone = sum(-(-written(len(s.history)) // fleet.page_size) for s in sessions)
        assert 0 < used < alone * fleet.page_size, f"{used} tokens used: nothing is shared"
        wait_figures(fleet, {"pinned_tokens": used, "pool_used_tokens": used, "rows_held": 3})
        for session in sessions:
            session.close()
        wait_figures(fleet, {"pinned_tokens": 0, "pool_used_tokens": 0, "rows_held": 0})


def test_sessions_of_others_are_seen(fleet: Fleet) -> None:
    with with_shim(fleet):
        with Direct(fleet) as foreign:
            foreign.turn(text_of(40), 20)
            pages = -(-written(60) // fleet.page_size) * fleet.page_size
            wait_figures(fleet, {"foreign_tokens": pages, "pinned_tokens": pages, "rows_held": 1})
        wait_figures(fleet, {"foreign_tokens": 0, "pinned_tokens": 0, "rows_held": 0})


@pytest.mark.needs("demotion")
def test_an_idle_session_gives_its_kv_up_and_keeps_its_history(fleet: Fleet) -> None:
    budget = 800 / POOL_TOKENS
    with with_shim(fleet, f"sessions.demote_idle_ms = 1\nsessions.pin_budget_ratio = {budget}\n"):
        idle, other = Pinned(fleet), Pinned(fleet)
        idle.turn(text_of(400), 20)
        other.turn(text_of(500), 20)
        wait_session(fleet, idle.id, "state", "demoted")
        wait_figures(fleet, {"rows_held": 1})
        time.sleep(0.01)
        # Now the other session has to give up its KV.
        text = " Where were we?"
        turn = finished_turn(wire.post(f"{fleet.router_url}/generate", {
            "text": text, "session_params": {"id": idle.id},
            "sampling_params": {"max_new_tokens": 10, "temperature": 0, "ignore_eos": True},
        }))
        whole = idle.history + text
        assert turn.prompt_tokens == len(whole), "prompt tokens: the full history"
        pages = written(len(idle.history)) // fleet.page_size * fleet.page_size
        assert turn.cached_tokens == pages, (
            "cached tokens: the history's whole pages, from the tree"
        )
        _same_answer(fleet, whole, turn)
        wait_session(fleet, other.id, "state", "demoted")
        for session in (idle, other):
            session.close()


def test_a_session_gives_its_kv_up_when_its_owner_asks(fleet: Fleet) -> None:
    with with_shim(fleet):
        session = Pinned(fleet)
        session.turn(text_of(400), 20)
        wait_figures(fleet, {"rows_held": 1})
        url = f"{fleet.router_url}/v1/sessions/{session.id}/demote"
        for _ in range(2):
            assert wire.post(url, {}).status == 204, "the demotion, and its repetition"
        wait_session(fleet, session.id, "state", "demoted")
        wait_figures(fleet, {"pinned_tokens": 0, "rows_held": 0})
        text = " Where were we?"
        turn = finished_turn(wire.post(f"{fleet.router_url}/generate", {
            "text": text, "session_params": {"id": session.id},
            "sampling_params": {"max_new_tokens": 10, "temperature": 0, "ignore_eos": True},
        }))
        whole = session.history + text
        assert turn.prompt_tokens == len(whole), "prompt tokens: the full history"
        pages = written(len(session.history)) // fleet.page_size * fleet.page_size
        assert turn.cached_tokens == pages, "cached tokens: the history's whole pages"
        wait_figures(fleet, {"rows_held": 1})
        _same_answer(fleet, whole, turn)
        session.close()


def _same_answer(fleet: Fleet, whole: str, turn: Turn) -> None:
    alone = generate_at_engine(fleet, whole, turn.completion_tokens)
    assert turn.output_ids == alone.output_ids, "the answer to the full history"


def test_what_is_closed_is_free_at_once(fleet: Fleet) -> None:
    with with_shim(fleet):
        before = _closes(fleet)
        for _ in range(CLOSES):
            session = Pinned(fleet)
            session.turn("Short.", 4)
            session.close()
        assert fleet.wait_pool(0) == 0, "tokens held by closed sessions"

        def confirmed() -> int:
            after = _closes(fleet)
            counts.update({limit: after[limit] - before.get(limit, 0) for limit in after})
            return counts.get(float("inf"), 0)

        counts: dict[float, int] = {}
        # The engine has closed all sessions; the shim's last confirmations may still be on the way.
        wait_until(
            fleet.agent, "told of its closes", lambda: confirmed() >= CLOSES, SETTLE_SECONDS_MAX
        )
        assert counts[float("inf")] == CLOSES, "closes that were confirmed"
        shown = ", ".join(f"p{share} within {_within(counts, share) * 1000:.1f} ms" for share in (50, 99))
        print(f"    {CLOSES} closes: {shown}", flush=True)


def _closes(fleet: Fleet) -> dict[float, int]:
    """The number of closes by the most seconds they took, by the agent's own account."""
    text = wire.get(f"http://{fleet.agent_admin}/metrics").body.decode()
    found = re.findall(r'berth_agent_close_seconds_bucket\{le="([^"]+)"\} (\d+)', text)
    return {float(limit.replace("+Inf", "inf")): int(count) for limit, count in found}


def _within(counts: dict[float, int], share: int) -> float:
    """Returns the smallest bound in seconds that this percentage of the closes kept."""
    needed = counts[float("inf")] * share / 100
    return min(limit for limit, count in counts.items() if count >= needed)


def test_kv_of_a_tagged_session_is_evicted_last_on_the_route_of_messages(fleet: Fleet) -> None:
    """The route's body can't name a session: the shim gives the turn its tag."""

    def ask(**headers: str) -> dict:
        body = chat_body(text_of(1200), 1)
        answer = wire.post(f"{fleet.router_url}/v1/messages", body, headers)
        assert answer.status == 200, f"the turn: {answer}"
        assert answer.headers.get("x-berth-session-turn") == ("tagged" if headers else None)
        return body

    def cached(body: dict) -> int:
        return send(fleet.engine_url, "messages", body).cached_tokens

    with with_shim(fleet):
        id = new_id("messages")
        named = ask(**{"x-berth-session-id": id, "x-berth-retention": "tagged"})
        unnamed = ask()
        for _ in range(POOL_TOKENS // 1200):
            generate_at_engine(fleet, text_of(1200), 1)
        assert cached(unnamed) < 100, "nothing was evicted"
        assert cached(named) >= 1200, "the tagged session's KV was evicted"
        # What is closed has no claim any more.
        assert delete_session(fleet, id).status == 204, "the status of the close"
        for _ in range(POOL_TOKENS // 1200 + 3):
            generate_at_engine(fleet, text_of(1200), 1)
        assert cached(named) < 100, "the tag outlives its session"
