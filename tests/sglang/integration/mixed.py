"""Deltas and full histories on one pinned session: no turn is answered on another context.

A delta is a turn that holds only new tokens; the engine appends them to the history it has. A full
history that differs must not replace that history while a client relies on it. Each client here
keeps its own transcript in token ids and compares `prompt_tokens` and the answer with it.

These tests run in an engine of their own, with the chat model, in which the shim trims.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from integration import wire
from integration.clients import Cluster
from integration.fleet import MODEL, Fleet
from integration.processes import wait_until
from integration.turns import delete_session, new_id

ANSWER_TOKENS = 12
EXPIRY_SECONDS_MAX = 60


@dataclass
class Client:
    """A client of a session, with its own transcript."""

    cluster: Cluster
    id: str
    transcript: list[int] = field(default_factory=list)
    # The number of transcript tokens that the session holds, as the client believes.
    held: int = 0

    def ids(self, text: str) -> list[int]:
        return self.cluster.tokenizer.encode(text, add_special_tokens=False).ids

    def post(self, path: str, body: dict) -> wire.Answer:
        return wire.post(f"{self.cluster.fleet.router_url}{path}", body)

    def open(self, **more: Any) -> None:
        request = {"capacity_of_str_len": 1, "session_id": self.id, "streaming": True, **more}
        answer = self.post("/open_session", request)
        assert answer.status == 200, f"the status of the open, {answer}"
        self.held = 0

    def close(self) -> None:
        assert delete_session(self.cluster.fleet, self.id).status == 204, "the status of the close"

    def send_delta(self, text: str) -> None:
        """Sends a delta, which must be answered on this client's transcript."""
        self.transcript += self.ids(text)
        sent = self.transcript[self.held :]
        self._check_answer(self._generate(sent, session_params={"id": self.id}))

    def send_full_history(self, text: str, **more: Any) -> str:
        """Sends a full history, which must be answered. Returns how it ran."""
        self.transcript += self.ids(text)
        answer = self._generate(self.transcript, session_id=self.id, **more)
        self._check_answer(answer)
        return answer.headers["x-berth-session-turn"]

    def begin_pinned(self) -> None:
        """Begins a pinned session with a full history, without opening the session before."""
        request = self._body(self.ids("Another story"), session_id=self.id)
        url = f"{self.cluster.fleet.router_url}/generate"
        answer = wire.post(url, request, {"x-berth-retention": "pinned"})
        assert answer.status == 200, f"the status of {answer}"

    def _check_answer(self, answer: wire.Answer) -> None:
        assert answer.status == 200, f"the status of {answer}"
        said = answer.json()
        own = len(self.transcript)
        assert said["meta_info"]["prompt_tokens"] == own, "prompt tokens: the client's transcript"
        engine_url = self.cluster.fleet.engine_url
        alone = wire.post(f"{engine_url}/generate", self._body(self.transcript)).json()
        assert said["output_ids"] == alone["output_ids"], "the answer to the client's transcript"
        self.transcript += said["output_ids"]
        self.held = len(self.transcript)

    def check_refused(self, code: str, answer: wire.Answer) -> None:
        assert answer.status == 409, f"the status of {answer}"
        # The errors of some APIs have no code in their bodies.
        assert answer.headers["x-berth-refusal"] == code, "the code"

    def check_delta_refused(self, code: str) -> None:
        sent = self.ids(" and then?")
        self.check_refused(code, self._generate(sent, session_params={"id": self.id}))

    def check_full_history_refused(self, code: str, transcript: list[int], **more: Any) -> None:
        self.check_refused(code, self._generate(transcript, session_id=self.id, **more))

    def _generate(self, ids: list[int], **more: Any) -> wire.Answer:
        return self.post("/generate", self._body(ids, **more))

    def _body(self, ids: list[int], **more: Any) -> dict:
        params = {"max_new_tokens": ANSWER_TOKENS, "temperature": 0}
        return {"input_ids": ids, "sampling_params": params, **more}


