"""Do the alerts fire when they should, and only then? Does the runbook have an entry for each?

promtool, of Debian's package prometheus, runs the unit tests in alerts/.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deploy.programs import DEPLOY, HERE, run
from deploy.queries import RULES, alerts

ALERTS = {rule["alert"]: rule for rule in alerts()}
UNIT_TESTS = sorted((HERE / "alerts").glob("*.yaml"))
RUNBOOK = (DEPLOY / "docs/runbook.md").read_text()
PARTS = ("Means", "Look at", "Do")
FIRING = re.compile(r'ALERTS\{alertname="(\w+)", alertstate="firing"\}')


@pytest.fixture(scope="module")
def promtool(find_tool: Callable[[str], str]) -> Path:
    return Path(find_tool("prometheus")) / "promtool"


def entries() -> list[tuple[str, str]]:
    """Returns the headings of the runbook's entries, each with its text."""
    parts = re.split(r"^### (.+)\n", RUNBOOK, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def test_prometheus_takes_the_rules(promtool: Path) -> None:
    made = run(promtool, "check", "rules", *RULES)
    assert made.returncode == 0, made.stderr
    assert len(ALERTS) == len(alerts()), "two alerts have one name"


@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should(promtool: Path, file: Path) -> None:
    made = run(promtool, "test", "rules", file)
    assert made.returncode == 0, made.stdout + made.stderr


def test_every_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    firing, quiet = set(), set()
    for file in UNIT_TESTS:
        tests = yaml.safe_load(file.read_text())
        assert [(file.parent / rules).resolve() for rules in tests["rule_files"]] == [
            DEPLOY / "prometheus" / file.name
        ]
        for test in tests["tests"]:
            for evaluation in test["promql_expr_test"]:
                [name] = FIRING.findall(evaluation["expr"])
                # A misspelt test could be about another alert than it says.
                assert test["name"].split(",")[0] == name, f"{file.name}: {test['name']}"
                (firing if evaluation["exp_samples"] else quiet).add(name)
    assert firing == set(ALERTS), firing ^ set(ALERTS)
    assert quiet == set(ALERTS), quiet ^ set(ALERTS)


def test_alerts_say_how_urgent_they_are_and_what_to_do() -> None:
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        texts = rule["annotations"]
        assert set(texts) == {"summary", "description", "runbook"}, name
        assert texts["runbook"] == f"deploy/docs/runbook.md#{name.lower()}"
        assert not texts["summary"].endswith(".") and texts["description"].endswith("."), name


def test_the_runbook_has_an_entry_for_each_alert_and_no_other() -> None:
    headings = [heading for heading, _ in entries()]
    assert sorted(headings) == sorted(ALERTS), set(headings) ^ set(ALERTS)
    for name, entry in entries():
        assert re.findall(r"^\*\*([\w ]+)\.\*\* ", entry, re.MULTILINE) == list(PARTS), name


def test_commands_of_the_runbook_exist(bin_dir: Path) -> None:
    commands = set(re.findall(r"`berth((?: [a-z]+)+)", RUNBOOK))
    assert len(commands) > 5
    for command in commands:
        made = run(bin_dir / "berth", *command.split(), "--help")
        assert made.returncode == 0, f"berth{command}: {made.stderr}"


def test_settings_of_the_runbook_exist() -> None:
    guides = [path for path in (DEPLOY / "docs").glob("*.md") if path.name != "runbook.md"]
    tables = "\n".join(re.findall(r"^\| `.*", "\n".join(map(Path.read_text, guides)), re.MULTILINE))
    tables_of_settings = "engine|sessions|limits|files|audit|connections|placement|timeouts|claims"
    settings = set(re.findall(rf"`((?:{tables_of_settings})\.[a-z_]+)`", RUNBOOK))
    assert len(settings) > 5
    assert not {key for key in settings if f"`{key}`" not in tables}
