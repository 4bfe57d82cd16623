"""The conformance suite's engines: a launch for each group, and for each test an engine at rest."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from conformance.differences import listed
from conformance.engine import PAIR_PORTS, PORTS, Engine
from conformance.groups import GROUPS
from integration.processes import free_ports

NAMES = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine-sim", type=Path, metavar="PATH",
        help="the simulator's program; not given: the real engine",
    )


class LaunchScheduling(LoadScopeScheduling):
    """Keeps the tests of each group together, so that their engine is launched once."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("[")[2]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LaunchScheduling | None:
    return LaunchScheduling(config, log) if config.option.dist == "loadscope" else None


def pytest_configure_node(node: Any) -> None:
    """Gives a process of pytest-xdist the ports of its engines, which run one after the other, and
    those of its pair."""
    node.workerinput["port"] = free_ports(PORTS + PAIR_PORTS)[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[NAMES] = {item.nodeid for item in items}


@pytest.fixture
def all_names(pytestconfig: pytest.Config) -> set[str]:
    """The names of all tests, also of those that `-k` leaves out."""
    return pytestconfig.stash[NAMES]


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    config = request.config
    group, program = GROUPS[request.param], config.option.engine_sim
    port = getattr(config, "workerinput", {}).get("port") or free_ports(PORTS)[0]
    engine = Engine(group, folder, port, program, listed())
    try:
        engine.launch()
        yield engine
    finally:
        engine.stop()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Only a test that kills the engine may leave it dead."""
    if "engine" not in pyfuncitem.funcargs:
        return (yield)
    engine: Engine = pyfuncitem.funcargs["engine"]
    kills = pyfuncitem.get_closest_marker("kills")
    if not engine.alive():
        engine.launch()
    try:
        engine.begin(pyfuncitem.nodeid)
        result = yield
        engine.check_differences()
        assert kills or engine.alive(), f"the engine has ended\n{engine.process.log_tail(12)}"
        return result
    except Exception:
        if not kills:
            _clean_up(engine)
        raise


def _clean_up(engine: Engine) -> None:
    """Removes what a failed test has left behind, so that it doesn't fail the next test."""
    try:
        engine.clean()
    except Exception:
        engine.stop()
