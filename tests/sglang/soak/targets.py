"""Where the soak's clients send their requests: to Berth, or directly to the engine.

With Berth, a client uses the router and names its session in the body or in headers, or it goes
directly to the agent with a claim, as another router would. At the engine, the session's id is the
engine's own.
"""

import json
import random
from typing import Any, Protocol

from integration import wire
from soak.cluster import Cluster
from soak.session import ClientSession
from soak.wire import Call, Reply, read

CONTROL_SECONDS_MAX = 20
# The longest turn takes 3 s on an idle machine; a loaded one takes several times that.
TURN_SECONDS_MAX = 120
# At the bare engine, a turn that takes so long never ends, and there are many such turns.
BARE_TURN_SECONDS_MAX = 15


class Target(Protocol):
    """How clients reach their sessions, at Berth or at the engine."""

    name: str
    # Whether Berth's promises apply: then a broken promise is a failure.
    guarded: bool
    # Whether the engine has a host tier, between which and the device Berth moves sessions.
    has_host_tier: bool
    # The seconds after which a turn counts as hanging.
    turn_seconds: float

    def open(self, session: ClientSession) -> Reply: ...

    def close(self, id: str) -> Reply: ...

    def is_there(self, id: str) -> bool: ...

    def move(self, id: str, where: str) -> Reply: ...

    def pinned(
        self, chance: random.Random, session: ClientSession, body: dict[str, Any]
    ) -> Call: ...

    def tagged(self, chance: random.Random, id: str, body: dict[str, Any]) -> Call: ...

    def plain(self, chance: random.Random, body: dict[str, Any]) -> Call: ...


def _request(method: str, url: str, body: Any = None) -> Reply:
    answer = wire.request(method, url, body, seconds=CONTROL_SECONDS_MAX)
    return read(answer.status, answer.body)


class BerthTarget:
    """Through Berth: by the router, or by the agent's data port."""

    name = "berth"
    guarded = True
    turn_seconds = TURN_SECONDS_MAX

    def __init__(self, fleet: Cluster):
        self.has_host_tier = bool(fleet.host_ratio)
        self._router = fleet.router_url
        self._agent = f"http://{fleet.agent_data}"

    def open(self, session: ClientSession) -> Reply:
        asked = {"session_id": session.id, "retention": "pinned", "timeout": session.idle_seconds}
        asked = {key: value for key, value in asked.items() if value is not None}
        return _request("POST", f"{self._router}/v1/sessions", asked)

    def close(self, id: str) -> Reply:
        return _request("DELETE", f"{self._router}/v1/sessions/{id}")

    def is_there(self, id: str) -> bool:
        return _request("GET", f"{self._router}/v1/sessions/{id}").status != 404

    def move(self, id: str, where: str) -> Reply:
        return _request("POST", f"{self._router}/v1/sessions/{id}/{where}")

    def pinned(self, chance: random.Random, session: ClientSession, body: dict[str, Any]) -> Call:
        if session.opened_by_turn and not session.sent:
            idle = {"idle_ms_max": int(session.idle_seconds * 1000)} if session.idle_seconds else {}
            opening = {"open": True, "retention": "pinned", **idle}
            return self._claimed(session.id, body, delta=True, **opening)
        way = chance.randrange(3)
        if way == 0:
            return Call(f"{self._router}/generate", {**body, "session_params": {"id": session.id}})
        if way == 1:
            headers = {"x-berth-session-id": session.id, "x-berth-delta": "1"}
            return Call(f"{self._router}/generate", body, headers)
        return self._claimed(session.id, body, delta=True)

    def tagged(self, chance: random.Random, id: str, body: dict[str, Any]) -> Call:
        if chance.random() < 0.5:
            return Call(f"{self._router}/generate", body, {"x-berth-session-id": id})
        return self._claimed(id, body)

    def plain(self, chance: random.Random, body: dict[str, Any]) -> Call:
        return Call(f"{chance.choice((self._router, self._agent))}/generate", body)

    def _claimed(self, id: str, body: dict[str, Any], **more: Any) -> Call:
        # The principal that the router assigns to clients without a credential.
        envelope = {"principal": "anonymous", "session": {"id": id, **more}}
        headers = {"x-berth-turn-envelope": json.dumps(envelope)}
        return Call(f"{self._agent}/generate", body, headers)


class BareTarget:
    """Directly to the engine, where nothing is refused and nothing is counted."""

    name = "bare"
    guarded = False
    has_host_tier = False
    turn_seconds = BARE_TURN_SECONDS_MAX

    def __init__(self, fleet: Cluster):
        self._engine = fleet.engine_url

    def open(self, session: ClientSession) -> Reply:
        asked = {"session_id": session.id, "capacity_of_str_len": 1000, "streaming": True}
        asked |= {"timeout": session.idle_seconds}
        return _request("POST", f"{self._engine}/open_session", asked)

    def close(self, id: str) -> Reply:
        return _request("POST", f"{self._engine}/close_session", {"session_id": id})

    def is_there(self, id: str) -> bool:
        return False  # The engine doesn't tell.

    def move(self, id: str, where: str) -> Reply:
        raise NotImplementedError("a bare engine moves no session")

    def pinned(self, chance: random.Random, session: ClientSession, body: dict[str, Any]) -> Call:
        return Call(f"{self._engine}/generate", {**body, "session_params": {"id": session.id}})

    def tagged(self, chance: random.Random, id: str, body: dict[str, Any]) -> Call:
        return Call(f"{self._engine}/generate", {**body, "session_id": id})

    def plain(self, chance: random.Random, body: dict[str, Any]) -> Call:
        return Call(f"{self._engine}/generate", body)
