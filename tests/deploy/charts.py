"""Renders the chart with the real helm, and finds objects in what it renders."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.programs import DEPLOY, run

CHART = DEPLOY / "helm/berth"
EXAMPLES = sorted((DEPLOY / "helm/examples").glob("*.yaml"))
# The version of the API server with which tests/fleet and cluster.py check.
KUBERNETES = "1.33.13"
RELEASE, NAMESPACE = "b", "berth"
MONITORS = "monitoring.coreos.com/v1"

Object = dict[str, Any]


def example(name: str) -> Path:
    return DEPLOY / f"helm/examples/{name}.yaml"


def template(helm: str, values: Path, *sets: str) -> tuple[int, str]:
    """Runs `helm template`. Returns its status, and what it printed."""
    flags = [word for each in sets for word in ("--set", each)]
    made = run(
        helm, "template", RELEASE, CHART, "--namespace", NAMESPACE, "--kube-version", KUBERNETES,
        "--api-versions", MONITORS, "--values", values, *flags,
    )
    return made.returncode, made.stdout if made.returncode == 0 else made.stderr


@dataclass(frozen=True)
class Rendered:
    """The objects that the chart makes of some values."""

    text: str
    objects: list[Object]

    def kind(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    def get(self, kind: str, name: str) -> Object:
        found = [each for each in self.kind(kind) if each["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} objects {kind} {name}"
        return found[0]

    def workloads(self) -> Iterator[tuple[str, Object]]:
        """Yields the name of each object that makes pods, and the pods' template."""
        for kind in ("Deployment", "StatefulSet", "DaemonSet"):
            for each in self.kind(kind):
                yield each["metadata"]["name"], each["spec"]["template"]


def render(helm: str, values: Path, *sets: str) -> Rendered:
    status, text = template(helm, values, *sets)
    assert status == 0, text
    return Rendered(text, [each for each in yaml.safe_load_all(text) if each])


def containers(pod: Object) -> list[Object]:
    """Returns all containers of a pod's specification."""
    return pod.get("initContainers", []) + pod["containers"]


def container(pod: Object, name: str) -> Object:
    return next(each for each in containers(pod) if each["name"] == name)


def decode(text: str) -> str:
    """Returns a value of a Secret's `data`."""
    return base64.b64decode(text).decode()


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()
