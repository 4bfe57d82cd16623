"""Compares the routes of the engine with those of the router, and with the guide to them."""

import re
from pathlib import Path

import pytest

from integration import wire
from integration.fleet import Fleet

GUIDE = Path(__file__).resolve().parents[3] / "deploy/docs/routes.md"
UNSERVED = "## Not served"


@pytest.mark.since("0.5.23", "the engine has the routes of the guide")
def test_each_route_of_the_engine_is_served_or_the_guide_says_why_not(fleet: Fleet) -> None:
    document = wire.get(f"{fleet.engine_url}/openapi.json").json()
    served, unserved = guide_paths()
    unknown = set()
    for path in document["paths"]:
        if path in unserved:
            continue
        assert path in served, f"the guide doesn't name {path}"
        # DELETE changes nothing: no route of the engine that the router serves has it.
        plain = path.replace("{", "").replace("}", "")
        answer = wire.request("DELETE", f"{fleet.router_url}{plain}")
        if answer.status == 404:
            unknown.add(path)
    assert not unknown, "routes that the guide says are served"
    for path in unserved & set(document["paths"]):
        answer = wire.request("DELETE", f"{fleet.router_url}{path}")
        assert answer.status == 404, f"{path}, which the guide says isn't served: {answer.status}"
    stale = unserved - set(document["paths"]) - {"/metrics", "/docs"}
    # A WebSocket isn't in the document, nor are routes that some models or flags bring.
    assert stale <= {"/v1/realtime", "/dumper/{method}", "/vertex_generate"}, "routes that are gone"


def guide_paths() -> tuple[set[str], set[str]]:
    """Returns the paths that the guide says are served, and those that aren't."""
    served, unserved = GUIDE.read_text().split(UNSERVED)
    rows = [
        re.findall(r"`(/[^`]*)`", row.split("|")[1])
        for text in (served, unserved)
        for row in text.splitlines()
        if row.startswith("| `")
    ]
    count = sum(1 for row in served.splitlines() if row.startswith("| `"))
    return {path for row in rows[:count] for path in row}, {
        path for row in rows[count:] for path in row
    }
