"""Helpers for tests of a takeover: an agent behind a tap, its journal, the engine's sessions."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration import wire
from integration.fleet import ROWS, WORKER, Fleet
from integration.ledger import wait_figures
from integration.listener import Listener, Session
from integration.processes import wait_until
from integration.tap import Hold, Tap
from integration.turns import Pinned, refusal_code

# Shorter than the turn that a takeover must cut short.
TAKEOVER_SECONDS_MAX = 25
# The beginning of the engine-side ids of the suite's agents.
OURS = f"berth-{WORKER}-"


def journalled_sessions(journal: Path) -> list[str]:
    """The engine-side ids that the journal doesn't record as closed, in the order of their opens."""
    # A dict without values, as it keeps the order.
    found: dict[str, None] = {}
    engine = ""
    for line in journal.read_text().splitlines():
        kind, id = line.split(" ")[:2]
        if kind == "engine" and id != engine:
            engine, found = id, {}
        elif kind == "opening":
            found[id] = None
        elif kind == "closed":
            found.pop(id, None)
    return list(found)


@dataclass
class Succession:
    """An agent and its successors. They serve the same engine, so they share a journal."""

    fleet: Fleet
    tap: Tap
    listener: Listener
    _clients: ThreadPoolExecutor

    @property
    def journal(self) -> Path:
        return self.fleet.journal(self.tap.url)

    def left_open(self) -> set[str]:
        return set(journalled_sessions(self.journal))

    def engine_sessions(self) -> dict[str, Session]:
        """The sessions inside the engine now, by the engine's own account."""
        return dict(self.listener.resync().sessions)

    def client(self, work: Callable[..., Any], *arguments: Any, **more: Any) -> Future:
        """Runs the function in a thread of its own."""
        return self._clients.submit(work, *arguments, **more)

    def open(self) -> Future:
        request = {"retention": "pinned"}
        return self.client(wire.post, f"{self.fleet.router_url}/v1/sessions", request)

    def kill_agent(self, hold: Hold | None = None, journalled: int = 1, inside: int = 1) -> None:
        """Kills the agent. The message that `hold` keeps never arrives. Checks that exactly so
        many sessions are left in the journal and inside the engine: with fewer, the test would
        show nothing."""
        if hold:
            hold.wait()
        self.fleet.kill_agent()
        if hold:
            hold.drop()
        assert len(self.left_open()) == journalled, "sessions that the journal has as open"
        self._wait_inside(inside)

    def start(self) -> None:
        """Starts the next agent."""
        self.fleet.start_agent(self.tap.url)

    def finish(self) -> None:
        """Waits until the next agent has nothing left to close, and checks that the engine
        agrees."""
        agent = self.fleet.agent
        wait_until(agent, "done", lambda: not self.left_open(), TAKEOVER_SECONDS_MAX)
        self._wait_inside(0)

    def _wait_inside(self, count: int) -> None:
        """Waits until so many sessions are inside the engine, which closes one after its answer."""
        self.engine_sessions()
        self.listener.wait(
            f"{count} sessions inside the engine", lambda state: len(state.sessions) == count
        )

    def check_all_free(self) -> None:
        """Checks that engine and agent agree that nothing is held, and that sessions work."""
        self._check_nothing_held()
        self.fleet.wait_placing()
        session = Pinned(self.fleet)
        session.turn("Is anybody here?", 10)
        session.turn(" Again?", 10)
        assert len(self.engine_sessions()) == 1, "sessions inside the engine while one is open"
        session.close()
        self._check_nothing_held()

    def take_over(self) -> None:
        self.start()
        self.finish()
        self.check_all_free()

    def _check_nothing_held(self) -> None:
        assert self.fleet.wait_pool(0) == 0, "tokens held, by the engine's /v1/loads"
        self.listener.wait("free rows", lambda state: state.head.rows_free == ROWS)
        self.fleet.wait_placing()
        wait_figures(self.fleet, {"pinned_tokens": 0, "rows_held": 0, "pool_used_tokens": 0})


@contextmanager
def succession(fleet: Fleet) -> Iterator[Succession]:
    """Puts the agent behind a tap, with no session in the engine."""
    assert fleet.wait_pool(0) == 0, "what the tests before have left in the pool"
    tap = Tap(fleet.engine_url)
    try:
        with Listener(fleet.shim_socket) as listener, ThreadPoolExecutor() as clients:
            fleet.restart_agent(tap.url)
            listener.connected()
            agents = Succession(fleet, tap, listener, clients)
            assert agents.engine_sessions() == {}, "sessions inside the engine before the test"
            try:
                yield agents
            finally:
                tap.let_all_go()
                # Sessions that a takeover left open must not make another test fail.
                for id in list(listener.state.sessions):
                    if id.startswith(OURS):
                        wire.post(f"{fleet.engine_url}/close_session", {"session_id": id})
    finally:
        fleet.restart_agent()
        tap.close()


def check_cut_off(answer: Future) -> None:
    """Checks that the client of a request that the agent's end cut off gets a refusal by Berth,
    and nothing from the engine."""
    answer = answer.result()
    refusal_code(answer, answer.status, "what the agent's end cut off")
    assert answer.status in (502, 503), f"the status of what the agent's end cut off: {answer}"


def agent_figure(fleet: Fleet, name: str) -> int:
    """Returns a figure of the agent's own account. The router may not have heard of it yet."""
    text = wire.get(f"http://{fleet.agent_admin}/metrics").body.decode()
    found = re.search(rf'^berth_agent_{name}{{.*}} (\d+)$', text, re.MULTILINE)
    return int(found[1]) if found else 0
