"""Does compose.yaml hold together, and do the binaries take its flags and settings?

Nothing here starts it: that takes Docker or Podman. The parts of Prometheus and Grafana are parsed
only.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.programs import DEPLOY, run

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
CONFIGS = COMPOSE["configs"]


def own() -> Iterator[tuple[str, dict, str]]:
    """Yields each service with an image of Berth's, and the image's target."""
    for name, service in SERVICES.items():
        if "build" in service:
            yield name, service, service["build"]["target"]


def test_images_are_targets_of_the_containerfile() -> None:
    for _, service, target in own():
        file = DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]
        assert re.search(rf"^FROM .* AS {target}$", file.read_text(), re.MULTILINE), target
        assert service["image"].split(":")[0] == f"berth-{target}"
    assert {target for _, _, target in own()} == {"router", "agent", "engine-sim"}


def test_flags_are_the_binaries_own(bin_dir: Path) -> None:
    for name, service, target in own():
        program = target if target == "engine-sim" else f"berth-{target}"
        known = set(re.findall(r"--[a-z][a-z0-9-]*", run(bin_dir / program, "--help").stdout))
        flags = {word.split("=")[0] for word in service["command"] if word.startswith("--")}
        assert flags and flags <= known, f"{name}: {flags - known}"


@pytest.mark.parametrize("target", ["agent", "router"])
def test_the_binaries_take_the_settings(bin_dir: Path, target: str, tmp_path: Path) -> None:
    service = next(service for _, service, each in own() if each == target)
    for mount in service["configs"]:
        content = CONFIGS[mount["source"]]["content"]
        (tmp_path / Path(mount["target"]).name).write_text(content)
    settings = tmp_path / f"{target}.toml"
    text = settings.read_text().replace("/etc/berth/", f"{tmp_path}/")
    settings.write_text(text)
    env = service.get("environment", {"WORKER_ID": "laptop"} if target == "agent" else {})
    made = run(bin_dir / f"berth-{target}", "--config", settings, "--check-config", env=env)
    assert made.returncode == 0, made.stderr


def test_names_of_hosts_are_services() -> None:
    urls = tomllib.loads(CONFIGS["router"]["content"])["workers"]
    prometheus = yaml.safe_load(CONFIGS["prometheus"]["content"])
    targets = [
        target for job in prometheus["scrape_configs"]
        for each in job["static_configs"] for target in each["targets"]
    ]
    source = yaml.safe_load(CONFIGS["grafana-source"]["content"])["datasources"][0]["url"]
    for place in (*urls, *targets, source):
        host = place.rpartition("//")[2].partition(":")[0]
        assert host in SERVICES, f"{place}: no such service"
    # Agents are reached under the names of the engines, whose network they share.
    agents = [service for _, service, target in own() if target == "agent"]
    shared = {service["network_mode"].removeprefix("service:") for service in agents}
    assert shared == {url.rpartition("//")[2].partition(":")[0] for url in urls}
    names = [service["environment"]["WORKER_ID"] for service in agents]
    assert len(set(names)) == len(names)


def test_what_services_mount_exists() -> None:
    for name, service in SERVICES.items():
        for mount in service.get("configs", []):
            assert mount["source"] in CONFIGS, f"{name}: {mount}"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_dir(), f"{name}: {source}"
            else:
                assert source in COMPOSE["volumes"], f"{name}: {source}"
    used = {mount["source"] for each in SERVICES.values() for mount in each.get("configs", [])}
    assert used == set(CONFIGS)


def test_only_the_laptop_itself_reaches_it() -> None:
    published = [port for each in SERVICES.values() for port in each.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published), published
    for name, service, _ in own():
        hardened = service["read_only"] and service["cap_drop"] == ["ALL"]
        assert hardened, f"{name} may do more than it needs"


def test_grafana_gets_dashboards_and_prometheus_gets_rules() -> None:
    provider = yaml.safe_load(CONFIGS["grafana-dashboards"]["content"])["providers"][0]
    mounts = [volume.split(":") for volume in SERVICES["grafana"]["volumes"]]
    [source] = [each for each, place, _ in mounts if place == provider["options"]["path"]]
    dashboards = list((DEPLOY / source).glob("*.json"))
    assert dashboards
    for each in dashboards:
        assert json.loads(each.read_text())["panels"], each
    [rules] = yaml.safe_load(CONFIGS["prometheus"]["content"])["rule_files"]
    folder, pattern = rules.rsplit("/", 1)
    [mount] = SERVICES["prometheus"]["volumes"]
    assert mount.split(":")[1] == folder
    files = list((DEPLOY / mount.split(":")[0]).glob(pattern))
    assert files and all(yaml.safe_load(each.read_text())["groups"] for each in files)
