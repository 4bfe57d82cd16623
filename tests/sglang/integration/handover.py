"""A planned restart of the agent keeps the pinned sessions, with their KV in the engine."""

import time

from integration import wire
from integration.fleet import Fleet
from integration.succession import journalled_sessions
from integration.turns import Pinned, body, finished_turn, refusal_code
from integration.with_shim import with_shim

SETTINGS = "shutdown.handover = true\n"
# The first turn after a restart waits for the new agent, its engine and the shim's report.
BACK_SECONDS_MAX = 30
TOKENS = 10


def restart(fleet: Fleet) -> None:
    """Restarts the agent as a service manager does. Turns don't get through yet."""
    status = fleet.stop_agent()
    assert status == 0, f"the agent's exit status: {status}\n{fleet.agent.log_tail()}"
    fleet.start_agent(settings=f'files.shim_socket = "{fleet.shim_socket}"\n{SETTINGS}')


def next_answer(fleet: Fleet, session: Pinned, text: str) -> wire.Answer:
    """Sends the session's next turn until it is answered. Before that, only refusals that say when
    to try again may come."""
    begin = time.monotonic()
    request = body(text, TOKENS, session_params={"id": session.id})
    while (answer := wire.post(f"{fleet.router_url}/generate", request)).status == 503:
        assert int(answer.headers["retry-after"]) <= 3, f"the time to wait in {answer}"
        assert time.monotonic() < begin + BACK_SECONDS_MAX, f"still {answer}"
        time.sleep(0.1)
    print(f"    answered after {time.monotonic() - begin:.2f} s", flush=True)
    return answer


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
