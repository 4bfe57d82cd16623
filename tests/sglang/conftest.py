"""What the suites share: the folder for logs, a line for each test, and the last line."""

import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# A failed assertion outside the test modules shows the compared values too.
pytest.register_assert_rewrite("conformance", "integration")

FOLDER = pytest.StashKey[Path]()
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
# A longer set-up has started an engine.
SETUP_SECONDS_SHOWN = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--list", dest="collectonly", action="store_true", help="list the tests")


def ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(_number: int, _frame: object) -> None:
    # Another signal must not interrupt the clean-up.
    ignore_signals()
    raise KeyboardInterrupt


def pytest_sessionstart(session: pytest.Session) -> None:
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    # A process of pytest-xdist gets the folder from the process that started it.
    given = getattr(session.config, "workerinput", {}).get("folder")
    session.config.stash[FOLDER] = Path(given or tempfile.mkdtemp(prefix="berth-tests-"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["folder"] = str(node.config.stash[FOLDER])


@pytest.fixture(scope="session")
def folder(pytestconfig: pytest.Config) -> Path:
    """The folder for logs. It stays if a test fails."""
    return pytestconfig.stash[FOLDER]


def pytest_itemcollected(item: pytest.Item) -> None:
    # So `-k refusals::` selects the tests of a file.
    item.extra_keyword_matches.add(f"{item.path.stem}::{item.name}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        print(report.longreprtext, flush=True)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str]:
    """Returns the test's line as the letter that pytest prints when the test has ended."""
    name = report.nodeid
    if report.failed:
        lines = [f"{name}  FAILED  ({report.duration:.2f} s)", *report.longreprtext.splitlines()]
        for title, printed in report.sections:
            lines += [f"{title}:", *printed.splitlines()]
        return "failed", "\n    ".join(lines) + "\n", ""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        return "skipped", f"{name}  skipped  ({reason})\n", ""
    if report.when == "call":
        return "passed", f"{name}  ok  ({report.duration:.2f} s)\n", ""
    if report.when == "setup" and report.duration > SETUP_SECONDS_SHOWN:
        return "", f"{name}  is set up  ({report.duration:.2f} s)\n", ""
    return "", "", ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    yield
    config = session.config
    if hasattr(config, "workerinput"):
        return
    folder = config.stash[FOLDER]
    if session.exitstatus and any(folder.iterdir()):
        print(f"the logs are in {folder}")
    else:
        shutil.rmtree(folder)
    if session.exitstatus == pytest.ExitCode.INTERRUPTED:
        session.exitstatus = INTERRUPTED
    elif not config.option.collectonly and not config.getoption("only_engine", False):
        reports = config.pluginmanager.get_plugin("terminalreporter").stats
        failed = {each.nodeid for kind in ("failed", "error") for each in reports.get(kind, [])}
        passed = {each.nodeid for each in reports.get("passed", [])} - failed
        for name in sorted(failed):
            print(f"failed: {name}")
        print(f"{len(passed)} passed, {len(failed)} failed", flush=True)
