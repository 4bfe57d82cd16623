"""The options of the suites of others, their fleets, and the cases that can't pass.

A test module either lists `SUITES`, whose cases become one test each, or has tests with the marker
`at(launch)`. Each runs before each kind of engine. A case that is listed in expected.toml also runs
at the bare engine.
"""

from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from integration.fleet import binaries
from integration.processes import Failed

from clients import expected
from clients.places import KINDS, LAUNCHES, Cluster, Target, target
from clients.programs import Missing, Outcome, Program

PROGRAMS = ("berth-agent", "berth-router", "engine-sim")


@dataclass(frozen=True)
class Suite:
    """A program with many cases, before one launch of an engine."""

    name: str
    program: Program
    launch: str = "main"
    # The kinds of engine before which it runs, and those of the quick run.
    kinds: tuple[str, ...] = KINDS
    quick: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One test: what it is called in expected.toml, and where it runs."""

    name: str
    kind: str
    bare: bool
    suite: Suite | None = None
    # The suite's own name for it.
    own_name: str = ""

    @property
    def failure(self) -> expected.Failure | None:
        return expected.find(self.name, self.kind)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suites of others")
    group.addoption("--quick", action="store_true", help="what the CI runs")
    group.addoption("--at", choices=KINDS, help="only before this kind of engine")
    group.addoption("--bare", action="store_true", help="all at the bare engine, for comparison")
    group.addoption("--traces", metavar="FOLDER", help="recorded traces, for aiperf")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "at(launch, kinds, quick): the launch of the engine, the kinds of engine, and "
        "those of the quick run"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.option
    found = metafunc.definition.get_closest_marker("at")
    suites = getattr(metafunc.module, "SUITES", ()) if found is None else ()
    made: list[tuple[str, Case]] = []
    if found:
        at = Suite(metafunc.function.__name__, None, **found.kwargs)
        name = f"{metafunc.module.__name__.rpartition('.')[2]}/{at.name.removeprefix('test_')}"
        made = [(at.launch, Case(name, kind, False)) for kind in _kinds(at, option)]
    for suite in suites:
        if not (kinds := _kinds(suite, option)):
            continue
        try:
            names = suite.program.cases()
        except Missing as why:
            names = [f"skipped: {why}"]
        made += [
            (suite.launch, Case(f"{suite.name}/{_short(name)}", kind, False, suite, name))
            for kind in kinds for name in names
        ]
    if option.bare:
        made = [(launch, _at_bare(case)) for launch, case in made]
    else:
        made += [(launch, _at_bare(case)) for launch, case in made if case.failure]
    metafunc.parametrize(
        ("cluster", "case"),
        [((case.kind, launch), case) for launch, case in made],
        indirect=["cluster"], scope="session",
        ids=[f"{case.kind}{'-bare' if case.bare else ''}-{case.name}" for _, case in made],
    )


def _kinds(suite: Suite, option: Any) -> tuple[str, ...]:
    kinds = suite.quick if option.quick else suite.kinds
    return tuple(kind for kind in kinds if option.at in (None, kind))


def _short(name: str) -> str:
    """Returns a case's name without the folders of its file."""
    return name.rpartition("/")[2]


def _at_bare(case: Case) -> Case:
    return Case(case.name, case.kind, True, case.suite, case.own_name)


@pytest.fixture(scope="session")
def bin_dir() -> Path:
    return binaries(PROGRAMS)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, folder: Path, bin_dir: Path) -> Iterator[Cluster]:
    kind, launch = request.param
    cluster = Cluster(folder / f"{kind}-{launch}", bin_dir, kind, LAUNCHES[launch])
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def target_of(cluster: Cluster, case: Case) -> Target:
    """The address that the test gets: the router's, or the bare engine's."""
    return target(cluster, case.bare)


@dataclass
class Runs:
    """The outcomes of the programs' cases. A program runs once for all its chosen cases."""

    folder: Path
    chosen: dict[tuple[str, str, bool], list[str]]
    outcomes: dict[tuple[str, str, bool], dict[str, Outcome]] = field(default_factory=dict)

    def outcome(self, cluster: Cluster, case: Case) -> Outcome:
        """Returns how the case ended, after running its program if it hasn't run yet."""
        assert case.suite is not None
        if case.own_name.startswith("skipped: "):
            return Outcome(None, case.own_name)
        key = _key(case)
        if key not in self.outcomes:
            folder = self.folder / "-".join((case.suite.name, case.kind, "bare" * case.bare))
            where = target(cluster, case.bare)
            self.outcomes[key] = case.suite.program.run(where, self.chosen[key], folder)
        return self.outcomes[key][case.own_name]


def _key(case: Case) -> tuple[str, str, bool]:
    assert case.suite is not None
    return case.suite.name, case.kind, case.bare


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, folder: Path) -> Runs:
    chosen: dict[tuple[str, str, bool], list[str]] = defaultdict(list)
    for item in request.session.items:
        case = _case(item)
        if case and case.suite:
            chosen[_key(case)].append(case.own_name)
    return Runs(folder, chosen)


def _case(item: pytest.Item) -> Case | None:
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return case if isinstance(case, Case) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A test that runs at no kind of engine in this run stands there without a case.
    items[:] = [item for item in items if _case(item)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Judges a listed case by what is listed, and fails a case that ends a process."""
    case = _case(pyfuncitem)
    failure = case.failure if case else None
    error = None
    try:
        result = yield
    except Missing as why:
        pytest.skip(str(why))
    except (AssertionError, Failed) as raised:
        if failure is None:
            raise
        result, error = None, str(raised)
    if failure:
        wrong = failure.judge(case.bare, error)
        assert wrong is None, wrong
    cluster: Cluster = pyfuncitem.funcargs["cluster"]
    for process in cluster.processes():
        assert process.alive(), f"the {process.name} has ended\n{process.log_tail(12)}"
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Gives a test after a dead process a fleet that lives."""
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if cluster:
        cluster.revive()
