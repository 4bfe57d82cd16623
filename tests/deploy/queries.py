"""Reads the alerts and the dashboards: their queries, and what these name."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from deploy.programs import DEPLOY

RULES = sorted((DEPLOY / "prometheus").glob("*.yaml"))
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
# What stands for a dashboard's variables, so that Prometheus can evaluate its queries.
VARIABLES = {
    "$__rate_interval": "1m", "$__range": "5m", "$job": ".*", "$router": ".*", "$worker": ".*",
    "$gpus": "1", "$gpu": ".*",
}
SELECTOR = re.compile(r"\b((?:berth|process)_\w+|up|ALERTS)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Query:
    """One query, and where it stands."""

    place: str
    expr: str

    def selectors(self) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
        """Yields each metric's name, with its matchers: label, operator, value."""
        for name, matchers in SELECTOR.findall(GROUPING.sub("", self.expr)):
            yield name, MATCHER.findall(matchers)

    def grouping_labels(self) -> set[str]:
        groups = GROUPING.findall(self.expr)
        return {label.strip() for group in groups for label in group.split(",")} - {""}


def alerts() -> list[dict]:
    """Returns all alerts, as Prometheus reads them."""
    files = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def panels(dashboard: dict) -> list[dict]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def substitute(expr: str) -> str:
    """Returns a dashboard's query with values for its variables."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def dashboard_queries() -> list[Query]:
    """Returns the queries of all panels and variables, with values for the variables."""
    found = []
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for panel in panels(dashboard):
            for target in panel["targets"]:
                place = f"{path.stem}: {panel['title']}"
                found.append(Query(place, substitute(target["expr"])))
        for variable in dashboard["templating"]["list"]:
            if label_values := re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]):
                series, label = label_values.groups()
                query = f"count by ({label}) ({substitute(series)})"
                found.append(Query(f"{path.stem}: variable {variable['name']}", query))
    return found


def alert_queries() -> list[Query]:
    return [Query(rule["alert"], rule["expr"]) for rule in alerts()]
