"""The cases that can't pass, each with the reason: the entries of expected.toml."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Failure:
    """An entry of expected.toml."""

    # The case's name; `*` stands for any text.
    case: str
    # A text that the failure must contain, also at the bare engine unless `bare_says` is set.
    says: str
    why: str
    # What the case does at the engine itself, without Berth: "fails" or "passes".
    bare: str
    # The kind of engine; empty for both.
    at: str = ""
    # What the failure at the bare engine must contain, if that fails for another reason.
    bare_says: str = ""

    def __post_init__(self) -> None:
        assert self.bare in ("fails", "passes"), f"bare of {self.case}: {self.bare!r}"
        assert self.at in ("", "engine", "simulator"), f"at of {self.case}: {self.at!r}"
        assert self.says and self.why, f"{self.case} needs a text and a reason"

    def covers(self, case: str, kind: str) -> bool:
        pattern = ".*".join(re.escape(part) for part in self.case.split("*"))
        return self.at in ("", kind) and re.fullmatch(pattern, case) is not None

    def judge(self, bare: bool, error: str | None) -> str | None:
        """Returns what is wrong with how the case ended, or None if it ended as listed. `error`
        is None if the case passed."""
        if bare and self.bare == "passes":
            return error and f"is listed to pass at the bare engine, but fails:\n{error}"
        if error is None:
            return f"is listed to fail with {self.says!r}, but passes: change expected.toml"
        says = self.bare_says if bare and self.bare_says else self.says
        if says not in error:
            return f"is listed to fail with {says!r}, but fails otherwise:\n{error}"
        return None


@cache
def listed() -> tuple[Failure, ...]:
    file = Path(__file__).with_name("expected.toml")
    return tuple(Failure(**entry) for entry in tomllib.loads(file.read_text()).get("failure", []))


def find(case: str, kind: str) -> Failure | None:
    found = [failure for failure in listed() if failure.covers(case, kind)]
    assert len(found) <= 1, f"{case} at the {kind} is listed {len(found)} times"
    return found[0] if found else None
