"""What must hold when nothing runs.

The engine lives and answers, and Berth's account of the pool equals the engine's own.
"""

import http.client
import re
import time
from collections.abc import Callable
from typing import Any

from integration import wire
from integration.fleet import Fleet
from integration.pages import differences
from soak.engine import side_by_side
from soak.oracle import Oracle, Turn, Verdict
from soak.wire import read

PLAIN_SECONDS_MAX = 30
CONTROL_SECONDS_MAX = 30
# The figures follow the end of the last turn by an engine sample and a report; an abort may take
# seconds.
SETTLED_SECONDS_MAX = 60
FIGURE = re.compile(r'^berth_agent_([a-z_]+)\{dp_rank="\d+"\} (\d+)$', re.M)


def plain_turn_problem(url: str) -> str | None:
    """Returns why a plain turn isn't answered in time, or None if it is."""
    body = {"text": "Still here?", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    begin = time.monotonic()
    try:
        answer = wire.post(f"{url}/generate", body, seconds=PLAIN_SECONDS_MAX)
    except TimeoutError:
        return f"wedged: a plain turn isn't answered within {PLAIN_SECONDS_MAX} s"
    except (OSError, http.client.HTTPException) as error:
        return f"dead: {type(error).__name__} {error} after {time.monotonic() - begin:.1f} s"
    reply = read(answer.status, answer.body)
    return None if reply.status == 200 else f"a plain turn: {reply.outcome} {reply.message}"


def serving_problems(fleet: Fleet) -> list[str]:
    """Returns the reasons why the fleet doesn't serve."""
    ended = [process.name for process in fleet.processes() if not process.alive()]
    places = {"engine": fleet.engine_url, "router": fleet.router_url}
    asked = {name: plain_turn_problem(url) for name, url in places.items()}
    return [f"the {name} has ended" for name in ended] + [
        f"{name}: {problem}" for name, problem in asked.items() if problem
    ]


def figures(fleet: Fleet) -> dict[str, int]:
    """The figures of the agent's ledger, from its metrics."""
    text = wire.get(f"http://{fleet.agent_admin}/metrics", seconds=CONTROL_SECONDS_MAX).body.decode()
    return {name: int(value) for name, value in FIGURE.findall(text)}


def engine_figures(fleet: Fleet) -> dict[str, int]:
    loads = wire.get(f"{fleet.engine_url}/v1/loads", seconds=CONTROL_SECONDS_MAX).json()["loads"]

    def total(name: str) -> int:
        return sum(load[name] for load in loads)

    used = total("num_used_tokens")
    return {
        # Nothing runs, so pinned sessions hold all that is used.
        "pool_used_tokens": used,
        "pinned_tokens": used,
        "requests_running": total("num_running_reqs"),
        "requests_waiting": total("num_waiting_reqs"),
    }


def ledger_problems(fleet: Fleet) -> tuple[list[str], int]:
    """Returns where Berth's figures differ from the engine's, and the tokens used."""

    def differ() -> Any:
        theirs = engine_figures(fleet)
        ours = figures(fleet)
        wanted = {**theirs, "turns_running": 0}
        wrong = {name: (ours.get(name), value) for name, value in wanted.items()
                 if ours.get(name) != value}
        idle = theirs["requests_running"] == theirs["requests_waiting"] == 0
        return (not wrong and idle), wrong, theirs

    (good, wrong, theirs) = _eventually(differ)
    differing = [
        f"{name} is {ours}, the engine says {value}" for name, (ours, value) in wrong.items()
    ]
    problems = [] if good else differing or [f"the engine isn't idle: {theirs}"]
    return problems, theirs["pool_used_tokens"]


def page_problems(fleet: Fleet) -> list[str]:
    """Returns where the page audit differs from the engine's account."""

    def differ() -> Any:
        wrong = differences(fleet)
        return not wrong, wrong

    return _eventually(differ)[1]


def held_after_close(fleet: Fleet) -> list[str]:
    """Returns what is still held although every session is closed."""

    def held() -> Any:
        names = ("pinned_tokens", "pool_used_tokens", "rows_held")
        ours = figures(fleet)
        kept = {name: ours.get(name) for name in names if ours.get(name) != 0}
        used = engine_figures(fleet)["pool_used_tokens"]
        return (not kept and used == 0), kept, used

    good, kept, used = _eventually(held)
    if good:
        return []
    listed = wire.get(f"{fleet.router_url}/v1/sessions", seconds=CONTROL_SECONDS_MAX).body.decode()
    return [f"the engine holds {used} tokens, Berth says {kept}; sessions: {listed[:600]}"]


def _eventually(look: Callable[[], Any]) -> Any:
    """Calls `look` until the first value that it returns is true, within a time limit. Returns
    the last result."""
    deadline = time.monotonic() + SETTLED_SECONDS_MAX
    while not (found := look())[0] and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def judge(oracle: Oracle, turns: list[Turn]) -> tuple[list[str], int]:
    """Returns the wrong answers, and the number of differences within the noise."""

    def verdict_on(turn: Turn) -> Verdict:
        return oracle.judge(turn.context, turn.output, turn.logprobs)

    verdicts = side_by_side(verdict_on, turns)
    wrong = [
        f"{turn.session}, {turn.what}, {len(turn.context)} tokens of context: {verdict.why}"
        for turn, verdict in zip(turns, verdicts) if not verdict.right
    ]
    return wrong, sum(verdict.ties for verdict in verdicts)
