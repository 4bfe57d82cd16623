"""Does a real API server take what the chart renders, and how much may a router's account do?"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from deploy import charts
from deploy.charts import EXAMPLES, Rendered
from deploy.cluster import NAMESPACE, Cluster, why_missing
from deploy.programs import run
from deploy.schemas import SCHEMA_FILE, write_schemas

MONITORS = {"PodMonitor", "ServiceMonitor", "PrometheusRule"}


@pytest.fixture(scope="module")
def cluster(find_tool: Callable[[str], str], folder: Path) -> Iterator[Cluster]:
    if why := why_missing():
        pytest.skip(why)
    cluster = Cluster(folder / "cluster", find_tool("kube-apiserver"))
    try:
        cluster.start()
        for crd in Path(find_tool("prometheus-crds")).glob("*.yaml"):
            assert cluster.apply(yaml.safe_load(crd.read_text()), False).status < 300, crd
        cluster.wait("describing the monitors", lambda: described(cluster) >= MONITORS)
        yield cluster
    finally:
        cluster.stop()


def described(cluster: Cluster) -> set[str]:
    """Returns the kinds of objects that the API server has schemas for."""
    definitions = cluster.must("GET", "/openapi/v2")["definitions"]
    return {name.rsplit(".", 1)[-1] for name in definitions}


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda path: path.stem)
def rendered(helm: str, request: pytest.FixtureRequest) -> Rendered:
    return charts.render(helm, request.param)


def test_the_api_server_takes_every_object(cluster: Cluster, rendered: Rendered) -> None:
    for each in rendered.objects:
        answer = cluster.apply(each, is_dry=True)
        name = f"{each['kind']} {each['metadata']['name']}"
        assert answer.status in (200, 201), f"{name}: {answer.body}"
        warned = [text for text in answer.warnings if "PodSecurity" in text]
        other = set(answer.warnings) - set(warned)
        assert not other, f"{name}: {other}"
        # The router keeps the strictest standard for pods. The agent would too, but the engine's
        # image runs as root.
        if each["kind"] == "Deployment":
            assert not warned, f"{name}: {warned}"


def test_the_api_server_refuses_a_field_that_it_lacks(cluster: Cluster, helm: str) -> None:
    thing = charts.render(helm, charts.example("quick")).get("Deployment", "b-berth-router")
    thing["spec"]["replica"] = 2
    answer = cluster.apply(thing, is_dry=True)
    assert answer.status >= 400 and "replica" in str(answer.body), answer.body


def test_a_router_reads_endpoint_slices_and_nothing_else(cluster: Cluster, helm: str) -> None:
    rendered = charts.render(helm, charts.example("quick"))
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        for each in rendered.kind(kind):
            assert cluster.apply(each, is_dry=False).status < 300
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
    router, worker = cluster.token("b-berth-router"), cluster.token("b-berth-worker")
    cluster.wait("aware of the role", lambda: cluster.call(
        "GET", slices, token=router).status == 200)
    assert cluster.call("DELETE", f"{slices}/a", token=router).status == 403
    assert cluster.call("GET", slices, token=worker).status == 403
    others = ("pods", "secrets", "configmaps", "services")
    for path in [f"/api/v1/namespaces/{NAMESPACE}/{each}" for each in others] + [
        slices.replace(f"/{NAMESPACE}/", "/default/")
    ]:
        assert cluster.call("GET", path, token=router).status == 403, path


def test_kubeconform_agrees_by_the_schemas_of_the_api_server(
    cluster: Cluster, rendered: Rendered, find_tool: Callable[[str], str], folder: Path
) -> None:
    schemas = folder / "schemas"
    if not schemas.exists():
        write_schemas(cluster.must("GET", "/openapi/v2"), schemas)
    kubeconform = find_tool("kubeconform")
    flags = ["-strict", "-summary", "-schema-location", f"{schemas}/{SCHEMA_FILE}"]
    objects = folder / "objects.yaml"
    objects.write_text(rendered.text)
    made = run(kubeconform, *flags, objects)
    assert made.returncode == 0, made.stdout
    assert f"{len(rendered.objects)} resources found" in made.stdout, made.stdout
    assert "Skipped: 0" in made.stdout, made.stdout
    objects.write_text(rendered.text.replace("podManagementPolicy", "podManagement", 1).replace(
        "terminationGracePeriodSeconds", "graceSeconds", 1))
    assert run(kubeconform, *flags, objects).returncode == 1, "a wrong field was not found"