@contextmanager
def cluster_of(fleet: Fleet) -> Iterator[Cluster]:
    cluster = Cluster(fleet, "mixed")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def client(cluster: Cluster, other: Client | None = None) -> Client:
    """Returns a client of a new session, or of the other client's session."""
    return Client(cluster, other.id if other else new_id("mixed"))


def client_with_deltas(cluster: Cluster) -> Client:
    first = client(cluster)
    first.open()
    first.send_delta("The harbour master counts the ships that lie at the quay")
    first.send_delta(" and writes them into the book that nobody reads")
    return first


def test_no_full_history_replaces_a_session_with_deltas(fleet: Fleet) -> None:
    with cluster_of(fleet) as cluster:
        a_history_that_differs_is_refused(cluster)
        every_route_refuses_a_different_history(cluster)
        a_history_that_continues_is_appended(cluster)
        a_client_may_reopen_its_session(cluster)
        a_replaced_history_takes_no_delta(cluster)
        an_expired_session_takes_no_delta(cluster)
        a_session_begun_under_the_next_agent_takes_no_delta(cluster)
        answers_with_ignore_eos_cost_no_pin(cluster)


def a_history_that_differs_is_refused(cluster: Cluster) -> None:
    first = client_with_deltas(cluster)
    other = client(cluster, first).ids("Another story begins with another word, and goes on")
    first.check_full_history_refused("whole_history", other)
    first.send_delta(" except the gulls.")
    first.check_full_history_refused("whole_history", first.transcript[:-3] + other)
    first.check_full_history_refused("whole_history", first.transcript)
    first.send_delta(" They read it twice.")
    first.close()


def every_route_refuses_a_different_history(cluster: Cluster) -> None:
    first = client_with_deltas(cluster)
    named = {"x-berth-session-id": first.id}
    messages = [{"role": "user", "content": "Tell me another story."}]
    chat = {"model": MODEL, "max_tokens": ANSWER_TOKENS, "messages": messages}
    text = {"model": MODEL, "max_tokens": ANSWER_TOKENS, "prompt": "Another story."}
    asked = {"model": MODEL, "max_output_tokens": ANSWER_TOKENS, "input": "Another story."}
    for path, body in (
        ("/v1/chat/completions", chat), ("/v1/completions", text), ("/v1/responses", asked),
        ("/v1/messages", chat),
    ):
        for stream in (False, True):
            url = f"{cluster.fleet.router_url}{path}"
            answer = wire.post(url, body | {"stream": stream}, named)
            first.check_refused("whole_history", answer)
            # The session is free for its next turn as soon as the client receives the refusal.
            first.send_delta(f" After {path} too.")
    first.close()


def a_history_that_continues_is_appended(cluster: Cluster) -> None:
    first = client_with_deltas(cluster)
    assert first.send_full_history(" except the gulls.") == "pinned", "how the full history ran"
    first.send_delta(" They read it twice.")
    assert first.send_full_history(" And again.") == "pinned", "how the full history ran"
    first.close()


def a_client_may_reopen_its_session(cluster: Cluster) -> None:
    first = client_with_deltas(cluster)
    second = client(cluster, first)
    opening = {"session_control": {"session_id": first.id, "action": "open"}}
    ran = second.send_full_history("Another story", nvext=opening)
    assert ran == "reopened", "how the full history ran"
    first.check_delta_refused("delta_needs_open")
    assert second.send_full_history(" goes on.") == "pinned", "how the full history ran"
    second.close()
    third = client(cluster, first)
    pinned = {"session_id": first.id, "retention": "pinned"}
    wire.post(f"{cluster.fleet.router_url}/v1/sessions", pinned)
    assert third.send_full_history("A story", nvext=opening) == "pinned", "how the first turn ran"
    third.send_delta(" goes on.")
    third.close()


