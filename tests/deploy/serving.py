"""Do router and agent serve with the chart's settings, where a real API server has the slices?"""

import json
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration import wire
from integration.processes import Process, answers_200, free_ports, wait_until

from deploy import charts
from deploy.charts import Object, Rendered
from deploy.cluster import NAMESPACE, Cluster, own_address, why_missing

START_SECONDS_MAX = 60
# The ports that the chart gives them.
PORTS = ("31000", "31001", "31002", "8080", "8081")


class Served:
    """An engine simulator, an agent and a router, with the settings of the example `quick`."""

    def __init__(self, rendered: Rendered, cluster: Cluster, bin_dir: Path, folder: Path):
        folder.mkdir()
        self.rendered = rendered
        self.engine, *ports = free_ports(6)
        self.ports = dict(zip(PORTS, map(str, ports)))
        self._folder, self._bin_dir, self._cluster = folder, bin_dir, cluster
        self._started: list[Process] = []

    def start(self) -> None:
        for kind in ("ServiceAccount", "Role", "RoleBinding", "Service"):
            for each in self.rendered.kind(kind):
                assert self._cluster.apply(each, is_dry=False).status < 300
        answer = self._cluster.apply(self._slice(), is_dry=False)
        assert answer.status < 300, answer.body
        secret = self.rendered.get("Secret", "b-berth-router-token")["data"]["token"]
        (self._folder / "token").write_text(charts.decode(secret))
        state = self._folder / "s"
        socket = f"{state}/engine-{self.engine}.sock"
        self._run("engine-sim", f"--port={self.engine}", f"--shim-socket={socket}",
                  "--enable-streaming-session")
        agent = self._settings("agent", {"/run/berth/agent": str(state), "30000": str(self.engine)})
        self._run("berth-agent", "--config", self._write("agent.toml", agent), "--worker-id=pod-0")
        kubeconfig = self._cluster.kubeconfig("b-berth-router")
        router = self._settings("router", {}).replace(
            "[discovery.kubernetes]", f'[discovery.kubernetes]\nkubeconfig = "{kubeconfig}"')
        process = self._run("berth-router", "--config", self._write("router.toml", router))
        url = self.url("8081", "/readyz")
        wait_until(process, "ready", lambda: answers_200(url), START_SECONDS_MAX)

    def stop(self) -> None:
        for process in reversed(self._started):
            process.send(signal.SIGINT)
            process.stop(START_SECONDS_MAX)

    def url(self, port: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[port]}{path}"

    def _run(self, name: str, *words: str) -> Process:
        process = Process.start(name, [str(self._bin_dir / name), *words], self._folder)
        self._started.append(process)
        return process

    def _write(self, name: str, text: str) -> str:
        (self._folder / name).write_text(text)
        return str(self._folder / name)

    def _settings(self, name: str, more: dict[str, str]) -> str:
        """Returns the chart's settings, with this machine's ports and folders."""
        text = self.rendered.get("ConfigMap", f"b-berth-{name}")["data"][f"{name}.toml"]
        ports = {f":{port}": f":{own}" for port, own in self.ports.items()}
        for old, new in {**ports, "/etc/berth/proof": str(self._folder), **more}.items():
            text = text.replace(old, new)
        return text

    def _slice(self) -> Object:
        """Returns the slice that a cluster would make of the agents' service and the pod."""
        service = self.rendered.get("Service", "b-berth-agents")
        return {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": "b-berth-agents-1", "labels": {
                "kubernetes.io/service-name": service["metadata"]["name"]}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [own_address()], "conditions": {"ready": True}}],
            "ports": [
                {"name": port["name"], "port": int(self.ports[str(port["port"])])}
                for port in service["spec"]["ports"]
            ],
        }


@pytest.fixture(scope="module")
def served(
    helm: str, find_tool: Callable[[str], str], bin_dir: Path, folder: Path
) -> Iterator[Served]:
    if why := why_missing():
        pytest.skip(why)
    cluster = Cluster(folder / "serving-cluster", find_tool("kube-apiserver"))
    rendered = charts.render(
        helm, charts.example("quick"), f"router.settings.discovery.kubernetes.namespace={NAMESPACE}"
    )
    served = Served(rendered, cluster, bin_dir, folder / "serving")
    try:
        cluster.start()
        served.start()
        yield served
    finally:
        served.stop()
        cluster.stop()


def test_a_turn_runs_through_the_router_that_the_chart_sets_up(served: Served) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    request = urllib.request.Request(
        served.url("8080", "/v1/chat/completions"), json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["x-berth-worker"].startswith("pod-0"), answer.headers


def test_probes_ask_for_what_the_processes_answer(served: Served) -> None:
    for _, pod in served.rendered.workloads():
        container = pod["spec"]["containers"][0]
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            get = container[probe]["httpGet"]
            url = served.url(ports[get["port"]], get["path"])
            assert wire.get(url, seconds=30).status == 200, container["name"]


def test_the_autoscalers_metric_exists(served: Served, helm: str) -> None:
    scaled = charts.render(helm, charts.example("production"))
    [metric] = scaled.get("HorizontalPodAutoscaler", "b-berth-router")["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    with urllib.request.urlopen(served.url("8081", "/metrics"), timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    assert any(line.startswith((f"{name} ", f"{name}{{")) for line in lines), name
