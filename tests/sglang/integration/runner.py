"""Collects the tests, runs them one after the other, and prints a line for each."""

import fnmatch
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.fleet import Fleet


@dataclass(frozen=True)
class Test:
    name: str
    run: Callable[[Fleet], None]
    # Whether the test leaves a part of the fleet dead; such tests run after all others.
    last: bool


_tests: list[Test] = []


def test(function: Callable[[Fleet], None]) -> Callable[[Fleet], None]:
    """Registers a test under the names of its module and its function."""
    return _add(function, last=False)


def last_test(function: Callable[[Fleet], None]) -> Callable[[Fleet], None]:
    """Registers a test that leaves a part of the fleet dead; such tests run at the end."""
    return _add(function, last=True)


def _add(function: Callable[[Fleet], None], last: bool) -> Callable[[Fleet], None]:
    module = function.__module__.rsplit(".", 1)[-1]
    _tests.append(Test(f"{module}::{function.__name__}", function, last))
    return function


def selected(pattern: str | None) -> list[Test]:
    """Returns the tests whose name contains the pattern, or matches it if it has wildcards."""
    ordered = sorted(_tests, key=lambda test: test.last)
    if not pattern:
        return ordered
    wild = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return [test for test in ordered if fnmatch.fnmatchcase(test.name, wild)]


def run(tests: list[Test], fleet: Fleet, clean_up: Callable[[Fleet], None]) -> tuple[int, int]:
    """Returns how many tests passed and how many failed. A test that ends a process it shouldn't
    end has failed; the next test gets a new fleet."""
    passed = failed = 0
    width = max(len(test.name) for test in tests)
    for test in tests:
        fleet.opened.clear()
        begin = time.monotonic()
        problem = _problem(test, fleet)
        seconds = time.monotonic() - begin
        print(f"{test.name:{width}}  {'FAILED' if problem else 'ok'}  ({seconds:.2f} s)", flush=True)
        if problem:
            failed += 1
            clean_up(fleet)
            print("\n".join(f"    {line}" for line in problem.splitlines()), flush=True)
        else:
            passed += 1
    return passed, failed


def _problem(test: Test, fleet: Fleet) -> str | None:
    """Runs a test. Returns what went wrong, or None if it passed and left the fleet alive."""

    def run() -> None:
        fleet.revive()
        test.run(fleet)
        if not test.last:
            _need_alive(fleet)

    return problem_of(run)


def problem_of(run: Callable[[], None]) -> str | None:
    """Runs the function. Returns what went wrong and where, as text for people, or None."""
    try:
        run()
    except AssertionError as error:
        return f"{error or 'an assertion without words'}\n{_where(error)}"
    except Exception as error:  # Any exception fails the test.
        return f"{type(error).__name__}: {error}\n{_where(error)}"
    return None


def _need_alive(fleet: Fleet) -> None:
    for process in fleet.processes():
        assert process.alive(), (
            f"the {process.name} has ended with status {process.popen.returncode}\n"
            f"{process.log_tail(12)}"
        )


def _where(error: Exception) -> str:
    """The calls within the tests that led to the error, innermost last."""
    here = Path(__file__).parent.parent
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(here) and Path(frame.filename) != Path(__file__)
    ]
    return "\n".join(f"at {Path(f.filename).name}:{f.lineno}: {f.line}" for f in frames)


def equal(found: Any, expected: Any, what: str) -> None:
    assert found == expected, f"{what}: found {found!r}, expected {expected!r}"


def one_of(found: Any, allowed: Any, what: str) -> None:
    assert found in allowed, f"{what}: found {found!r}, allowed {list(allowed)!r}"
