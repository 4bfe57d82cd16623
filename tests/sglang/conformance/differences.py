"""What the simulator does otherwise than the real engine, and why that is acceptable.

`differences.toml` beside this file is the one list of them.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("differences.toml")


@dataclass(frozen=True)
class Difference:
    """The simulator's value for one expectation of one case."""

    case: str
    what: str
    simulator: Any
    why: str


def listed() -> list[Difference]:
    entries = tomllib.loads(LIST.read_text()).get("difference", [])
    return [Difference(**entry) for entry in entries]
