"""Does the chart render objects that fit each other, and refuse values that could not work?"""

from pathlib import Path

import pytest
import yaml

from deploy import charts
from deploy.charts import CHART, EXAMPLES, KUBERNETES, Object, Rendered
from deploy.programs import DEPLOY, run

# What the chart's own containers must have, whatever the values.
HARDENED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
# Secrets and claims that examples name, and operators bring.
OUTSIDE = {"berth-keys", "berth-agent-tls", "berth-router-tls", "berth-front-tls"}


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def rendered(helm: str, request: pytest.FixtureRequest) -> Rendered:
    return charts.render(helm, request.param)


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_helm_lint_has_no_complaint(helm: str, values: Path) -> None:
    made = run(helm, "lint", "--strict", "--kube-version", KUBERNETES, CHART, "--values", values)
    assert made.returncode == 0, made.stdout
    # A template that fails is only an information for helm.
    assert "Fail" not in made.stdout + made.stderr, made.stdout


def test_names_of_objects_are_unique(rendered: Rendered) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered.objects]
    assert len(set(names)) == len(names)


def test_selectors_find_the_pods_they_mean(rendered: Rendered) -> None:
    pods = {name: pod["metadata"]["labels"] for name, pod in rendered.workloads()}
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        for each in rendered.kind(kind):
            spec = each["spec"]
            selector = spec.get("podSelector", spec.get("selector"))
            selector = selector.get("matchLabels", selector)
            found = {name for name, labels in pods.items() if charts.matches(selector, labels)}
            name = each["metadata"]["name"]
            is_router = name.endswith(("-router", "-router-admin"))
            wanted = {"b-berth-router"} if is_router else set(pods) - {"b-berth-router"}
            assert found and found <= wanted, f"{kind} {name} selects {found}"
    for workload in (*rendered.kind("Deployment"), *rendered.kind("StatefulSet")):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert charts.matches(workload["spec"]["selector"]["matchLabels"], labels)


def test_all_that_pods_mount_exists(rendered: Rendered) -> None:
    made = {(each["kind"], each["metadata"]["name"]) for each in rendered.objects}
    for name, pod in rendered.workloads():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounted = set()
        for each in charts.containers(pod["spec"]):
            mounted |= {mount["name"] for mount in each["volumeMounts"]}
        assert mounted == set(volumes), f"{name}: {mounted ^ set(volumes)}"
        account = pod["spec"]["serviceAccountName"]
        assert ("ServiceAccount", account) in made
        for volume in volumes.values():
            if secret := volume.get("secret"):
                secret_name = secret["secretName"]
                assert ("Secret", secret_name) in made or secret_name in OUTSIDE, secret_name
            if settings := volume.get("configMap"):
                assert ("ConfigMap", settings["name"]) in made, settings


def test_named_ports_exist(rendered: Rendered) -> None:
    for name, pod in rendered.workloads():
        each_ports = (each.get("ports", []) for each in charts.containers(pod["spec"]))
        ports = {port["name"] for some in each_ports for port in some}
        for each in charts.containers(pod["spec"]):
            for probe in ("readinessProbe", "livenessProbe"):
                if probe in each:
                    assert each[probe]["httpGet"]["port"] in ports, f"{name} {probe}"
        for service in rendered.kind("Service"):
            if charts.matches(service["spec"]["selector"], pod["metadata"]["labels"]):
                assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_own_containers_are_hardened(rendered: Rendered) -> None:
    for name, pod in rendered.workloads():
        for each in charts.containers(pod["spec"]):
            if each["name"] != "engine":
                assert each["securityContext"] == HARDENED, f"{name}: {each['name']}"
            assert not each.get("securityContext", {}).get("privileged"), name
        user = pod["spec"]["securityContext"]["runAsUser"]
        # Beside an engine of the node, the agent must be the engine's user, which is root.
        assert user == (0 if pod["spec"].get("hostNetwork") else 65532), name


