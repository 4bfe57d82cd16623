"""SGLang's own test kits from its wheel, unmodified, at the router's URL."""

from clients.places import Cluster
from clients.plugin import Case, Runs, Suite
from clients.programs import PytestProgram


def kit(*names: str) -> PytestProgram:
    only = tuple(f"::Test{name}::" for name in names)
    return PytestProgram("kits", None, ("test_kits.py",), only, ("--disable-plugin-autoload",))


SUITES = (
    Suite("kits", kit(
        "ApiContract", "Anthropic", "AbortAll", "CacheHit", "Pause", "PrefixBranching",
        "StreamingSession",
    ), quick=("simulator",)),
    Suite("kits-small", kit("AbortLeak"), "small", quick=("simulator",)),
    Suite("kits-waiting", kit("WaitingTimeout"), "one-row", kinds=("engine",)),
    Suite("kits-running", kit("RunningTimeout"), "timeouts", kinds=("engine",)),
)


def test_kit(cluster: Cluster, case: Case, runs: Runs) -> None:
    runs.outcome(cluster, case).check()
