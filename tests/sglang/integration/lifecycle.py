"""The life of a session: it is opened, shown and closed, and the pool gets back what it held.

The pool's figure is the engine's own. At its baseline nothing is held: KV that only stays cached
can be evicted and doesn't count.
"""

import time

from integration import wire
from integration.fleet import Fleet
from integration.turns import (
    Pinned,
    body,
    chat_body,
    delete_session,
    generate,
    get_session,
    is_running,
    last_turn,
    new_id,
    open_session,
    refusal_code,
    restore_speed,
    slow_engine,
)


def wait_gone(fleet: Fleet, id: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while (status := get_session(fleet, id).status) != 404 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert status == 404, f"the status of {id} {seconds:.0f} s later"


def test_opened_shown_listed_closed(fleet: Fleet) -> None:
    id = new_id("life")
    opened = open_session(fleet, session_id=id, retention="pinned")
    assert (opened["session_id"], opened["retention"]) == (id, "pinned"), "what was opened"
    shown = get_session(fleet, id)
    assert (shown.status, shown.json()["session_id"]) == (200, id), "what is shown"
    listed = wire.get(f"{fleet.router_url}/v1/sessions")
    assert listed.status == 200, f"the status of {listed}"
    assert f'"{id}"' in listed.body.decode(), f"{id} isn't listed in {listed}"
    assert delete_session(fleet, id).status == 204, "the status of the close"
    assert get_session(fleet, id).status == 404, "the status after the close"
    assert f'"{id}"' not in wire.get(f"{fleet.router_url}/v1/sessions").body.decode(), "still listed"


def test_a_second_close_finds_nothing(fleet: Fleet) -> None:
    id = open_session(fleet, retention="pinned")["session_id"]
    statuses = [delete_session(fleet, id).status for _ in range(2)]
    assert statuses == [204, 404], "the statuses"


def test_a_close_gives_the_pool_back(fleet: Fleet) -> None:
    before = fleet.baseline()
    session = Pinned(fleet)
    session.turn("The harbour is full. " * 10, 30)
    session.turn("One ship leaves.", 30)
    held = fleet.pool_used_tokens() - before
    assert held >= len(session.history) - 1, f"{held} tokens held for {len(session.history)}"
    session.close()
    assert fleet.wait_pool(before) == before, "the pool's use after the close"


def test_a_closed_id_can_be_opened_again(fleet: Fleet) -> None:
    id = new_id("again")
    for _ in range(3):
        session = Pinned(fleet, id)
        session.turn("The same words.", 10)
        session.turn(" And more.", 10)
        session.close()


def test_the_final_turn_closes(fleet: Fleet) -> None:
    before = fleet.baseline()
    for stream in (False, True):
        session = Pinned(fleet)
        session.turn("Hello, harbour.", 10)
        request = body(" Farewell.", 10, stream=stream, session_params={"id": session.id})
        headers = {"x-berth-session-final": "true"}
        answer = wire.post(f"{fleet.router_url}/generate", request, headers)
        assert answer.status == 200, f"the status of {answer}"
        wait_gone(fleet, session.id)
    assert fleet.wait_pool(before) == before, "the pool's use"


def test_session_control_opens_and_closes(fleet: Fleet) -> None:
    id = new_id("control")
    url = f"{fleet.router_url}/v1/chat/completions"
    for action, found in (("open", 200), (None, 200), ("close", 404)):
        control = {"session_id": id} | ({"action": action} if action else {})
        request = chat_body("Any news?", 6, nvext={"session_control": control})
        answer = wire.post(url, request)
        assert answer.status == 200, f"{action}: the status of {answer}"
        if found == 404:
            wait_gone(fleet, id)
        assert get_session(fleet, id).status == found, f"{action}: the status of the session"


def test_a_close_during_a_turn_waits_for_its_end(fleet: Fleet) -> None:
    before = fleet.baseline()
    session = Pinned(fleet)
    session.turn("Load the cargo.", 10)
    with slow_engine(fleet, 0.1):
        text = " Slowly, please."
        running = session.send(text, 60, stream=True)
        next(running.events())
        assert delete_session(fleet, session.id).status == 204, "the status of the close"
        assert is_running(fleet), "the close waited for the turn"
        restore_speed(fleet)
        session.check(text, 60, last_turn(running))
    wait_gone(fleet, session.id)
    assert fleet.wait_pool(before) == before, "the pool's use"


def test_an_idle_session_is_closed_in_time(fleet: Fleet) -> None:
    before = fleet.baseline()
    session = Pinned(fleet, timeout=8)
    session.turn("Wait for me.", 10)
    assert fleet.wait_pool(before) == before, "the pool's use"
    # The router may still know where the session was, but its history is gone, so nothing can be
    # appended.
    request = body(" Too late.", 4, session_params={"id": session.id})
    answer = wire.post(f"{fleet.router_url}/generate", request)
    assert refusal_code(answer, 404, "a turn after its end") == "session_unknown", "the code"


def test_a_turn_of_an_unknown_session_binds_it(fleet: Fleet) -> None:
    id = new_id("unknown")
    generate(fleet, "Hello.", 6, {"x-berth-session-id": id})
    assert get_session(fleet, id).status == 200, "the status of the session"
    assert delete_session(fleet, id).status == 204, "the status of the close"
