"""The integration suite's options and its fleet, which starts once and is alive for each test."""

import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ignore_signals

from integration.fleet import PROGRAMS, Fleet, binaries
from integration.processes import Failed
from integration.seams import functions_off, is_before
from integration.turns import clean_up


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("integration suite")
    group.addoption("--page-size", type=int, default=16, help="the engine's (default 16)")
    group.addoption("--serve", action="store_true", help="berth serve for agent and router")
    group.addoption("--keep", action="store_true", help="leave the fleet running until Ctrl-C")
    group.addoption("--only-engine", action="store_true", help="run the engine alone, no tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for function in (each.args[0] for each in item.iter_markers("needs")):
            if reason := functions_off().get(function):
                item.add_marker(pytest.mark.skip(reason=reason))
        for release, change in (each.args for each in item.iter_markers("since")):
            if is_before(release):
                item.add_marker(pytest.mark.skip(reason=f"only since SGLang {release}, {change}"))


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, folder: Path) -> Iterator[Fleet]:
    options = request.config.option
    fleet = Fleet(folder, Path(), options.page_size, serves=options.serve)
    with _stopped_at_end(fleet):
        try:
            fleet.bin_dir = binaries((*PROGRAMS, "berth-serve") if options.serve else PROGRAMS)
            fleet.start_engine()
            fleet.start_agent()
            fleet.start_router()
        except Failed:
            request.session.shouldfail = "the fleet didn't start"
            raise
        yield fleet
        if options.keep:
            _keep(fleet)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that ends a process by mistake has failed, and the next test gets a new fleet."""
    if "fleet" not in pyfuncitem.funcargs:
        return (yield)
    fleet: Fleet = pyfuncitem.funcargs["fleet"]
    fleet.opened.clear()
    try:
        fleet.revive()
        result = yield
        if not pyfuncitem.get_closest_marker("kills"):
            _need_alive(fleet)
        return result
    except Exception:
        clean_up(fleet)
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if not options.only_engine:
        return None
    with tempfile.TemporaryDirectory(prefix="berth-integration-") as folder:
        fleet = Fleet(Path(folder), Path(), options.page_size)
        with _stopped_at_end(fleet):
            try:
                fleet.start_readmes_engine()
            except Failed as error:
                pytest.exit(str(error), 1)
            _keep(fleet)
    return True


def _need_alive(fleet: Fleet) -> None:
    for process in fleet.processes():
        assert process.alive(), (
            f"the {process.name} has ended with status {process.popen.returncode}\n"
            f"{process.log_tail(12)}"
        )


@contextmanager
def _stopped_at_end(fleet: Fleet) -> Iterator[None]:
    try:
        yield
    finally:
        ignore_signals()
        fleet.stop()


def _keep(fleet: Fleet) -> None:
    """Prints the addresses of the running processes, and waits for Ctrl-C or TERM."""
    print("integration: running; Ctrl-C ends it")
    print(f"  engine  {fleet.engine_url}", flush=True)
    if fleet.agent and fleet.router:
        print(f"  agent   http://{fleet.agent_data}  admin http://{fleet.agent_admin}")
        print(f"  router  {fleet.router_url}  admin http://{fleet.router_admin}", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass
