"""Takes the agent's place for the process that tokenizes: hears its plans, answers its questions.

The process reports each plan before the engine gets the turn. The listener is written from the
protocol's table in `worker-agent/src/shim/codec.rs`, and shares no code with the shim.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

VERSION = 9
# The `tokens_max` of a prompt that isn't bounded.
ROOM = 1 << 20


@dataclass(frozen=True)
class Plan:
    """The plan for one full prompt. A question is followed by the final plan."""

    # The question's number; None in a final plan.
    question: int | None
    plan: str
    at: int
    committed: int
    sent: int
    prompt: int
    session: str
    rid: str
    why: str


class TrimListener:
    """Listens at the path, for one connection at a time. A question is answered with the session
    that `answer` returns for its plan, and with `tokens_max`. If `answer` returns None, the
    question gets no answer."""

    def __init__(self, path: Path, answer: Callable[[Plan], str | None] = lambda plan: ""):
        self.answer, self.tokens_max = answer, ROOM
        self.inert: str | None = None
        self._plans: list[Plan] = []
        self._changed = threading.Condition()
        path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen(1)
        self._connection: socket.socket | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listening.close()
        if self._connection is not None:
            self._connection.close()

    def connected(self, seconds: float = 60) -> str:
        """Waits for the hello. Returns the reason why nothing is trimmed, empty if there is
        none."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.inert is not None, seconds), "no hello"
            return self.inert

    def count(self, name: str) -> int:
        """Returns the number of final plans of this session or request so far."""
        with self._changed:
            return len(self._matching(name, questions=False))

    def plans(self, name: str, more_than: int = 0, seconds: float = 60) -> list[Plan]:
        """Waits until this session or request has more final plans than so many. Returns all of
        them, oldest first."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                found = self._matching(name, questions=False)
                if len(found) > more_than:
                    return found
                left = deadline - time.monotonic()
                assert self._changed.wait(left) if left > 0 else False, f"no plan of {name}"

    def questions(self, name: str) -> list[Plan]:
        """Returns all questions of this session or request so far."""
        with self._changed:
            return self._matching(name, questions=True)

    def _matching(self, name: str, questions: bool) -> list[Plan]:
        named = [plan for plan in self._plans if name in (plan.session, plan.rid)]
        return [plan for plan in named if (plan.question is not None) == questions]

    def _run(self) -> None:
        try:
            while True:
                self._connection, _ = self._listening.accept()
                self._read(self._connection)
        except OSError:
            pass  # Closed.

    def _read(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        while head := stream.read(4):
            frame = stream.read(struct.unpack("<I", head)[0])
            assert frame[0] == VERSION, f"the trimmer speaks version {frame[0]}"
            name, *fields = msgspec.msgpack.decode(frame[1:])
            if name == "Trimmer":
                with self._changed:
                    self.inert = fields[-1] or ""
                    self._changed.notify_all()
                continue
            assert name == "Planned", f"the trimmer sends the message {name}"
            plan = Plan(*fields)
            with self._changed:
                self._plans.append(plan)
                self._changed.notify_all()
            if plan.question is not None and (session := self.answer(plan)) is not None:
                run = msgspec.msgpack.encode(
                    ["Run", plan.question, self.tokens_max, session or None]
                )
                connection.sendall(struct.pack("<IB", 1 + len(run), VERSION) + run)
