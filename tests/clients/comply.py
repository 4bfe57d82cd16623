"""llm-comply: whether answers have the form that OpenAI and Anthropic document."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from clients.places import Cluster, Target
from clients.plugin import Case, Runs, Suite
from clients.programs import Outcome, environment, run

QUOTED_CHARACTERS = 120


@dataclass(frozen=True)
class Comply:
    """The cases of one API."""

    api: str

    def cases(self) -> list[str]:
        command = [self._program(), "--list", "--format", self.api]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        # A case's line is indented by two spaces, and its description by more.
        return re.findall(r"^  (\S+)", said, re.MULTILINE)

    def run(self, target: Target, cases: list[str], folder: Path) -> dict[str, Outcome]:
        command = [
            self._program(), "--format", self.api, "--model", target.model, "--api-key", "a key",
            "--base-url", f"{target.url}/v1", "--filter", ",".join(cases), "--json",
        ]
        status, printed = run("comply", command, folder)
        assert "{" in printed, f"no results (status {status}):\n{printed}"
        results = json.loads(printed[printed.index("{"):])["results"]
        ends = {result["id"]: _outcome(result) for result in results}
        return {case: ends.get(case, Outcome(f"no result:\n{printed}")) for case in cases}

    def _program(self) -> str:
        return str(environment("api") / "bin/llm-comply")


def _outcome(result: dict) -> Outcome:
    errors = "\n".join(_shortened(error) for error in result.get("errors", []))
    if result["status"] == "skipped":
        return Outcome(None, f"its makers skip it: {errors}")
    return Outcome(None if result["status"] == "passed" else errors or "failed without a reason")


def _shortened(error: str) -> str:
    """Returns an error without most of the answer that it quotes."""
    if len(error) <= 2 * QUOTED_CHARACTERS:
        return error
    return f"{error[:QUOTED_CHARACTERS]} … {error[-QUOTED_CHARACTERS:]}"


SUITES = tuple(
    Suite(f"comply-{api}", Comply(api), "chats", quick=("simulator",))
    for api in ("openai-chat", "open-responses", "anthropic")
)


def test_form(cluster: Cluster, case: Case, runs: Runs) -> None:
    runs.outcome(cluster, case).check()
