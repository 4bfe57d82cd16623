"""A Kubernetes cluster without nodes: etcd and a real API server, as in tests/fleet.

It checks objects as a cluster does (defaults, validation, admission, policies of pods) and keeps
them. Nothing runs in its pods.
"""

import json
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.processes import Process, free_ports, wait_until

from deploy.programs import run

TOKEN = "token-of-the-admin"
START_SECONDS_MAX = 90
NAMESPACE = "berth"


@dataclass
class Answer:
    status: int
    body: Any
    warnings: list[str]


class Cluster:
    """The cluster's processes, and calls to its API server."""

    def __init__(self, folder: Path, program: str):
        folder.mkdir()
        self.folder = folder
        etcd, peers, self.port = free_ports(3)
        self.url = f"https://127.0.0.1:{self.port}"
        key = run(
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-keyout", folder / "api.key", "-out", folder / "api.crt",
            "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
            # The router's TLS takes no CA for a server.
            "-addext", "basicConstraints=critical,CA:FALSE",
        )
        assert key.returncode == 0, key.stderr
        (folder / "tokens.csv").write_text(f"{TOKEN},admin,1,system:masters\n")
        clients, peers = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peers}"
        self._etcd = Process.start(
            "etcd",
            ["etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", clients,
             "--advertise-client-urls", clients, "--listen-peer-urls", peers,
             "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"],
            folder,
        )
        self._api = Process.start(
            "kube-apiserver",
            [program, f"--etcd-servers={clients}", "--bind-address=127.0.0.1",
             f"--secure-port={self.port}", "--authorization-mode=RBAC",
             "--service-cluster-ip-range=10.96.0.0/24", "--advertise-address=192.0.2.1",
             "--service-account-issuer=https://berth.test",
             f"--service-account-key-file={folder / 'api.crt'}",
             f"--service-account-signing-key-file={folder / 'api.key'}",
             f"--tls-cert-file={folder / 'api.crt'}",
             f"--tls-private-key-file={folder / 'api.key'}",
             f"--token-auth-file={folder / 'tokens.csv'}", f"--cert-dir={folder / 'certs'}"],
            folder,
        )
        self._tls = ssl.create_default_context(cafile=str(folder / "api.crt"))
        self._resources: dict[tuple[str, str], dict[str, Any]] = {}

    def start(self) -> None:
        wait_until(self._api, "ready", self._is_ready, START_SECONDS_MAX)
        self.must("POST", "/api/v1/namespaces", {"metadata": {
            "name": NAMESPACE,
            "labels": {"pod-security.kubernetes.io/warn": "restricted"},
        }})

    def stop(self) -> None:
        self._api.stop(10)
        self._etcd.stop(10)

    def _is_ready(self) -> bool:
        try:
            return self.call("GET", "/readyz").status == 200
        except OSError:
            return False

    def call(
        self, method: str, path: str, body: Any = None, token: str = TOKEN,
        kind: str = "application/json",
    ) -> Answer:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {token}", "content-type": kind}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._tls) as answer:
                return _answer(answer)
        except urllib.error.HTTPError as error:
            return _answer(error)

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        """Waits until this holds of the API server."""
        wait_until(self._api, what, holds, START_SECONDS_MAX)

    def must(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.call(*args, **kwargs)
        assert 200 <= answer.status < 300, f"{args[:2]}: {answer.body}"
        return answer.body

    def apply(self, thing: dict[str, Any], is_dry: bool) -> Answer:
        """Applies an object as `kubectl apply --server-side` does; fields that the API doesn't know
        are an error."""
        resource = self._resource(thing["apiVersion"], thing["kind"])
        group = thing["apiVersion"]
        path = f"/apis/{group}" if "/" in group else f"/api/{group}"
        if resource["namespaced"]:
            path += f"/namespaces/{thing['metadata'].get('namespace', NAMESPACE)}"
        query = "fieldManager=helm&fieldValidation=Strict" + "&dryRun=All" * is_dry
        path += f"/{resource['name']}/{thing['metadata']['name']}?{query}"
        return self.call("PATCH", path, thing, kind="application/apply-patch+yaml")

    def _resource(self, version: str, kind: str) -> dict[str, Any]:
        if (version, kind) not in self._resources:
            path = f"/apis/{version}" if "/" in version else f"/api/{version}"
            for each in self.must("GET", path)["resources"]:
                if "/" not in each["name"]:
                    self._resources[version, each["kind"]] = each
        return self._resources[version, kind]

    def kubeconfig(self, account: str) -> Path:
        """Writes a kubeconfig of a service account. Returns its path."""
        cluster = {"server": self.url, "certificate-authority": str(self.folder / "api.crt")}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": self.token(account)}}],
            "contexts": [{"name": "x", "context": {
                "cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        }
        path = self.folder / f"{account}.json"
        path.write_text(json.dumps(config))
        return path

    def token(self, account: str) -> str:
        """Returns a token of a service account."""
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return self.must("POST", path, request)["status"]["token"]


def _answer(answer: Any) -> Answer:
    text = answer.read().decode()
    warnings = answer.headers.get_all("warning") or []
    try:
        return Answer(answer.status, json.loads(text), warnings)
    except ValueError:
        return Answer(answer.status, text, warnings)


def own_address() -> str:
    """Returns an address of this host that isn't loopback, as endpoints need. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))
        return probe.getsockname()[0]


def why_missing() -> str | None:
    """Returns why no cluster can be started here."""
    return None if shutil.which("etcd") else "etcd isn't installed: install the package etcd-server"
