"""litellm as a client, and as a proxy before the router."""

import json
from dataclasses import dataclass
from pathlib import Path

from clients.places import Cluster, Target
from clients.plugin import Case, Runs, Suite
from clients.programs import HERE, Outcome, environment, outcomes, run
from integration.processes import Process, answers_200, free_ports, wait_until

# Providers of litellm by which people reach an engine of their own.
PROVIDERS = ("openai", "hosted_vllm", "text-completion-openai", "anthropic")
PROXY_START_SECONDS_MAX = 240


@dataclass(frozen=True)
class Litellm:
    """Each provider, streamed or not, by litellm as a library or through its proxy."""

    proxy: bool

    def cases(self) -> list[str]:
        environment("litellm")
        return [f"{provider}-{how}" for provider in PROVIDERS for how in ("whole", "streamed")]

    def run(self, target: Target, cases: list[str], folder: Path) -> dict[str, Outcome]:
        folder.mkdir(parents=True, exist_ok=True)
        report, chosen = folder / "report.jsonl", folder / "cases"
        chosen.write_text("\n".join(cases))
        env = target.env() | {"CLIENTS_REPORT": str(report), "CLIENTS_CASES": str(chosen)}
        proxy = self._start_proxy(target, folder) if self.proxy else None
        try:
            if proxy:
                env["CLIENTS_PROXY"] = proxy[1]
            python = str(environment("litellm") / "bin/python")
            command = [python, str(HERE / "inner/litellm_calls.py")]
            _, printed = run("litellm", command, folder, env)
        finally:
            if proxy:
                proxy[0].stop(10)
        return outcomes(report, cases, printed)

    def _start_proxy(self, target: Target, folder: Path) -> tuple[Process, str]:
        (port,) = free_ports(1)
        config = folder / "proxy.yaml"
        # JSON is YAML.
        # Nobody else reaches this proxy, so it needs no key of its own.
        general = {"dangerously_permit_weak_or_unset_master_key": True}
        config.write_text(json.dumps({"general_settings": general, "model_list": [
            {"model_name": name, "litellm_params": {
                "model": f"{name}/{target.model}", "api_key": "a key",
                "api_base": target.url + ("" if name == "anthropic" else "/v1"),
            }}
            for name in PROVIDERS
        ]}))
        program = str(environment("litellm") / "bin/litellm")
        command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        env = {
            "PYTHONPATH": "", "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
        }
        proxy, url = Process.start("proxy", command, folder, env), f"http://127.0.0.1:{port}"
        live = f"{url}/health/liveliness"
        wait_until(proxy, "ready", lambda: answers_200(live), PROXY_START_SECONDS_MAX)
        return proxy, url


SUITES = (
    Suite("litellm", Litellm(proxy=False), "chats", quick=("simulator",)),
    Suite("litellm-proxy", Litellm(proxy=True), "chats"),
)


def test_call(cluster: Cluster, case: Case, runs: Runs) -> None:
    runs.outcome(cluster, case).check()
