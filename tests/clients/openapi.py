"""schemathesis: the router's own routes do what the served /openapi.json says."""

from pathlib import Path
from urllib.parse import quote

import pytest

from clients.places import Cluster, Target
from clients.programs import HERE, environment, run
from integration import wire

# Requests for each operation and check; more find nothing new in the time of a run.
EXAMPLES_MAX = 40


@pytest.mark.at(launch="main", quick=("simulator",))
def test_own_routes(cluster: Cluster, target_of: Target, tmp_path: Path) -> None:
    document = wire.get(f"{target_of.url}/openapi.json")
    assert document.status == 200, f"/openapi.json: {document}"
    command = [
        str(environment("api") / "bin/schemathesis"), "run",
        f"{target_of.url}/openapi.json", "--max-examples", str(EXAMPLES_MAX),
        "--seed", "1", "--checks", "all", "--no-color",
        # Without keys on loopback, every credential is that of an admin. And a session may have
        # closed before it is looked up, by the idle time that it was opened with.
        "--exclude-checks", "ignored_auth,ensure_resource_availability",
        # A session's id is no secret here.
        "--request-timeout", "30", "--max-response-time", "30", "--output-sanitize", "false",
    ]
    hooks = {"SCHEMATHESIS_HOOKS": str(HERE / "inner/session_ids.py")}
    status, printed = run("schemathesis", command, tmp_path, hooks)
    assert status == 0, f"schemathesis:\n{printed[-6000:]}"
    # What a run of random requests opened must not stay.
    listed = wire.get(f"{target_of.url}/v1/sessions").json()["sessions"]
    for session in listed:
        # The tool makes ids of any characters.
        path = f"/v1/sessions/{quote(session['session_id'], safe='')}"
        closed = wire.request("DELETE", target_of.url + path)
        assert closed.status in (204, 404), f"DELETE {path}: {closed}"
