"""The page audit of a real engine: it equals the engine's own counters, for pool and sessions.

Each test restarts the agent on the socket where the engine's shim looks for it.
"""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from integration import wire
from integration.fleet import SETTLE_SECONDS_MAX, Fleet
from integration.ledger import figures, wait_figures
from integration.pages import audit, differences, faults, run_audit_command, whole_pages
from integration.processes import wait_until
from integration.seams import written
from integration.shim import Direct, text_of
from integration.turns import Pinned, finished_turn
from integration.with_shim import with_shim

AUDITS_MIN = 3
# As many turns as fit in the context.
TURNS_MAX = 20


def _same(fleet: Fleet) -> bool:
    return figures(fleet)["pool_used_tokens"] == fleet.pool_used_tokens()


def check(fleet: Fleet) -> None:
    """Checks that the audit of an idle engine equals the engine's account, to the page: the
    classes of pages and the sessions."""
    wait_until(fleet.agent, "saying what the engine says", lambda: _same(fleet), SETTLE_SECONDS_MAX)
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    # The account of the free pages may come a moment later.
    while (found := differences(fleet)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == [], "where the audit isn't the engine's account"


def test_it_equals_the_engines_account(fleet: Fleet) -> None:
    with with_shim(fleet):
        check(fleet)
        sessions = []
        for number in range(4):
            session = Pinned(fleet)
            # Two of the sessions begin with the same text and share whole pages through the radix
            # tree.
            same = "The same beginning of both of them, long enough for some pages. "
            session.turn((same if number < 2 else text_of(30 + number)) + str(number), 9 + number)
            sessions.append(session)
            check(fleet)
        for session in sessions:
            session.turn(" And more of it, beyond a page.", 12)
        # A plain turn, whose KV is then in the radix tree alone.
        finished_turn(wire.post(f"{fleet.router_url}/generate", {
            "text": text_of(200), "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        }))
        check(fleet)
        before = {one["incarnation"]: one for one in audit(fleet)["sessions"]}
        free = audit(fleet)["pages"]["classes"]["free"]
        while sessions:
            sessions.pop().close()
            wait_figures(fleet, {"rows_held": len(sessions)})
            check(fleet)
            after = audit(fleet)
            left = {one["incarnation"] for one in after["sessions"]}
            [gone] = before.keys() - left
            now = after["pages"]["classes"]["free"]
            assert now - free == before.pop(gone)["freed_by_close_pages"], (
                "pages that the close freed"
            )
            # A page that the closed session shared may belong to a single session now.
            before = {one["incarnation"]: one for one in after["sessions"]}
            free = now
        check(fleet)


def test_it_is_sound_while_turns_run(fleet: Fleet) -> None:
    with with_shim(fleet, "audit.interval_s = 1\n"), ThreadPoolExecutor() as clients:
        sessions = [Pinned(fleet) for _ in range(3)]

        seen = threading.Event()

        def talk(session: Pinned) -> None:
            # The turns go on until enough audits were made, however fast both are.
            for number in range(TURNS_MAX):
                session.turn(f" Turn {number} of it, and some more words.", 40)
                if number >= 5 and seen.is_set():
                    return

        talks = [clients.submit(talk, session) for session in sessions]
        audits = 0
        try:
            while not all(each.done() for each in talks):
                found = audit(fleet)["pages"]
                assert faults(found) == [], "what is wrong while turns run"
                audits += found["held_pages"] > 0
                if audits >= AUDITS_MIN:
                    seen.set()
        finally:
            seen.set()
        for each in talks:
            each.result()
        assert audits >= AUDITS_MIN, f"only {audits} audits while turns ran"
        check(fleet)
        for session in sessions:
            session.close()


def test_sealed_pages_are_compared(fleet: Fleet) -> None:
    # The agent makes no audits of its own between those that the test asks for.
    with with_shim(fleet, "audit.interval_s = 0\n"):
        session = Pinned(fleet)
        session.turn(text_of(60), 10)
        sealed = 69 // fleet.page_size
        audit(fleet)
        assert audit(fleet)["pages"]["compared_pages"] == sealed, (
            "pages compared with the first audit"
        )
        session.turn(" More of it.", 10)
        # An audit may compare only the pages that are new to it; the audit after it compares the
        # others.
        compared = [audit(fleet)["pages"]["compared_pages"] for _ in range(2)]
        assert max(compared) >= sealed, f"{compared} pages compared, {sealed} were sealed before"
        session.close()


def _reported_pages(fleet: Fleet) -> int:
    [worker] = wire.get(f"{fleet.router_url}/v1/workers").json()["workers"]
    return worker["load"]["pages"]["held_pages"]


def test_it_is_shown_to_people_and_in_the_metrics(fleet: Fleet) -> None:
    with with_shim(fleet):
        session = Pinned(fleet)
        session.turn(text_of(40), 10)
        with Direct(fleet) as foreign:
            foreign.turn(text_of(30), 5)
            done = run_audit_command(fleet)
            assert done.returncode == 0, "the exit status"
            assert f"not ours: {foreign.id}" in done.stdout, done.stdout
        wait_figures(fleet, {"rows_held": 1, "foreign_tokens": 0})
        pages = whole_pages(fleet, written(50))
        done = run_audit_command(fleet)
        assert "no faults" in done.stdout and f" {pages} held" in done.stdout, done.stdout
        text = wire.get(f"http://{fleet.agent_admin}/metrics").body.decode()
        for line in (
            f'berth_agent_pool_pages{{dp_rank="0",state="held"}} {pages}',
            'berth_agent_pool_page_faults{dp_rank="0",kind="leaked"} 0',
        ):
            assert line in text, f"no line {line!r} in {text}"
        wait_until(
            fleet.router, "the audit's pages", lambda: _reported_pages(fleet) == pages,
            SETTLE_SECONDS_MAX,
        )
        spent, audits = (float(re.search(rf"audit_scheduler_seconds_{name} (\S+)", text)[1])
                         for name in ("sum", "count"))
        print(f"    {1e6 * spent / audits:.0f} us of the scheduler's thread per audit", flush=True)
        session.close()
