"""Pinned sessions: a turn sends what is new, and the engine computes what is new.

`Pinned.turn` checks every turn's counts, and that its answer is the answer to the full history.
"""

from integration import wire
from integration.fleet import Fleet
from integration.turns import (
    Pinned,
    Turn,
    body,
    delete_session,
    finished_turn,
    get_session,
    new_id,
    open_session,
    refusal_code,
)

TEXTS = ("The quick brown fox jumps", " over the", " lazy dog, and then some more")


def test_three_turns(fleet: Fleet) -> None:
    session = Pinned(fleet)
    for text in TEXTS:
        session.turn(text, 24)
    session.close()


def test_three_streamed_turns(fleet: Fleet) -> None:
    session = Pinned(fleet)
    for text in TEXTS:
        session.turn(text, 24, stream=True)
    session.close()


def test_three_turns_named_by_headers(fleet: Fleet) -> None:
    session = Pinned(fleet)
    for text, stream in zip(TEXTS, (False, True, False)):
        session.turn(text, 24, stream=stream, by_header=True)
    session.close()


def test_both_ways_to_name_a_session_mix(fleet: Fleet) -> None:
    session = Pinned(fleet)
    for text, by_header in zip(TEXTS, (True, False, True)):
        session.turn(text, 16, by_header=by_header)
    session.close()


def test_a_session_named_by_berth(fleet: Fleet) -> None:
    opened = open_session(fleet, retention="pinned")
    id = opened["session_id"]
    assert id, "an empty session id"
    assert opened["retention"] == "pinned", "the retention"
    shown = get_session(fleet, id)
    assert shown.status == 200, f"the status of {shown}"
    first = finished_turn(_turn(fleet, id, "one", 8))
    second = finished_turn(_turn(fleet, id, "two", 8))
    assert (first.prompt_tokens, second.prompt_tokens) == (3, 3 + 8 + 3), "prompt tokens"
    assert delete_session(fleet, id).status == 204, "the status of the close"


def test_a_turn_with_token_ids(fleet: Fleet) -> None:
    session = Pinned(fleet)
    first = session.turn("hello", 8)
    ids = {"input_ids": [71] * 5, "session_params": {"id": session.id}}
    request = {key: value for key, value in body("", 8, **ids).items() if key != "text"}
    second = finished_turn(wire.post(f"{fleet.router_url}/generate", request))
    session.check("h" * 5, 8, second)
    assert first.completion_tokens == 8, "completion tokens"
    session.close()


def test_a_delta_of_another_salt_is_refused_and_the_session_goes_on(fleet: Fleet) -> None:
    """The engine itself would append it: of 31 tokens it would take 28 from the other salt's KV."""
    id = open_session(fleet, session_id=new_id("salt"), retention="pinned")["session_id"]
    url, own = f"{fleet.router_url}/generate", {"session_params": {"id": id}, "cache_salt": "a"}
    first = finished_turn(wire.post(url, body(TEXTS[0], 4, **own)))
    for other in ({"cache_salt": "b"}, {"cache_salt": None}, {"extra_key": "k"}):
        answer = wire.post(url, body("two", 4, **(own | other)))
        assert refusal_code(answer, 409, f"a delta with {other}") == "other_kv"
    second = finished_turn(wire.post(url, body("two", 4, **own)))
    history = first.prompt_tokens + first.completion_tokens
    assert second.prompt_tokens == history + 3, "prompt tokens: nothing else was appended"
    assert second.cached_tokens in (history - 1, history), "cached tokens: the full history"
    assert delete_session(fleet, id).status == 204, "the status of the close"


def test_sglangs_own_flow_is_unchanged(fleet: Fleet) -> None:
    id = new_id("flow")
    router = fleet.router_url
    opened = wire.post(
        f"{router}/open_session", {"capacity_of_str_len": 1000, "session_id": id, "streaming": True}
    )
    assert opened.status == 200, f"the status of {opened}"
    assert opened.json() == id, "the answer to the open: the id as a JSON string"
    history = 0
    for place, text in enumerate(TEXTS):
        turn: Turn = finished_turn(_turn(fleet, id, text, 10))
        assert turn.prompt_tokens == history + len(text), f"turn {place}: prompt tokens"
        if place:
            assert turn.cached_tokens in (history - 1, history), f"cached: {turn.cached_tokens}"
        history = turn.prompt_tokens + turn.completion_tokens
    closed = wire.post(f"{router}/close_session", {"session_id": id})
    assert (closed.status, closed.body) == (200, b""), "the answer to the close"
    assert get_session(fleet, id).status == 404, "the status of the closed session"


def test_sglangs_open_without_an_id_gets_one(fleet: Fleet) -> None:
    opened = wire.post(
        f"{fleet.router_url}/open_session", {"capacity_of_str_len": 1000, "streaming": True}
    )
    id = opened.json()
    assert isinstance(id, str) and id, f"no id in {opened}"
    assert finished_turn(_turn(fleet, id, "one", 4)).prompt_tokens == 3, "prompt tokens"
    wire.post(f"{fleet.router_url}/close_session", {"session_id": id})


def _turn(fleet: Fleet, id: str, text: str, tokens: int) -> wire.Answer:
    request = body(text, tokens, session_params={"id": id})
    return wire.post(f"{fleet.router_url}/generate", request)
