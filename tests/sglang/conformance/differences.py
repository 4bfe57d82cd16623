"""Deliberate differences between the simulator and the real engine, and why each is acceptable.

They are listed in `differences.toml` beside this file, and nowhere else.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("differences.toml")


@dataclass(frozen=True)
class Difference:
    """The simulator's value for one expectation of one test."""

    test: str
    what: str
    simulator: Any
    why: str


def listed() -> list[Difference]:
    entries = tomllib.loads(LIST.read_text()).get("difference", [])
    return [Difference(**entry) for entry in entries]


def test_each_listed_difference_names_a_test(all_names: set[str]) -> None:
    assert [each.test for each in listed() if each.test not in all_names] == []
