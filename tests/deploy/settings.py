"""Do the real binaries take what the chart renders: settings, keys, flags of hooks?"""

import base64
import json
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy import charts
from deploy.charts import EXAMPLES, Object, Rendered
from deploy.programs import DEPLOY, run

WRONG_SETTINGS = 64


@pytest.fixture(scope="session")
def certificate(folder: Path) -> Path:
    """A folder with the files of a Secret of certificates."""
    made = folder / "certificate"
    made.mkdir()
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl = run(
        "openssl", "req", "-x509", *curve, "-keyout", made / "tls.key", "-out", made / "tls.crt",
        "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=DNS:router.berth.internal",
    )
    assert openssl.returncode == 0, openssl.stderr
    (made / "ca.crt").write_bytes((made / "tls.crt").read_bytes())
    return made


def lay_out(
    rendered: Rendered, pod: Object, name: str, certificate: Path, folder: Path
) -> Callable[[str], str]:
    """Lays out the container's volumes as the kubelet does, below `folder`. Returns a function that
    puts the folder before a path in a container."""
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = charts.container(pod["spec"], name)["volumeMounts"]
    for mount in mounts:
        place = folder / mount["mountPath"].lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        volume = volumes[mount["name"]]
        if settings := volume.get("configMap"):
            for file, text in rendered.get("ConfigMap", settings["name"])["data"].items():
                (place / file).write_text(text)
        elif secret := volume.get("secret"):
            for file, content in secret_files(rendered, secret["secretName"], certificate).items():
                (place / file).write_bytes(content)

    def inside(path: str) -> str:
        folders = [mount["mountPath"] for mount in mounts]
        assert any(f"{path}/".startswith(f"{each}/") for each in folders), f"no volume at {path}"
        return str(folder) + path
    return inside


def secret_files(rendered: Rendered, name: str, certificate: Path) -> dict[str, bytes]:
    """Returns the files of a Secret, of the chart's or the operator's."""
    if name == "berth-keys":
        return {"keys.toml": (DEPLOY / "config/keys.toml").read_bytes()}
    if name.endswith("-tls"):
        return {each.name: each.read_bytes() for each in certificate.iterdir()}
    secret = rendered.get("Secret", name)
    plain = {file: text.encode() for file, text in secret.get("stringData", {}).items()}
    coded = {file: base64.b64decode(text) for file, text in secret.get("data", {}).items()}
    return plain | coded


def check_config(
    bin_dir: Path, rendered: Rendered, name: str, certificate: Path, folder: Path
) -> tuple[int, str]:
    """Runs `--check-config` of the first container of the workload as its pod would start it."""
    pod = dict(rendered.workloads())[name]
    which = pod["spec"]["containers"][0]
    inside = lay_out(rendered, pod, which["name"], certificate, folder)
    flag, path = which["args"]
    assert flag == "--config"
    settings = Path(inside(path))
    text = settings.read_text()
    for secret in [value for value in strings(tomllib.loads(text)) if value.startswith("/")]:
        text = text.replace(f'"{secret}"', f'"{inside(secret)}"')
    settings.write_text(text)
    made = run(
        bin_dir / f"berth-{which['name']}", flag, settings, "--check-config",
        env={"WORKER_ID": "b-berth-main-0"},
    )
    return made.returncode, made.stdout + made.stderr


def strings(value: object) -> list[str]:
    """Returns all texts in a document."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for each in value.values() for text in strings(each)]
    return [text for each in value for text in strings(each)] if isinstance(value, list) else []


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_the_binaries_take_the_settings(
    helm: str, values: Path, bin_dir: Path, certificate: Path, tmp_path: Path
) -> None:
    rendered = charts.render(helm, values)
    for name, _ in rendered.workloads():
        folder = tmp_path / name
        status, text = check_config(bin_dir, rendered, name, certificate, folder)
        assert status == 0, f"{name}: {text}"
        shown = tomllib.loads(text)
        assert shown["listen"]["admin_addr"].startswith("0.0.0.0:")


def test_values_reach_the_binaries_with_their_types(
    helm: str, bin_dir: Path, certificate: Path, tmp_path: Path
) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(charts.example("quick").read_text() + """
agent:
  settings:
    sessions: { pin_budget_ratio: 0.25, auto_pin: false }
    gpu: { devices: [GPU-5e9a3f0c-0000-0000-0000-000000000000, "1"] }
    limits: { body_bytes_in_flight_max: 8589934592 }
router:
  settings:
    limits: { sessions_max: 1000000 }
    discovery: { dns: { names: ["http://agents:31001"] } }
