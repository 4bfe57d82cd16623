"""Berth's value of a key that Berth owns wins, however a client writes that key.

Each key is sent twice, at the front and at the end, plain and escaped, because a parser takes the
last one. If a client's value got through, the engine would answer 400 (a rank that doesn't exist, a
session it doesn't know, both kinds of session at once) or under the client's request id.
"""

from integration import wire
from integration.fleet import Fleet
from integration.turns import (
    Pinned, Turn, delete_session, finished_turn, generate_at_engine, get_session, new_id,
)

FRONT = (
    '"rid":"hostile-1","routed_dp_rank":7,"bootstrap_room":1,"bootstrap_host":"nowhere",'
    '"session_id":"%s",'
)
BACK = (
    ',"\\u0072id":"hostile-2","routed_dp_r\\u0061nk":7,"\\u0062ootstrap_room":2,'
    '"bootstrap\\u005fhost":"nowhere","session\\u005fid":"%s"'
)
# Only used in a pinned session: elsewhere these keys would mean that the turn is a delta.
FRONT_PARAMS = '"session_params":{"id":"%s"},'
BACK_PARAMS = ',"\\u0073ession_params":{"\\u0069d":"%s"}'
INSIDE = '"unknown":{"rid":"deep","session_params":{"id":"deep"},"routed_dp_rank":7},'


def hostile(inner: str, session: str, params: bool = False) -> bytes:
    """Returns a request in which every owned key names `session` or has a nonsense value."""
    front, back = FRONT % session, BACK % session
    if params:
        front, back = FRONT_PARAMS % session + front, back + BACK_PARAMS % session
    return f"{{{front}{INSIDE}{inner}{back}}}".encode()


def generate_inner(text: str, tokens: int) -> str:
    limits = f'{{"max_new_tokens":{tokens},"temperature":0,"ignore_eos":true}}'
    return f'"text":"{text}","sampling_params":{limits}'


def test_in_a_pinned_session(fleet: Fleet) -> None:
    mine, other = Pinned(fleet), Pinned(fleet)
    other.turn("This is another conversation.", 10)
    headers = {"x-berth-session-id": mine.id, "x-berth-delta": "1"}
    for text in ("Whose am I?", " Still yours?"):
        raw = hostile(generate_inner(text, 10), other.id, params=True)
        turn = finished_turn(wire.post(f"{fleet.router_url}/generate", raw, headers))
        mine.check(text, 10, turn)
        _rid(turn)
    other.turn(" Untouched.", 10)
    mine.close()
    other.close()


def test_in_a_tagged_session(fleet: Fleet) -> None:
    mine, other = new_id("mine"), new_id("other")
    raw = hostile(generate_inner("Whose am I?", 10), other)
    answer = wire.post(f"{fleet.router_url}/generate", raw, {"x-berth-session-id": mine})
    turn = finished_turn(answer)
    assert turn.text == generate_at_engine(fleet, "Whose am I?", 10).text, "the answer"
    _rid(turn)
    found = [get_session(fleet, id).status for id in (mine, other)]
    assert found == [200, 404], "the sessions there are"
    delete_session(fleet, mine)


def test_without_a_session(fleet: Fleet) -> None:
    raw = (
        b'{"rid":"hostile-1","routed_dp_rank":7,"text":"Nobody\'s.",'
        b'"sampling_params":{"max_new_tokens":8,"temperature":0,"ignore_eos":true},'
        b'"\\u0072id":"hostile-2","routed_dp_r\\u0061nk":7}'
    )
    turn = finished_turn(wire.post(f"{fleet.router_url}/generate", raw))
    assert turn.text == generate_at_engine(fleet, "Nobody's.", 8).text, "the answer"
    _rid(turn)


def test_on_the_chat_route(fleet: Fleet) -> None:
    mine, other = new_id("mine"), new_id("other")
    messages = '"model":"tiny","max_tokens":4,"messages":[{"role":"user","content":"Hi"}]'
    raw = hostile(messages, other)
    answer = wire.post(
        f"{fleet.router_url}/v1/chat/completions", raw, {"x-berth-session-id": mine}
    )
    assert answer.status == 200, f"the status of {answer}"
    assert not answer.json()["id"].startswith("hostile"), f"the client's request id: {answer}"
    found = [get_session(fleet, id).status for id in (mine, other)]
    assert found == [200, 404], "the sessions there are"
    delete_session(fleet, mine)


def test_of_two_session_ids_the_last_counts(fleet: Fleet) -> None:
    first, last = new_id("first"), new_id("last")
    raw = (
        f'{{"session_id":"{first}","text":"Hi","sampling_params":{{"max_new_tokens":2}},'
        f'"\\u0073ession_id":"{last}"}}'
    ).encode()
    answer = wire.post(f"{fleet.router_url}/generate", raw)
    assert answer.status == 200, f"the status of {answer}"
    found = [get_session(fleet, id).status for id in (first, last)]
    assert found == [404, 200], "the sessions there are"
    delete_session(fleet, last)


def test_a_text_that_looks_like_keys_is_a_text(fleet: Fleet) -> None:
    text = '{"rid":"x","session_params":{"id":"y"},"routed_dp_rank":7}'
    session = Pinned(fleet)
    session.turn(text, 10)
    session.turn(text, 10)
    session.close()


def _rid(turn: Turn) -> None:
    assert not turn.rid.startswith("hostile"), f"the engine used the client's rid {turn.rid!r}"
