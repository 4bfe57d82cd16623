"""Faults planted in a real engine's pool: the page audit finds each and names its sessions.

No turn runs on these sessions any more. The engine is one of its own, and of no use afterwards.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from integration import wire
from integration.fleet import Fleet, start_engine
from integration.pages import audit, faults
from integration.processes import shim_env, wait_until
from integration.shim import text_of
from integration.turns import Pinned, body, refusal_code
from integration.with_shim import by_shim

# The engine looks for the file between two steps. A step takes 0.1 s on a busy machine.
PLANT_SECONDS_MAX = 30
MEET_SECONDS_MAX = 30

PLUGIN = Path(__file__).resolve().parents[1] / "plant"


class Planted(Fleet):
    """A fleet whose engine plants the faults that a file names."""

    @property
    def file(self) -> Path:
        return self.folder / "plant.json"

    def start_engine(self) -> None:
        env = shim_env(self.shim_socket, self.bin_dir)
        env |= {
            "PYTHONPATH": f"{PLUGIN}:{env['PYTHONPATH']}",
            "BERTH_PLANT": str(self.file),
        }
        self.engine, self.engine_url = start_engine(self.folder, self.page_size, env=env)
        self.wait_engine()

    def plant(self, fault: str, *sessions: str) -> None:
        written = self.file.with_suffix(".new")
        written.write_text(json.dumps({"fault": fault, "sessions": sessions}))
        written.rename(self.file)
        wait_until(self.engine, "planting", lambda: not self.file.exists(), PLANT_SECONDS_MAX)


@contextmanager
def planted(fleet: Fleet, name: str, settings: str = "") -> Iterator[Planted]:
    """Starts a second fleet beside this one, whose shim is connected to its agent. `settings` are
    further lines of the agent's settings file."""
    folder = fleet.folder / name
    folder.mkdir(exist_ok=True)
    own = Planted(folder, fleet.bin_dir, fleet.page_size)
    try:
        own.start_engine()
        own.start_agent(settings=f'files.shim_socket = "{own.shim_socket}"\n{settings}')
        own.start_router()
        wait_until(own.agent, "hearing from the shim", lambda: by_shim(own), MEET_SECONDS_MAX)
        yield own
    finally:
        own.stop()


def _incarnation(fleet: Fleet, known: set[str]) -> str:
    """The engine-side id of the session that was opened last."""
    [new] = {one["incarnation"] for one in audit(fleet)["sessions"]} - known
    known.add(new)
    return new


def _findings(fleet: Fleet) -> dict[str, Any]:
    return {each["kind"]: each for each in faults(audit(fleet)["pages"])}


def _turn(fleet: Fleet, session: Pinned) -> wire.Answer:
    asked = body(" And now?", 5) | {"session_params": {"id": session.id}}
    return wire.post(f"{fleet.router_url}/generate", asked)


def test_planted_faults_are_found_and_their_sessions_take_no_turn(fleet: Fleet) -> None:
    with planted(fleet, "planted") as with_faults:
        _check(with_faults)


def _check(fleet: Planted) -> None:
    known: set[str] = set()
    sessions = []
    for letter in "abcd":
        session = Pinned(fleet)
        # The answer is long because only the KV behind the prompt lies outside the radix tree.
        session.turn(letter * 40 + text_of(10), 50)
        sessions.append((session, _incarnation(fleet, known)))
    (written, first), (sound, _), (one, third), (other, fourth) = sessions
    assert _findings(fleet) == {}, "what is wrong before"

    fleet.plant("written", first)
    found = _findings(fleet)
    assert list(found) == ["changed"], "what is found after a write"
    [named] = found["changed"]["named"]
    assert named["sessions"] == [first], "whose page it was"
    assert refusal_code(_turn(fleet, written), 409, "a turn on it") == "kv_corrupt", "the code"
    sound.turn(" And you?", 10)

    fleet.plant("aliased", third, fourth)
    found = _findings(fleet)
    assert found["aliased"]["count"] == 1, "pages that two sessions have"
    [named] = found["aliased"]["named"]
    assert sorted(named["sessions"]) == sorted([third, fourth]), "whose they are"
    for session in (one, other):
        assert refusal_code(_turn(fleet, session), 409, "a turn on it") == "kv_corrupt", "the code"
    sound.turn(" And still?", 10)