""")
    rendered = charts.render(helm, values)
    folder = tmp_path / "agent"
    status, text = check_config(bin_dir, rendered, "b-berth-main", certificate, folder)
    assert status == 0, text
    agent = tomllib.loads(text)
    assert agent["sessions"]["pin_budget_ratio"] == 0.25
    assert agent["sessions"]["auto_pin"] is False
    assert agent["gpu"]["devices"] == ["GPU-5e9a3f0c-0000-0000-0000-000000000000", "1"]
    assert agent["limits"]["body_bytes_in_flight_max"] == 8 << 30
    folder = tmp_path / "router"
    status, text = check_config(bin_dir, rendered, "b-berth-router", certificate, folder)
    assert status == 0, text
    router = tomllib.loads(text)
    assert router["limits"]["sessions_max"] == 1_000_000
    assert router["discovery"]["dns"]["names"] == ["http://agents:31001"]
    service = rendered.get("Service", "b-berth-agents")["metadata"]["name"]
    selector = router["discovery"]["kubernetes"]["selector"]
    assert selector == f"kubernetes.io/service-name={service}"


def test_a_key_that_no_binary_has_is_refused(
    helm: str, bin_dir: Path, certificate: Path, tmp_path: Path
) -> None:
    rendered = charts.render(
        helm, charts.example("quick"), "router.settings.limits.bogus=1", "agent.settings.bogus=1"
    )
    for name in ("b-berth-router", "b-berth-main"):
        status, text = check_config(bin_dir, rendered, name, certificate, tmp_path / name)
        assert status == WRONG_SETTINGS and "bogus" in text, text


def test_keys_in_the_values_become_a_key_file(
    helm: str, bin_dir: Path, certificate: Path, tmp_path: Path
) -> None:
    digest = "ab" * 32
    keys = tmp_path / "values.yaml"
    keys.write_text(f"""
auth:
  keys:
    - name: team-a
      sha256: "{digest}"
      limits: {{ requests_per_minute: 600, priority: {{ class: normal, bound: high }} }}
    - {{ name: operator, sha256: "{'cd' * 32}", admin: true }}
    - name: agents
      sha256: "{'ef' * 32}"
      announce: {{ agents: ["gpu-*"], addresses: ["10.0.0.0/24:31001"] }}
engine: {{ model: m }}
""")
    rendered = charts.render(helm, keys)
    folder = tmp_path / "router"
    status, text = check_config(bin_dir, rendered, "b-berth-router", certificate, folder)
    assert status == 0, text
    file = rendered.get("Secret", "b-berth-keys")["stringData"]["keys.toml"]
    first = tomllib.loads(file)["key"][0]
    assert first["sha256"] == digest and first["limits"]["priority"]["bound"] == "high"


def test_the_hook_before_the_end_speaks_the_agents_language(
    helm: str, bin_dir: Path, certificate: Path, tmp_path: Path
) -> None:
    rendered = charts.render(helm, charts.example("quick"))
    pod = dict(rendered.workloads())["b-berth-main"]
    inside = lay_out(rendered, pod, "agent", certificate, tmp_path)
    agent = charts.container(pod["spec"], "agent")
    program, *flags = agent["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "berth"
    flags = [inside_flag(flag, inside) for flag in flags]
    made = run(bin_dir / program, *flags, "--agent", "http://127.0.0.1:1")
    # The flags are taken, and there is no agent to ask.
    assert "127.0.0.1:1" in made.stderr and "Usage" not in made.stderr, made.stderr


# Prints what SGLang makes of the flags that it gets as JSON, one list for each pool.
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
pools = {pool: vars(parser.parse_args(args)) for pool, args in json.load(sys.stdin).items()}
keys = ("host", "disaggregation_mode", "kv_events_config")
json.dump({pool: [args[key] for key in keys] for pool, args in pools.items()}, sys.stdout)
"""


@pytest.mark.slow
def test_sglang_takes_the_engines_flags(helm: str) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = Path(os.environ.get("BERTH_SGLANG_HOME", cache / "berth/sglang-0.5.23"))
    if not (home / "venv/bin/python").exists():
        pytest.skip("SGLang isn't installed: run tests/sglang/install")
    pools = {}
    for name in ("quick", "prefill-decode"):
        for each in charts.render(helm, charts.example(name)).kind("StatefulSet"):
            engine = charts.container(each["spec"]["template"]["spec"], "engine")
            pools[each["metadata"]["name"]] = engine["args"]
    made = subprocess.run(
        [home / "venv/bin/python", "-W", "ignore", "-c", PARSE], input=json.dumps(pools),
        capture_output=True, text=True, timeout=240,
        env={"PATH": os.environ["PATH"], "SGLANG_USE_CPU_ENGINE": "1",
             "LD_LIBRARY_PATH": str(home / "stub")},
    )
    assert made.returncode == 0, made.stderr[-2000:]
    found = json.loads(made.stdout.splitlines()[-1])
    modes = {pool: (host, mode) for pool, (host, mode, _) in found.items()}
    assert modes == {
        "b-berth-main": ("127.0.0.1", "null"),
        "b-berth-prefill": ("0.0.0.0", "prefill"),
        "b-berth-decode": ("0.0.0.0", "decode"),
    }
    for _, _, events in found.values():
        assert json.loads(events)["endpoint"].startswith("tcp://127.0.0.1:")


def inside_flag(flag: str, inside: Callable[[str], str]) -> str:
    name, _, value = flag.partition("=")
    return f"{name}={inside(value)}" if value.startswith("/") else flag
