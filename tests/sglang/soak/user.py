"""A client of the soak, with one pinned and one tagged session at a time.

This file has what a client does about a refusal; `operations` has what it does with its sessions.
"""

import itertools
import random
import time
from collections.abc import Iterator

from integration.wire import Stream
from soak import tokens, wire
from soak.targets import Target
from soak.engine import Engine
from soak.oracle import Turn
from soak.report import Report
from soak.session import ClientSession
from soak.wire import Reply

# A session with more history is replaced by a new one, so that eight rows of sessions stay near the
# pin budget.
HISTORY_TOKENS_MAX = 400
DELTA_TOKENS_MAX = 60
ANSWER_TOKENS = (4, 60)
# Seconds for which a client waits for the end of a turn that it left.
BUSY_SECONDS_MAX = 60
BUSY_AGAIN_SECONDS = 0.1
# A client repeats a request once if there was no room for it; then it does something else.
FULL_AGAIN = 1
FULL_AGAIN_SECONDS_MAX = 1.0
ATTEMPTS_MAX = 6
KNOWN_SECONDS_MAX = 60
# The share of sessions that their first turn opens, without an open beforehand.
OPENED_BY_TURN_RATIO = 0.3

# The session is gone, or its history is: the client opens it again and sends everything.
REOPEN = {"session_unknown", "session_lost", "session_reclaimed", "history_unknown"}


