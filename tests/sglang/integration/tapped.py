"""With a tap between agent and engine: Berth changes no byte except the keys that it owns.

The client gets what the engine sent, and the engine gets what the client sent. Each test restarts
the agent behind the tap, and afterwards without it.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from integration import wire
from integration.bytes_untouched import TEXT, same_bytes
from integration.fleet import MODEL, Fleet
from integration.tap import Exchange, Tap
from integration.turns import Pinned, body, chat_body, last_turn

# The keys that Berth may add to a body, anywhere at its top level.
OWNED = ("rid", "session_params", "session_id", "routed_dp_rank", "priority")


@contextmanager
def tapped(fleet: Fleet) -> Iterator[Tap]:
    tap = Tap(fleet.engine_url)
    fleet.restart_agent(tap.url)
    try:
        yield tap
    finally:
        fleet.restart_agent()
        tap.close()


def _post(
    fleet: Fleet, tap: Tap, path: str, request: object, headers: dict | None = None
) -> Exchange:
    """Sends the request and checks the answer's status. Returns the exchange on the engine's
    side."""
    before = len(tap.exchanges(path))
    answer = wire.post(fleet.router_url + path, request, headers)
    assert answer.status == 200, f"{path}: the status of {answer}"
    seen = tap.exchanges(path)
    assert len(seen) == before + 1, f"{path}: exchanges with the engine for one turn"
    new = [exchange for exchange in seen if exchange.answer_body == answer.body]
    if not new:
        # The newest exchange is most likely the one to compare with.
        same_bytes(answer.body, seen[-1].answer_body, f"{path}: the answer")
    return new[-1]


def test_answers_and_streams(fleet: Fleet) -> None:
    completion = {"model": MODEL, "prompt": TEXT, "max_tokens": 10, "temperature": 0}
    usage = {"stream_options": {"include_usage": True}}
    with tapped(fleet) as tap:
        for stream in (False, True):
            more = {"stream": stream}
            _post(fleet, tap, "/generate", body(TEXT, 10, **more))
            _post(fleet, tap, "/v1/messages", chat_body(TEXT, 10, **more))
            more |= usage if stream else {}
            _post(fleet, tap, "/v1/chat/completions", chat_body(TEXT, 10, **more))
            _post(fleet, tap, "/v1/completions", {**completion, **more})


def test_a_request_but_for_the_owned_keys(fleet: Fleet) -> None:
    # No serializer would write these spaces, escapes and numbers, in this order.
    odd = (
        b'{ "text" :\t"caf\\u00e9 \\/ \\"rid\\": \\u007b",\n  "unknown":[1.0,1e2,-0,{"rid":"x"}],'
        b' "sampling_params": {"max_new_tokens":4 , "temperature":0.0,"ignore_eos":true} }'
    )
    with tapped(fleet) as tap:
        plain = _post(fleet, tap, "/generate", odd)
        tagged = _post(fleet, tap, "/generate", odd, {"x-berth-session-id": "tapped"})
    for what, exchange in (("plain", plain), ("tagged", tagged)):
        same_bytes(_without_owned(exchange.request_body), _without_owned(odd), f"{what} request")
    assert "session_id" not in json.loads(plain.request_body), "a plain turn names a session"
    assert "session_id" in json.loads(tagged.request_body), "a tagged turn names no session"


def test_pinned_turns(fleet: Fleet) -> None:
    with tapped(fleet) as tap:
        session = Pinned(fleet)
        for text in ("Listen.", " And again."):
            before = len(tap.exchanges("/generate"))
            answer = session.send(text, 12, stream=True)
            turn = last_turn(answer)
            seen = tap.exchanges("/generate")
            assert len(seen) == before + 1, "exchanges with the engine for one turn"
            mine = [exchange for exchange in seen if exchange.answer_body == answer.raw]
            assert len(mine) == 1, "exchanges in which the engine sent this stream"
            inner = json.loads(mine[0].request_body)["session_params"]
            assert list(inner) == ["id"], "the keys of session_params"
            assert inner["id"] != session.id, "the engine's session has the client's id"
            session.check(text, 12, turn)
        session.close()


def _without_owned(raw: bytes) -> bytes:
    """Removes the owned top-level keys from the text, and the commas and spaces that they leave."""
    values = rb'"(?:[^"\\]|\\.)*"|-?[0-9]+|\{"id":\s*"[^"]*"\}'
    for key in OWNED:
        raw = re.sub(rb'(?<![\\{\w])"' + key.encode() + rb'"\s*:\s*(?:' + values + rb")\s*,?", b"", raw)
        raw = re.sub(rb'^\{\s*"' + key.encode() + rb'"\s*:\s*(?:' + values + rb")\s*,?", b"{", raw)
    return re.sub(rb"[\s,]*\}$", b"}", re.sub(rb"^\{[\s,]*", b"{", raw))
