"""A planned restart of the agent keeps the pinned sessions, with their KV in the engine."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from integration import wire
from integration.fleet import Fleet
from integration.processes import wait_until
from integration.succession import journalled_sessions
from integration.turns import Pinned, Turn, body, finished_turn, last_turn, refusal_code
from integration.with_shim import with_shim

SETTINGS = "shutdown.handover = true\n"
# The first turn after a restart waits for the new agent, its engine and the shim's report.
BACK_SECONDS_MAX = 30
RETRY_SECONDS_MAX = 3
TOKENS = 10
# Turns of each client before, between and after the restarts under load.
TURNS_BETWEEN = 5


def restart(fleet: Fleet) -> None:
    """Restarts the agent as a service manager does. Turns don't get through yet."""
    status = fleet.stop_agent()
    assert status == 0, f"the agent's exit status: {status}\n{fleet.agent.log_tail()}"
    fleet.start_agent(settings=f'files.shim_socket = "{fleet.shim_socket}"\n{SETTINGS}')


@dataclass
class Client:
    """A client that repeats a refused turn when the refusal says so."""

    fleet: Fleet
    is_streaming: bool = False
    turns: int = 0
    refusals: int = 0
    # The longest time from sending a turn that was refused to its answer.
    outage_seconds: float = 0.0

    def send(self, text: str, **more: object) -> wire.Stream:
        """Sends a turn until it is not refused with 503. Returns its answer, which may still be
        arriving."""
        request = body(text, TOKENS, stream=self.is_streaming, **more)
        begin, refusals = time.monotonic(), self.refusals
        while (stream := wire.stream(f"{self.fleet.router_url}/generate", request)).status == 503:
            self.refusals += 1
            refusal = f"{stream.headers} {stream.rest()!r}"
            pause = int(stream.headers.get("retry-after", RETRY_SECONDS_MAX + 1))
            assert 0 < pause <= RETRY_SECONDS_MAX, f"the time to wait in {refusal}"
            assert time.monotonic() < begin + BACK_SECONDS_MAX, f"still {refusal}"
            time.sleep(pause)
        if self.refusals > refusals:
            self.outage_seconds = max(self.outage_seconds, time.monotonic() - begin)
        return stream

    def turn(self, text: str, **more: object) -> Turn:
        """Sends a turn until it is answered."""
        stream = self.send(text, **more)
        turn = last_turn(stream) if self.is_streaming else finished_turn(whole(stream))
        self.turns += 1
        return turn

    def work_in_session(self, session: Pinned, stop: threading.Event) -> None:
        """Sends turns of a pinned session, and checks each."""
        while not stop.is_set():
            text = f" {self.turns}?"
            session.check(text, TOKENS, self.turn(text, session_params={"id": session.id}))

    def work(self, prompt: str, stop: threading.Event) -> None:
        """Sends the same plain turn again and again. Its answer must stay the same."""
        first = self.turn(prompt)
        while not stop.is_set():
            assert self.turn(prompt).text == first.text, "the answer"


def whole(stream: wire.Stream) -> wire.Answer:
    return wire.Answer(stream.status, stream.headers, stream.rest(), 0)


def next_answer(fleet: Fleet, session: Pinned, text: str) -> wire.Answer:
    """Sends the session's next turn until it is answered. Before that, only refusals that say when
    to try again may come."""
    return whole(Client(fleet).send(text, session_params={"id": session.id}))


@contextmanager
def clients_at_work(fleet: Fleet, sessions: list[Pinned]) -> Iterator[list[Client]]:
    """Lets a client work in each session, and as many send plain turns. Every second client
    streams. A client that fails, fails the test."""
    clients = [Client(fleet, number % 2 == 1) for number in range(2 * len(sessions))]
    stop = threading.Event()
    with ThreadPoolExecutor(len(clients)) as threads:
        half = len(sessions)
        working = [
            threads.submit(client.work_in_session, session, stop)
            for client, session in zip(clients[:half], sessions)
        ] + [
            threads.submit(client.work, f"The plain turns of client {number}.", stop)
            for number, client in enumerate(clients[half:])
        ]
        try:
            yield clients
        finally:
            stop.set()
            # A client's error says more than that its answers are missing.
            for work in working:
                work.result()


def wait_turns(fleet: Fleet, clients: list[Client]) -> None:
    """Waits until each client has got more answers."""
    enough = [client.turns + TURNS_BETWEEN for client in clients]

    def have_enough() -> bool:
        return all(client.turns >= turns for client, turns in zip(clients, enough))

    wait_until(fleet.router, "answering all clients", have_enough, 2 * BACK_SECONDS_MAX)


def test_pinned_sessions_go_on_with_their_kv(fleet: Fleet) -> None:
    with with_shim(fleet, SETTINGS):
        sessions = [Pinned(fleet) for _ in range(3)]
        for number, session in enumerate(sessions):
            session.turn(f"Keep the number {number} in mind. " * 5, 20)
        for text in (" And now?", " Again?"):
            restart(fleet)
            for session in sessions:
                # This compares the cached tokens, and the answer with that to the full history.
                session.check(text, TOKENS, finished_turn(next_answer(fleet, session, text)))
        for session in sessions:
            session.close()
        assert fleet.wait_pool(0) == 0, "tokens held after the closes"


def test_an_upgrade_under_load_fails_no_turn(fleet: Fleet) -> None:
    with with_shim(fleet, SETTINGS):
        sessions = [Pinned(fleet) for _ in range(3)]
        for session in sessions:
            session.turn("Keep this in mind. " * 5, 20)
        with clients_at_work(fleet, sessions) as clients:
            wait_turns(fleet, clients)
            for _ in range(2):
                restart(fleet)
                wait_turns(fleet, clients)
        turns = sum(client.turns for client in clients)
        refusals = sum(client.refusals for client in clients)
        outage = max(client.outage_seconds for client in clients)
        print(f"    {turns} turns, {refusals} refusals, {outage:.2f} s at most without service")
        assert refusals, "no turn came while the agent was away, so the test shows nothing"
        for session in sessions:
            session.close()
        assert fleet.wait_pool(0) == 0, "tokens held after the closes"


def test_a_session_that_changed_meanwhile_is_lost(fleet: Fleet) -> None:
    with with_shim(fleet, SETTINGS):
        changed, kept = Pinned(fleet), Pinned(fleet)
        [incarnation, _] = journalled_sessions(fleet.journal(fleet.engine_url))
        changed.turn("Keep this in mind. " * 5, 20)
        kept.turn("Keep that in mind. " * 5, 20)
        assert fleet.stop_agent() == 0, "the agent's exit status"
        meddling = body("!", 1, session_params={"id": incarnation})
        assert wire.post(f"{fleet.engine_url}/generate", meddling).status == 200, "the meddler"
        fleet.start_agent(settings=f'files.shim_socket = "{fleet.shim_socket}"\n{SETTINGS}')
        code = refusal_code(next_answer(fleet, changed, " And now?"), 409, "the changed session")
        assert code == "session_lost", "the code"
        kept.check(" And now?", TOKENS, finished_turn(next_answer(fleet, kept, " And now?")))
        changed.close()
        kept.close()
        assert fleet.wait_pool(0) == 0, "tokens held after the closes"
