"""The option --quick, and the programs that the checks use."""

from collections.abc import Callable
from pathlib import Path

import pytest
from integration.fleet import binaries

from deploy.programs import Missing, tool

PROGRAMS = ("berth", "berth-agent", "berth-manuals", "berth-router", "berth-serve", "engine-sim")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="what the CI runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.quick:
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(scope="session")
def bin_dir() -> Path:
    """The folder of the release binaries."""
    return binaries(PROGRAMS)


@pytest.fixture(scope="session")
def find_tool() -> Callable[[str], str]:
    """Returns the path of a tool that tests/deploy/tool provides, or skips the test."""
    found: dict[str, str | Missing] = {}

    def find(name: str) -> str:
        if name not in found:
            try:
                found[name] = tool(name)
            except Missing as why:
                found[name] = why
        if isinstance(known := found[name], Missing):
            pytest.skip(str(known))
        return known

    return find


@pytest.fixture(scope="session")
def helm(find_tool: Callable[[str], str]) -> str:
    """The path of the real helm."""
    return find_tool("helm")
