"""The engine under test, real or simulated, as the tests see it.

All requests go over HTTP. Only `launch` and the listed differences depend on which of the two
engines it is.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.differences import Difference
from conformance.groups import Group
from integration import wire
from integration.fleet import ENGINE_START_SECONDS_MAX, launch_engine
from integration.processes import Process, answers_200, wait_until
from integration.turns import new_id

WAIT_SECONDS_MAX = 60
# Ports of each engine: HTTP, KV events, and the replay of KV events.
PORTS = 3
# Ports of a pair: those of both engines, and the bootstrap server's.
PAIR_PORTS = 2 * PORTS + 1


def ids(count: int, salt: int) -> list[int]:
    """Returns a prompt of `count` token ids. Prompts of different salts (below 250) differ in
    their first token, so they share no prefix."""
    return [(salt * 37 + place * 7) % 250 for place in range(count)]


def sampling(tokens: int, **more: Any) -> dict:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def body(prompt: list[int], tokens: int, session: str | None = None, **more: Any) -> dict:
    """Returns a `/generate` request; `session` is the id of the streaming session it belongs to."""
    request = {"input_ids": prompt, "sampling_params": sampling(tokens), **more}
    if session is not None:
        request["session_params"] = {"id": session}
    return request


@dataclass(frozen=True)
class Reply:
    """An answer of `/generate`: the complete one, or the last event of a stream."""

    status: int
    body: Any

    @classmethod
    def from_answer(cls, answer: wire.Answer) -> "Reply":
        try:
            return cls(answer.status, answer.json())
        except ValueError:
            return cls(answer.status, answer.body.decode())

    @property
    def meta(self) -> dict:
        assert isinstance(self.body, dict) and "meta_info" in self.body, f"not a turn: {self}"
        return self.body["meta_info"]

    @property
    def prompt(self) -> int:
        return self.meta["prompt_tokens"]

    @property
    def cached(self) -> int:
        return self.meta["cached_tokens"]

    @property
    def completion(self) -> int:
        return self.meta["completion_tokens"]

    @property
    def output(self) -> list[int]:
        return self.body["output_ids"]

    @property
    def finish(self) -> dict:
        return self.meta["finish_reason"]

    @property
    def error(self) -> str:
        """The message of a refusal in the engine's plain form, `{"error": {"message": …}}`."""
        assert isinstance(self.body, dict) and set(self.body) == {"error"}, f"no refusal: {self}"
        return self.body["error"]["message"]

    def good(self) -> "Reply":
        assert self.status == 200, f"the status of {self}"
        assert self.finish["type"] != "abort", f"aborted: {self}"
        return self

    def __str__(self) -> str:
        return f"{self.status} {json.dumps(self.body)[:300]}"


class Flow:
    """A streamed turn whose answer is still arriving."""

    def __init__(self, stream: wire.Stream):
        assert stream.status == 200, "the stream's status"
        self._stream = stream
        self._events = stream.events()
        self._last = ""

    def first(self) -> Reply:
        """Waits for the first event and returns it; from then on the turn runs."""
        self._last = next(self._events)
        return self._reply(self._last)

    def end(self) -> Reply:
        """Reads the stream to its end, which must be `[DONE]`. Returns the last event before it."""
        events = list(self._events)
        assert events and events[-1] == "[DONE]", f"no [DONE]: {events[-1:]}"
        # A server that was held up may put all tokens into its first event.
        last = events[-2] if len(events) > 1 else self._last
        assert last, "no event before [DONE]"
        return self._reply(last)

    def rest(self) -> list[str]:
        """Returns the remaining events, whether the stream ends with `[DONE]` or is cut off."""
        events = []
        try:
            events.extend(self._events)
        except OSError:
            pass
        return events

    def vanish(self) -> None:
        self._stream.vanish()

    def _reply(self, event: str) -> Reply:
        return Reply(self._stream.status, json.loads(event))