def a_replaced_history_takes_no_delta(cluster: Cluster) -> None:
    first = client(cluster)
    opening = {"session_control": {"session_id": first.id, "action": "open"}}
    pinned = {"session_id": first.id, "retention": "pinned"}
    wire.post(f"{cluster.fleet.router_url}/v1/sessions", pinned)
    first.send_full_history("The harbour master counts the ships", nvext=opening)
    first.send_delta(" one by one")
    first.close()
    first.open()
    other = client(cluster, first)
    assert other.send_full_history("Another story") == "pinned", "how the other history ran"
    first.check_delta_refused("delta_needs_open")
    other.close()
    first.open()
    first.send_delta(" and the gulls.")
    first.close()


def an_expired_session_takes_no_delta(cluster: Cluster) -> None:
    first = client(cluster)
    first.open(timeout=8)
    first.send_delta("The harbour master counts the ships")
    url = f"{cluster.fleet.router_url}/v1/sessions/{first.id}"
    gone = lambda: wire.get(url).status == 404  # noqa: E731
    wait_until(cluster.fleet.agent, "rid of the session", gone, EXPIRY_SECONDS_MAX)
    other = client(cluster, first)
    other.begin_pinned()
    first.check_delta_refused("delta_needs_open")
    first.close()


def a_session_begun_under_the_next_agent_takes_no_delta(cluster: Cluster) -> None:
    first = client_with_deltas(cluster)
    cluster.fleet.stop_agent()
    cluster.fleet.start_agent(settings=f'files.shim_socket = "{cluster.fleet.shim_socket}"\n')
    cluster.fleet.wait_placing()
    cluster.fleet.wait_trimming()
    other = client(cluster, first)
    other.begin_pinned()
    first.check_delta_refused("delta_needs_open")
    first.close()


def answers_with_ignore_eos_cost_no_pin(cluster: Cluster) -> None:
    """Load generators set `ignore_eos`. Their answers hold end tokens that the answers' text lacks,
    so each history differs from the session's context inside the last answer."""
    session, messages, ran = new_id("endless"), [], []
    url = f"{cluster.fleet.router_url}/v1/chat/completions"
    for number in range(8):
        messages.append({"role": "user", "content": f"What is number {number} on the list?"})
        endless = {"ignore_eos": True} if number < 6 else {}
        body = {"model": MODEL, "max_tokens": 40, "temperature": 0, "messages": messages, **endless}
        answer = wire.post(url, body, {"x-berth-session-id": session})
        assert answer.status == 200, f"the status of {answer}"
        ran.append(answer.headers["x-berth-session-turn"])
        said = answer.json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said or ""})
    print(f"    eight turns, six of them with ignore_eos: {' '.join(ran)}", flush=True)
    assert "reopened" in ran, "no answer held an end token"
    assert ran[-1] == "pinned", "how the last turn ran"
    assert set(ran[1:]) - {"pinned", "reopened"} == set(), "how later turns ran"


def test_a_history_has_one_salt(fleet: Fleet) -> None:
    """A full history of another salt runs in a new incarnation, and no delta continues the KV."""
    with cluster_of(fleet) as cluster:
        first = client(cluster)
        first.open()
        opening = {"session_control": {"session_id": first.id, "action": "open"}}
        ids = first.ids("The harbour master counts the ships that lie at the quay, one by one")
        cached = []
        for salt in ("a", "a", "b", "b"):
            more = {"session_id": first.id, "cache_salt": salt, "nvext": opening}
            answer = first.post("/generate", first._body(ids, **more))
            assert answer.status == 200, f"the status of {answer}"
            said = answer.json()
            cached.append((answer.headers["x-berth-session-turn"],
                           said["meta_info"]["cached_tokens"] > 0))
            ids = ids + said["output_ids"] + first.ids(" and again")
        assert cached == [
            ("pinned", False), ("pinned", True), ("reopened", False), ("pinned", True),
        ], "how the turns ran, and whether they found KV"
        sent, named = first.ids(" and then?"), {"session_params": {"id": first.id}}
        first.check_refused("other_kv", first._generate(sent, cache_salt="a", **named))
        taken = first._generate(sent, cache_salt="b", **named)
        assert taken.status == 200, f"the status of {taken}"
        first.close()
