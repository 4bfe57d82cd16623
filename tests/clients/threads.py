"""Message threads of the `anthropic` library, on which its tool runner relies by itself.

The library asks the server to keep the conversation and then sends only each new message. SGLang
ignores that, and would answer to the new message alone. At Berth the library has to learn that
there are no threads; it then sends whole histories by itself.
"""

from pathlib import Path

from clients.places import Cluster, Target
from clients.plugin import Case, Runs, Suite
from clients.programs import HERE, Outcome, environment, outcomes, run

CASES = ("thread", "runner", "runner-streamed")


class Threads:
    """A thread of several turns, and the tool runner, streamed or not."""

    def cases(self) -> list[str]:
        environment("sdks")
        return list(CASES)

    def run(self, target: Target, cases: list[str], folder: Path) -> dict[str, Outcome]:
        folder.mkdir(parents=True, exist_ok=True)
        report, chosen = folder / "report.jsonl", folder / "cases"
        chosen.write_text("\n".join(cases))
        env = target.env() | {"CLIENTS_REPORT": str(report), "CLIENTS_CASES": str(chosen)}
        command = [str(environment("sdks") / "bin/python"), str(HERE / "inner/message_threads.py")]
        _, printed = run("threads", command, folder, env)
        return outcomes(report, cases, printed)


SUITES = (Suite("anthropic-threads", Threads(), "messages", quick=("simulator",)),)


def test_threads(cluster: Cluster, case: Case, runs: Runs) -> None:
    runs.outcome(cluster, case).check()
