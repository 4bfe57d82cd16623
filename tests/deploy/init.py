"""Do binaries, systemd and helm take what `berth init` writes for engines that run?"""

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from integration.processes import Process, answers_200, free_ports, wait_until

from deploy import charts
from deploy.charts import CHART, KUBERNETES
from deploy.programs import DEPLOY, run

START_SECONDS_MAX = 30


@pytest.fixture(scope="module")
def engines(bin_dir: Path, folder: Path) -> Iterator[list[str]]:
    """The URLs of two engines, of which the first wants a key."""
    started, urls = [], []
    for number, flags in enumerate((["--api-key=secret"], ["--context-length=1800"])):
        [port] = free_ports(1)
        urls.append(f"http://127.0.0.1:{port}")
        command = [str(bin_dir / "engine-sim"), f"--port={port}", *flags]
        started.append(Process.start(f"init-engine-{number}", command, folder))
    wait_until(started[1], "ready", lambda: answers_200(f"{urls[1]}/server_info"),
               START_SECONDS_MAX)
    wait_until(started[0], "ready", lambda: answers_200(f"{urls[0]}/health"), START_SECONDS_MAX)
    yield urls
    for process in started:
        process.stop(START_SECONDS_MAX)


def init(bin_dir: Path, engines: list[str], folder: Path, *flags: str) -> dict:
    """Runs `berth init` and returns what it says."""
    named = [word for url in engines for word in ("--engine", url)]
    made = run(bin_dir / "berth", "init", *named, "--out", folder, "--json", *flags,
               env={"BERTH_ENGINE_API_KEY": "secret"})
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


def check_config(bin_dir: Path, program: str, settings: Path, etc: Path | None = None) -> dict:
    """Returns the effective settings. `etc` stands for /etc/berth."""
    if etc:
        settings.write_text(settings.read_text().replace("/etc/berth", str(etc)))
    made = run(bin_dir / program, "--config", settings, "--check-config")
    assert made.returncode == 0, made.stdout + made.stderr
    return tomllib.loads(made.stdout)


@pytest.mark.parametrize("flags", [[], ["--address=node-1"]], ids=["alone", "fleet"])
def test_the_binaries_take_the_settings(
    engines: list[str], bin_dir: Path, tmp_path: Path, flags: list[str]
) -> None:
    said = init(bin_dir, engines, tmp_path / "out", *flags)
    controls = []
    for found in said["engines"]:
        agent = check_config(bin_dir, "berth-agent", Path(found["agent"]["settings"]))
        assert agent["engine"]["url"] == found["url"]
        controls.append(found["agent"]["control"])
    router = check_config(bin_dir, "berth-router", tmp_path / "out/router.toml")
    assert router["workers"] == controls and len(set(controls)) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_the_script_installs_units_that_systemd_takes(
    engines: list[str], bin_dir: Path, tmp_path: Path, count: int
) -> None:
    init(bin_dir, engines[:count], tmp_path / "out", "--for=systemd", "--address=node-1")
    root = tmp_path / "root"
    env = {"PATH": "/usr/bin:/bin", "DESTDIR": str(root), "BERTH_ENGINE_API_KEY": "secret"}
    made = run(tmp_path / "out/install.sh", env=env)
    assert made.returncode == 0, made.stderr
    etc = root / "etc/berth"
    assert (etc / "agent.env").read_text() == "BERTH_ENGINE_API_KEY=secret\n"
    for secret in ("agent.env", "router-token"):
        assert (etc / secret).stat().st_mode & 0o007 == 0, secret
    agents = sorted(etc.glob("agent*.toml"))
    assert len(agents) == count
    for settings in agents:
        agent = check_config(bin_dir, "berth-agent", settings, etc)
        assert agent["files"]["state_dir"].startswith("/var/lib/berth")
    check_config(bin_dir, "berth-router", etc / "router.toml", etc)
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze isn't installed (package systemd)")
    units = root / "etc/systemd/system"
    units.mkdir(parents=True, exist_ok=True)
    for unit in ("berth-agent.service", "berth-router.service"):
        shutil.copy(DEPLOY / "systemd" / unit, units)
    for unit in units.glob("*.service"):
        unit.write_text(unit.read_text().replace("/usr/bin/berth", f"{bin_dir}/berth"))
    if count > 1:
        # An instance by its name, as systemd makes it of the template.
        names = [settings.stem.replace("agent-", "berth-agent@") for settings in agents]
        for name in names:
            (units / f"{name}.service").symlink_to("berth-agent@.service")
    else:
        names = ["berth-agent"]
    made = run("systemd-analyze", "verify", "--man=no", *(units / f"{it}.service" for it in names))
    assert made.returncode == 0 and not made.stderr, made.stderr


def test_a_script_without_the_key_stops(engines: list[str], bin_dir: Path, tmp_path: Path) -> None:
    init(bin_dir, engines[:1], tmp_path / "out", "--for=systemd")
    env = {"PATH": "/usr/bin:/bin", "DESTDIR": str(tmp_path / "root")}
    made = run(tmp_path / "out/install.sh", env=env)
    assert made.returncode != 0 and "BERTH_ENGINE_API_KEY" in made.stderr, made.stderr


@pytest.mark.parametrize("number", [0, 1])
def test_helm_takes_the_values(
    engines: list[str], helm: str, bin_dir: Path, tmp_path: Path, number: int
) -> None:
    said = init(bin_dir, engines[number:][:1], tmp_path / "out", "--for=helm")
    values = tmp_path / "out/values.yaml"
    made = run(helm, "lint", "--strict", "--kube-version", KUBERNETES, CHART, "--values", values)
    assert made.returncode == 0 and "Fail" not in made.stdout + made.stderr, made.stdout
    rendered = charts.render(helm, values)
    pod = dict(rendered.workloads())["b-berth-agent"]["spec"]
    process = yaml.safe_load(values.read_text())["agent"]["daemonset"]
    assert pod["securityContext"]["runAsUser"] == process["runAsUser"]
    settings = rendered.get("ConfigMap", "b-berth-agent")["data"]["agent.toml"]
    agent = tomllib.loads(settings)
    assert agent["engine"]["url"] == said["engines"][0]["url"]
    env = {each["name"] for each in charts.container(pod, "agent")["env"]}
    assert ("BERTH_ENGINE_API_KEY" in env) == (number == 0)
    ratio = agent.get("sessions", {}).get("pin_budget_ratio")
    assert ratio == (None if number == 0 else 0.88)
