"""schemathesis: the router's own routes do what the served /openapi.json says."""

from pathlib import Path

import pytest

from clients.places import Cluster
from clients.programs import environment, run
from integration import wire

# Requests for each operation and check; more find nothing new in the time of a run.
EXAMPLES_MAX = 40


@pytest.mark.at(launch="main", quick=("simulator",))
def test_own_routes(cluster: Cluster, tmp_path: Path) -> None:
    document = wire.get(f"{cluster.router_url}/openapi.json")
    assert document.status == 200, f"/openapi.json: {document}"
    command = [
        str(environment("api") / "bin/schemathesis"), "run",
        f"{cluster.router_url}/openapi.json", "--max-examples", str(EXAMPLES_MAX),
        "--seed", "1", "--checks", "all", "--no-color",
        # Without keys on loopback, every credential is that of an admin.
        "--exclude-checks", "ignored_auth",
        "--request-timeout", "30",
    ]
    status, printed = run("schemathesis", command, tmp_path)
    assert status == 0, f"schemathesis:\n{printed[-6000:]}"
    # What a run of random requests opened must not stay.
    listed = wire.get(f"{cluster.router_url}/v1/sessions").json()["sessions"]
    for session in listed:
        wire.request("DELETE", f"{cluster.router_url}/v1/sessions/{session['session_id']}")