def test_only_routers_have_a_token_of_the_cluster(rendered: Rendered) -> None:
    for name, pod in rendered.workloads():
        has_token = pod["spec"].get("automountServiceAccountToken", True)
        assert has_token == (name == "b-berth-router"), name
    rules = [role["rules"] for role in rendered.kind("Role")]
    assert rules == [[{
        "apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }]]
    assert not rendered.kind("ClusterRole")


def test_rights_are_those_of_the_manifest_for_other_installations(rendered: Rendered) -> None:
    manifest = yaml.safe_load_all((DEPLOY / "kubernetes/discovery-rbac.yaml").read_text())
    [role] = [each for each in manifest if each["kind"] == "Role"]
    assert [each["rules"] for each in rendered.kind("Role")] == [role["rules"]]


def test_the_alerts_are_those_of_the_files(helm: str) -> None:
    groups = [group for path in sorted((DEPLOY / "prometheus").glob("*.yaml"))
              for group in yaml.safe_load(path.read_text())["groups"]]
    watched = charts.render(helm, charts.example("production"))
    assert watched.get("PrometheusRule", "b-berth-alerts")["spec"]["groups"] == groups
    without = charts.render(helm, charts.example("production"), "monitoring.alerts=false")
    assert not without.kind("PrometheusRule")


def engine_args(rendered: Rendered, pool: str) -> list[str]:
    pod = rendered.get("StatefulSet", f"b-berth-{pool}")["spec"]["template"]["spec"]
    return charts.container(pod, "engine")["args"]


def test_an_engine_listens_on_loopback_and_has_the_shim(helm: str) -> None:
    quick = charts.render(helm, charts.example("quick"))
    args = engine_args(quick, "main")
    assert "--host=127.0.0.1" in args and "--enable-streaming-session" in args
    pod = quick.get("StatefulSet", "b-berth-main")["spec"]["template"]["spec"]
    engine = charts.container(pod, "engine")
    env = {each["name"]: each.get("value") for each in engine["env"]}
    mounts = {mount["mountPath"] for mount in engine["volumeMounts"]}
    assert env["PYTHONPATH"] in mounts
    toml = quick.get("ConfigMap", "b-berth-agent")["data"]["agent.toml"]
    state = toml.split('state_dir = "')[1].split('"')[0]
    assert env["BERTH_SHIM_SOCKET"] == f"{state}/engine-30000.sock"
    # The engine ends after the agent, which ends its turns.
    assert engine["restartPolicy"] == "Always" and engine in pod["initContainers"]


def test_prefill_and_decode_engines_reach_each_other_alone(helm: str) -> None:
    pairs = charts.render(helm, charts.example("prefill-decode"))
    for pool, other in (("prefill", "decode"), ("decode", "prefill")):
        assert f"--disaggregation-mode={pool}" in engine_args(pairs, pool)
        [rule] = pairs.get("NetworkPolicy", f"b-berth-{pool}")["spec"]["ingress"]
        [peer] = rule["from"]
        assert peer["podSelector"]["matchLabels"]["berth/role"] == other
        open_ports = [
            range(port["port"], port["endPort"] + 1)
            for port in rule["ports"] if port["protocol"] == "TCP"
        ]
        assert any(8998 in ports for ports in open_ports), "the bootstrap server is closed"
        for closed in (30000, 31000, 31001, 31002):
            assert not any(closed in ports for ports in open_ports), f"port {closed} is open"
    quick = charts.render(helm, charts.example("quick"))
    assert [each["metadata"]["name"] for each in quick.kind("NetworkPolicy")] == [
        "b-berth-router", "b-berth-worker"
    ]


def seconds_to_end(pod: Object) -> int:
    return pod["spec"]["terminationGracePeriodSeconds"]


def test_a_pod_has_time_to_end_its_turns(helm: str) -> None:
    for name, more in (("quick", 0), ("production", 90)):
        rendered = charts.render(helm, charts.example(name), "agent.drainWaitSeconds=70")
        pods = dict(rendered.workloads())
        for each, pod in pods.items():
            # A router: lame duck and drain. An agent: the hook, drain, aborts; then the engine.
            least = 5 + 30 if each == "b-berth-router" else 70 + 30 + 15 + 30
            assert seconds_to_end(pod) > least + more, f"{name}: {each}"


def test_a_change_of_settings_starts_new_pods(helm: str) -> None:
    def checksums(*sets: str) -> dict[str, str]:
        rendered = charts.render(helm, charts.example("quick"), *sets)
        return {
            name: pod["metadata"]["annotations"]["checksum/settings"]
            for name, pod in rendered.workloads()
        }
    before = checksums()
    assert checksums() == before
    router = checksums("router.settings.limits.turns_in_flight_max=9")
    assert {name for name in before if before[name] != router[name]} == {"b-berth-router"}
    agent = checksums("agent.settings.sessions.rows_reserve=3")
    assert {name for name in before if before[name] != agent[name]} == {"b-berth-main"}


REFUSED = {
    "a name that the chart doesn't know": (["router.replica=2"], "replica"),
    "a wrong type": (["router.replicas=many"], "integer"),
    "a negative number": (["pools.main.replicas=-1"], "minimum"),
    "a role that isn't one": (["pools.main.replicas=1", "pools.main.role=both"], "role"),
    "a mode that isn't one": (["agent.mode=beside"], "agent"),
    "a pool's name that no label takes": (["pools.Main_1.replicas=1"], "Main_1"),
    "a digest that isn't one": (
        ["auth.disabled=false", "auth.keys[0].name=a", "auth.keys[0].sha256=12"], "sha256"),
    "no answer to who may use the router": (["auth.disabled=false"], "auth.keys"),
    "keys that nobody needs": (["auth.existingSecret=a"], "auth.disabled"),
    "metrics for keys that don't exist": (["auth.metrics=key"], "auth.metrics"),
    "monitoring without a key": (
        ["auth.disabled=false", "auth.existingSecret=a", "auth.metrics=key",
         "monitoring.enabled=true"], "monitoring.keySecret.name"),
    "half of mutual TLS": (["routerProof.tls.enabled=true"], "agentSecret"),
    "prefill without decode": (
        ["pools.a.replicas=1", "pools.a.role=prefill"], "needs one with role decode"),
    "decode without prefill": (
        ["pools.a.replicas=1", "pools.a.role=decode"], "needs one with role prefill"),
    "an engine without a model": (["engine.model="], "which model"),
    "a folder that isn't one": (["agent.daemonset.hostPath=berth"], "hostPath"),
}


@pytest.mark.parametrize(("sets", "named"), REFUSED.values(), ids=REFUSED)
def test_helm_refuses(helm: str, sets: list[str], named: str) -> None:
    status, text = charts.template(helm, charts.example("quick"), *sets)
    assert status != 0, "it was rendered"
    assert named in text, text
