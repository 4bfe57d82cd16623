"""Are the dashboards of Grafana well formed?

Grafana itself doesn't run here: the files are parsed, and what Grafana asks of them is looked up.
observing.py runs their queries.
"""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from deploy.queries import DASHBOARDS, panels, substitute

COLUMNS = 24
# Grafana's ids of units, as far as they are used here.
UNITS = {
    "none", "short", "bytes", "Bps", "s", "percentunit", "reqps", "ops", "cps", "watt", "celsius",
}


@pytest.fixture(params=DASHBOARDS, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict:
    return json.loads(request.param.read_text())


def test_dashboards_are_found_by_name_and_tag() -> None:
    found = {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}
    assert set(found) == {"devices", "fleet", "sessions", "worker"}
    for key in ("uid", "title"):
        assert len({each[key] for each in found.values()}) == len(found), f"two have one {key}"
    for each in found.values():
        assert re.fullmatch(r"berth-[a-z]+", each["uid"])
        # The menu of each leads to all others.
        [link] = each["links"]
        assert link["type"] == "dashboards" and set(link["tags"]) == set(each["tags"]) == {"berth"}


def test_panels_say_what_they_show(dashboard: dict) -> None:
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(set(titles)) == len(titles) > 10
    for panel in panels(dashboard):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references), panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_panels_lie_side_by_side(dashboard: dict) -> None:
    found = panels(dashboard)
    assert [panel["id"] for panel in found] == list(range(1, len(found) + 1))
    for panel in found:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
    for one, other in combinations(found, 2):
        a, b = one["gridPos"], other["gridPos"]
        is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        is_above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert is_beside or is_above, f"{one['title']} covers {other['title']}"


def test_every_variable_is_defined_and_used(dashboard: dict) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    rest = json.dumps(dashboard)
    used = set(re.findall(r"\$\{?([a-z]+)\b", rest))
    assert used == set(variables), used ^ set(variables)
    for panel in panels(dashboard):
        for target in panel["targets"]:
            assert "$" not in substitute(target["expr"]), target["expr"]


def test_the_legend_names_labels_of_the_query(dashboard: dict) -> None:
    # Behind `sum by (…)`, other labels are gone.
    for panel in panels(dashboard):
        for target in panel["targets"]:
            expr, legend = target["expr"], target["legendFormat"]
            named = set(re.findall(r"{{(\w+)}}", legend))
            if grouped := re.match(r"(?:sum|max|avg|count)(?: by \(([^)]*)\))?\s*\(", expr):
                labels = {label.strip() for label in (grouped[1] or "").split(",")}
                assert named <= labels, f"{panel['title']}: {legend}"


def test_files_can_be_edited_by_hand() -> None:
    for path in DASHBOARDS:
        assert len(Path(path).read_text().splitlines()) < 250, path