class Pending:
    """A turn that isn't streamed; a thread of its own waits for the answer."""

    def __init__(self, call: Callable[[], Reply]):
        self._reply: Reply | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Reply]) -> None:
        try:
            self._reply = call()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def end(self, seconds: float = 60) -> Reply:
        self._thread.join(seconds)
        assert self.done(), f"no answer within {seconds} s"
        if self._error:
            raise self._error
        assert self._reply is not None
        return self._reply


@dataclass
class Engine:
    """One launch of the engine, real or simulated."""

    group: Group
    folder: Path
    port: int
    # Path of the simulator's program; None for the real engine.
    program: Path | None
    differences: list[Difference]
    process: Process | None = None
    # The test that runs, and the listed differences that it has checked.
    test: str = ""
    checked: set[str] = field(default_factory=set)
    _opened: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events_port(self) -> int:
        return self.port + 1

    @property
    def replay_port(self) -> int:
        return self.port + 2

    def launch(self) -> float:
        """Starts the engine and waits until it serves. Returns how many seconds that took."""
        self.start()
        return self.wait_ready()

    def start(self) -> None:
        folder = self.folder / f"{self.group.name}-{self.port}"
        folder.mkdir(exist_ok=True)
        flags = self.group.flags()
        if self.group.kv_events:
            config = {
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.events_port}",
                "replay_endpoint": f"tcp://*:{self.replay_port}",
                **self.group.kv_events,
            }
            flags += ["--kv-events-config", json.dumps(config)]
        if self.program:
            command = [str(self.program), "--port", str(self.port), *flags]
            command += ["--enable-metrics", "--enable-cache-report"]
            self.process = Process.start("simulator", command, folder, self.group.env)
        else:
            self.process = launch_engine(folder, self.port, flags, self.group.env)

    def wait_ready(self) -> float:
        ready = f"{self.url}/health"
        return wait_until(
            self.process, "ready", lambda: answers_200(ready), ENGINE_START_SECONDS_MAX
        )

    def stop(self) -> None:
        if self.process:
            self.process.stop(0)

    def alive(self) -> bool:
        return self.process is not None and self.process.alive()

    def expect(self, what: str, found: Any, expected: Any) -> None:
        """Checks that `found`, the figure named `what`, is `expected`: what the real engine
        does. The simulator must do the same, unless a difference is listed for this test and
        `what`; then it must give the value listed there."""
        for difference in self.differences:
            if (difference.test, difference.what) == (self.test, what):
                self.checked.add(what)
                if self.program:
                    assert found != expected, f"{what}: listed as a difference, but it is none"
                    expected = difference.simulator
        assert found == expected, what

    def begin(self, test: str) -> None:
        """Begins a test, with an engine at rest."""
        self.test, self.checked = test, set()
        self.clean()

    def check_differences(self) -> None:
        """Checks that the test has asked for each difference that is listed for it."""
        listed = {each.what for each in self.differences if each.test == self.test}
        assert listed == self.checked, "differences that are listed, and those that were checked"

    # Requests.

    def post(self, path: str, request: Any = None, seconds: float = 60) -> wire.Answer:
        return wire.post(f"{self.url}{path}", request, seconds=seconds)

    def get(self, path: str, seconds: float = 60) -> wire.Answer:
        return wire.get(f"{self.url}{path}", seconds=seconds)

    def generate(self, request: dict, seconds: float = 60) -> Reply:
        return Reply.from_answer(self.post("/generate", request, seconds))

    def turn(self, session: str | None, prompt: list[int], tokens: int, **more: Any) -> Reply:
        return self.generate(body(prompt, tokens, session, **more))

    def flow(self, session: str | None, prompt: list[int], tokens: int, **more: Any) -> Flow:
        """Sends a turn whose answer is streamed."""
        request = body(prompt, tokens, session, stream=True, **more)
        return Flow(wire.stream(f"{self.url}/generate", request))

    def pending(self, session: str | None, prompt: list[int], tokens: int, **more: Any) -> Pending:
        """Sends a turn that isn't streamed, and returns without waiting for the answer."""
        return self.generate_later(body(prompt, tokens, session, **more))

    def generate_later(self, request: dict) -> Pending:
        return Pending(lambda: self.generate(request))

    def open(self, session: str | None = None, **more: Any) -> str:
        """Opens a streaming session, under a new id unless one is given. Returns the id."""
        session = session or new_id("s")
        request = {"capacity_of_str_len": 1000, "session_id": session, "streaming": True, **more}
        answer = self.post("/open_session", request)
        assert answer.status == 200, f"the status of an open ({answer})"
        self._opened.append(session)
        return session

    def close(self, session: str) -> None:
        answer = self.post("/close_session", {"session_id": session})
        assert (answer.status, answer.body) == (200, b""), f"the close of {session}"

    def abort(self, rid: str = "", all: bool = False) -> None:
        answer = self.post("/abort_request", {"rid": rid, "abort_all": all})
        assert (answer.status, answer.body) == (200, b""), f"the abort of {rid!r}"

    def flush(self) -> wire.Answer:
        return self.post("/flush_cache")

    def flushed(self) -> wire.Answer:
        """Flushes, and returns the answer of the flush that the engine accepted. The engine refuses
        a flush while the last step of a turn runs, which may end after the turn's answer."""
        found: list[wire.Answer] = []

        def flushed() -> bool:
            found[:] = [self.flush()]
            return found[0].status == 200

        self.until("flushed", flushed)
        return found[0]

    def sleep_in_forward(self, seconds: float) -> None:
        answer = self.post("/slow_down", {"forward_sleep_time": seconds})
        assert (answer.status, answer.json()) == (200, None), "slow_down"

    @contextmanager
    def slow(self, seconds: float = 0.03) -> Iterator[None]:
        """Makes every forward pass `seconds` longer, so that a turn lasts long enough to act
        during it."""
        self.sleep_in_forward(seconds)
        try:
            yield
        finally:
            self.sleep_in_forward(0)

    # States.

    def load(self) -> dict:
        return self.get("/v1/loads").json()["loads"][0]

    def used(self) -> int:
        return self.load()["num_used_tokens"]

    def until(
        self, what: str, reached: Callable[[], Any], seconds: float = WAIT_SECONDS_MAX
    ) -> Any:
        """Polls until `reached` returns a true value, and returns that value."""
        deadline = time.monotonic() + seconds
        while not (found := reached()):
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.02)
        return found

    def until_used(
        self, tokens: int, what: str = "the pool's use", seconds: float = WAIT_SECONDS_MAX
    ) -> None:
        """Waits until the pool's use is `tokens`, and checks it. The engine's load snapshot
        follows within a fraction of a second; the last value within `seconds` counts."""
        deadline = time.monotonic() + seconds
        while (found := self.used()) != tokens and time.monotonic() < deadline:
            time.sleep(0.02)
        self.expect(what, found, tokens)

    def until_queued(self, count: int) -> None:
        """Waits until `count` requests are queued."""
        self.until(f"{count} waiting", lambda: self.load()["num_waiting_reqs"] == count)

    def until_idle(self) -> None:
        def idle() -> bool:
            load = self.load()
            return load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0

        self.until("idle", idle)

    def until_gone(self, session: str) -> None:
        """Waits until the session's id can be opened again: then its close has been carried out."""
        request = {"capacity_of_str_len": 1, "session_id": session, "streaming": True}
        self.until(
            f"{session} is closed",
            lambda: self.post("/open_session", request).status == 200,
        )
        self.close(session)

    def until_reaped(self) -> None:
        """Waits for a pass of the engine's reaper, which closes sessions that have timed out."""
        self.until_gone(self.open(timeout=0))

    def clean(self) -> None:
        """Restores the state that every test begins with: nothing runs, waits, is open or is
        cached."""
        self.sleep_in_forward(0)
        self.abort(all=True)
        for session in self._opened:
            self.close(session)
        self._opened.clear()
        self.until("flushed", lambda: self.flush().status == 200)
        self.until("empty", lambda: self.used() == 0)