class User:
    def __init__(self, number: int, seed: int, target: Target, engine: Engine, report: Report):
        self.name = f"soak-{target.name}-{seed}-{number}"
        self.target = target
        self.report = report
        self.turns: list[Turn] = []
        self.chance = random.Random(f"{seed} user {number}")
        self.pinned: ClientSession | None = None
        self.tagged: ClientSession | None = None
        self._engine = engine
        self._number = number
        self._sessions = 0

    def new_session(self, idle_seconds: float | None = None) -> ClientSession:
        self._sessions += 1
        return ClientSession(f"{self.name}-{self._sessions}", idle_seconds)

    def new_tokens(
        self, session: ClientSession, most: int = DELTA_TOKENS_MAX
    ) -> tuple[list[int], bool]:
        """Returns new tokens, and whether they can be sent as a text."""
        count = self.chance.randint(1, most)
        as_text = self.chance.random() < 0.5
        said = (tokens.readable if as_text else tokens.ids)(self.chance, count)
        if not session.history:
            # Users' sessions must not share a prefix: they would share its pages, and the ledger
            # couldn't be exact.
            said[0] = self._number
        return said, as_text

    def body(self, ids: list[int], count: int, as_text: bool) -> dict:
        said = {"text": tokens.text(ids)} if as_text else {"input_ids": ids}
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        return {**said, "sampling_params": sampling, "return_logprob": True}

    def report_broken(self, operation: str, text: str) -> None:
        """Reports something that Berth promises not to happen. Without Berth it is only counted."""
        if self.target.guarded:
            self.report.problem(f"{self.name}: {operation}: {text}")
        else:
            self.report.count(operation, "not as promised")

    # ---- one pinned turn

    def build_call(
        self, session: ClientSession, delta: list[int], count: int, as_text: bool = False
    ) -> wire.Call:
        unsent = session.unsent(delta)
        body = self.body(unsent, count, as_text and len(unsent) == len(delta))
        return self.target.pinned(self.chance, session, body)

    def send_turn(
        self, session: ClientSession, delta: list[int], count: int, as_text: bool = False
    ) -> Reply:
        """Sends one turn, streamed or not, and reads its answer to the end."""
        call = self.build_call(session, delta, count, as_text)
        if self.chance.random() < 0.5:
            return wire.post(call, self.target.turn_seconds)
        stream = wire.stream(call, self.target.turn_seconds)
        if stream.status != 200:
            return wire.read(stream.status, stream.rest())
        return wire.read_to_end(stream, stream.events())

    def start_stream(
        self,
        operation: str,
        session: ClientSession,
        delta: list[int],
        count: int,
        small_buffer: bool = False,
    ) -> tuple[Stream, Iterator[str]] | None:
        """Starts a streamed turn and reads its first event. Returns None if the turn was
        refused."""
        call = self.build_call(session, delta, count)
        stream = wire.stream(call, self.target.turn_seconds, small_buffer)
        if stream.status != 200:
            reply = wire.read(stream.status, stream.rest())
            self.report.count(operation, reply.outcome)
            self.handle_refusal(operation, session, reply)
            return None
        events = stream.events()
        first = next(events, "{}")
        reply = wire.read(stream.status, first.encode())
        if reply.aborted:
            stream.close()
            self.report.count(operation, reply.outcome)
            self.handle_refusal(operation, session, reply)
            return None
        return stream, itertools.chain([first], events)

    def finish_turn(
        self, operation: str, session: ClientSession, delta: list[int], reply: Reply
    ) -> bool:
        """Adds a finished turn to the transcript. Returns whether it was appended to the right
        history."""
        if not reply.finished:
            self.report.count(operation, reply.outcome)
            self.handle_refusal(operation, session, reply)
            return False
        kept = session.kept(delta, reply.prompt_tokens)
        if kept is None:
            self.report.count(operation, "on a wrong context")
            self.report.problem(
                f"{session.id}, {operation}: answered a prompt of {reply.prompt_tokens} tokens, "
                f"its client's is {len(session.history)} and {len(delta)} new ones "
                f"(abandoned: {session.abandoned})"
            )
            self.give_up(session)
            return False
        if kept:
            # The client never got that answer. It must have been what the engine answers to the
            # same context alone.
            left = session.abandoned
            self.report.count("a turn that was left", "kept")
            lost = self._engine.greedy(session.history + left.delta, left.tokens)
            session.add(operation, left.delta, lost.output, lost.logprobs)
        turn = session.add(operation, delta, list(reply.output), list(reply.logprobs))
        self.turns.append(turn)
        self.report.count(operation, reply.outcome)
        return True

    def handle_refusal(self, operation: str, session: ClientSession, reply: Reply) -> float | None:
        """Does what a client does about a refusal. Returns the seconds to wait before the next
        attempt, or None if there is none."""
        if reply.code in REOPEN:
            self.target.close(session.id)
            session.reopen()
            return 0.0
        if reply.code == "session_closing":
            return BUSY_AGAIN_SECONDS
        if reply.code == "session_busy" or (not self.target.guarded and reply.status == 400):
            if session.abandoned:
                return BUSY_AGAIN_SECONDS
            self.report_broken(operation, f"busy for no reason: {reply.outcome} {reply.message}")
            return None
        if reply.code and reply.status in (429, 503):
            # A refused turn hasn't opened the session that it was to open.
            session.open = session.open and not (session.opened_by_turn and not session.sent)
            return None
        problem = f"an answer that nothing allows: {reply.outcome} {reply.message}"
        self.report_broken(operation, problem)
        self.give_up(session)
        return None

    def give_up(self, session: ClientSession) -> None:
        """Closes a session that its client no longer needs."""
        self.target.close(session.id)
        session.open = False
        if session is self.pinned:
            self.pinned = None

    def ensure_open(self, operation: str, session: ClientSession) -> bool:
        """Opens a session if it isn't open, with a second attempt if there was no room. Returns
        whether it is open."""
        for attempt in range(FULL_AGAIN + 1):
            may_open = not session.open and self.target.guarded
            if may_open and self.chance.random() < OPENED_BY_TURN_RATIO:
                session.open = session.opened_by_turn = True
            if session.open:
                return True
            session.opened_by_turn = False
            reply = self.target.open(session)
            self.report.count("open", str(reply.outcome if reply.status >= 300 else "opened"))
            if reply.status < 300:
                session.open = True
                if reply.status == 201:
                    # The session is a new one, so it has none of the history.
                    session.sent = 0
            elif reply.code and reply.status in (409, 429, 503):
                time.sleep(FULL_AGAIN_SECONDS_MAX if attempt < FULL_AGAIN else 0)
            else:
                self.report_broken(operation, f"an open: {reply.outcome} {reply.message}")
                return False
        return session.open

    def run_turn(self, operation: str, session: ClientSession) -> bool:
        """Runs a turn of a pinned session, with everything that a client does to get it through.
        Returns whether the turn finished."""
        delta, as_text = self.new_tokens(session)
        count = self.chance.randint(*ANSWER_TOKENS)
        deadline = time.monotonic() + BUSY_SECONDS_MAX
        full = 0
        for _ in range(ATTEMPTS_MAX + int(BUSY_SECONDS_MAX / BUSY_AGAIN_SECONDS)):
            if not self.ensure_open(operation, session):
                self.report.count(operation, "no session")
                return False
            opens = session.opened_by_turn and not session.sent
            reply = self.send_turn(session, delta, count, as_text)
            if reply.finished:
                done = self.finish_turn(operation, session, delta, reply)
                return done and (not opens or self._wait_until_known(operation, session))
            self.report.count(operation, reply.outcome)
            if reply.status == 429 and full < FULL_AGAIN:
                full += 1
                time.sleep(FULL_AGAIN_SECONDS_MAX)
                continue
            wait = self.handle_refusal(operation, session, reply)
            if wait is None:
                # Room would never come free if every client kept its session while it waits.
                self.give_up(session)
                return False
            if time.monotonic() > deadline:
                self.report_broken(operation, f"still {reply.outcome} after {BUSY_SECONDS_MAX} s")
                break
            time.sleep(wait)
        self.give_up(session)
        return False

    def _wait_until_known(self, operation: str, session: ClientSession) -> bool:
        """Waits until the router has heard of a session that was opened directly at the agent.
        The router doesn't ask the agent about sessions it doesn't know, so until then a close
        would find nothing."""
        # A session with an idle limit may be closed before the router is asked for it.
        patience = KNOWN_SECONDS_MAX if session.idle_seconds is None else session.idle_seconds + 1
        deadline = time.monotonic() + patience
        while not self.target.is_there(session.id):
            if time.monotonic() > deadline:
                if session.idle_seconds is not None:
                    return True
                problem = "the router doesn't hear of a session that was opened"
                self.report_broken(operation, problem)
                return False
            time.sleep(0.02)
        return True

    def ready_session(self, operation: str) -> ClientSession | None:
        """Returns the user's pinned session, open and in a state that its client is sure of."""
        if self.pinned and len(self.pinned.history) > HISTORY_TOKENS_MAX:
            self.give_up(self.pinned)
        session = self.pinned = self.pinned or self.new_session()
        if not self.ensure_open(operation, session):
            self.report.count(operation, "no session")
            return None
        if session.opened_by_turn and not session.sent:
            return session if self.run_turn("turn that opens", session) else None
        settled = not session.abandoned and session.sent == len(session.history)
        return session if settled or self.run_turn("turn to find out", session) else None

    def close_all(self) -> None:
        for session in (self.pinned, self.tagged):
            if session:
                self.target.close(session.id)
        self.pinned = self.tagged = None
