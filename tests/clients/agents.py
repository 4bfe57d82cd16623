"""Coding agents and libraries, started with the commands of the guide `agents.md`.

Each gets its answer through the router, in a session where the guide says so.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from deploy.pages import DOCS, Block, read_blocks
from integration import wire

from clients.places import Cluster, Target
from clients.plugin import Case
from clients.programs import environment, run

HERE = "tests/clients/agents.py"
# What the guide writes in the place of an address.
ROUTER = "http://127.0.0.1:8080"
SECONDS_MAX = 300
# The environment of each program that isn't in `agents`.
ENVIRONMENTS = {"python3": "sdks"}
BLOCKS = [block for block in read_blocks(DOCS / "agents.md")
          if block.mark and block.mark["by"] == HERE]


def described(block: Block) -> tuple[str, bool]:
    """Returns a block's program, and whether the guide says that it runs in a session."""
    program, how = block.mark["how"].split(" ", 1)
    assert how in ("in a session", "without a session"), f"{block}: {how}"
    return program, how == "in a session"


def programs_folder(program: str) -> Path:
    """Returns the folder that has a program, after installing it if it is missing."""
    name = ENVIRONMENTS.get(program, "agents")
    folder = environment(name)
    return folder / ("node_modules/.bin" if name == "agents" else "bin")


def session_turns(cluster: Cluster) -> int:
    """Returns how many turns ran in sessions."""
    sessions = wire.get(f"{cluster.router_url}/v1/sessions").json()["sessions"]
    return sum(session["turns"] for session in sessions)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: described(block)[0])
@pytest.mark.at(launch="programs", kinds=("simulator",))
def test_a_program_runs_as_the_guide_says(
    block: Block, cluster: Cluster, case: Case, target_of: Target, tmp_path: Path
) -> None:
    program, is_in_session = described(block)
    folder = programs_folder(program)
    placed, turns = cluster.placements(), session_turns(cluster)
    path = f"{folder}:{os.environ['PATH']}"
    assert shutil.which(program, path=path), f"{program} isn't installed"
    text = block.text.replace(ROUTER, target_of.url).replace("qwen3-coder", target_of.model)
    # What a block writes belongs into the test's folder.
    text = f'cd "$HOME"\n{text}'
    status, printed = run(program, ["bash", "-ec", text], tmp_path, {"PATH": path}, SECONDS_MAX)
    assert status == 0, f"{program}'s status: {status}\n{printed[-3000:]}"
    if case.bare:
        return
    added = sum(cluster.placements().values()) - sum(placed.values())
    assert added > 0, f"{program} asked nothing:\n{printed[-3000:]}"
    assert (session_turns(cluster) > turns) == is_in_session, json.dumps(cluster.placements())
