"""Does `berth doctor` name what is really set wrong in running processes, and nothing else?

The checks `version-differs`, `gpu-readings-old`, `restart-required` and `engine-key-unsent` aren't
here: they need another release of Berth, a driver or an engine that hangs for longer than a test may
take, and an engine whose key doctor itself has. `deploy/cli/src/doctor/tests.rs` plants them in
facts.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration.processes import free_ports

from deploy.misconfigured import MODEL, Fleet, Router, Worker, clock_ahead, machine, protocol
from deploy.programs import run

GIB = 1 << 30
# The checks that no fleet here can violate.
NOT_HERE = {"version-differs", "gpu-readings-old", "restart-required", "engine-key-unsent"}
CLOCK_AHEAD_SECONDS = 90
BALANCER_KEEP_ALIVE_MS = 60_000


@dataclass(frozen=True)
class Plant:
    """What doctor must find, and a part of the line to change."""

    check: str
    about: str
    fix: str


@dataclass
class Diagnosed:
    """A fleet with what is planted in it, and what doctor said."""

    plants: list[Plant]
    report: dict
    found: set[tuple[str, str]]


def diagnose(fleet: Fleet, plants: list[Plant], *flags: str) -> Diagnosed:
    report = fleet.settle({(plant.check, plant.about) for plant in plants}, *flags)
    return Diagnosed(plants, report, fleet.found(report))


def admin_flags(fleet: Fleet) -> list[str]:
    workers = [it for it in fleet.workers.values() if it.is_expected_to_serve]
    return [f"--agent-admin={worker.admin}" for worker in workers]


@pytest.fixture(scope="module")
def sound(bin_dir: Path, folder: Path) -> Iterator[Diagnosed]:
    """Two workers of one model and two routers, all set well."""
    fleet = Fleet(bin_dir, folder / "sound")
    try:
        same = {"served-model-name": "model"}
        fleet.start_workers([Worker("a", engine=same), Worker("b", engine=same)])
        urls = [worker.control for worker in fleet.workers.values()]
        first, second = (fleet.start_router(Router(), urls) for _ in range(2))
        for router in (first, second):
            fleet.wait_for(router, {"a", "b"})
        yield diagnose(
            fleet, [], f"--router={first.url}", "doctor", f"--other-router={second.url}",
            f"--router-admin={first.admin}", f"--router-admin={second.admin}",
            f"--balancer-keep-alive-ms={BALANCER_KEEP_ALIVE_MS}", *admin_flags(fleet))
    finally:
        fleet.stop()


def remove_kv_socket(worker: Worker, folder: Path) -> None:
    # As where the agent's container doesn't mount the folder of the socket.
    (folder / "kv-events").unlink()


def engines(folder: Path) -> list[Worker]:
    """Returns a worker for each fault of an engine."""
    other_model = folder / "other-model"
    shutil.copytree(MODEL, other_model)
    tokenizer = other_model / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    no_replay = f'{{"publisher":"zmq","endpoint":"tcp://127.0.0.1:{free_ports(1)[0]}","bind":true}}'
    no_way = f'{{"publisher":"zmq","endpoint":"ipc://{folder}/engines/kv-events","bind":true,' \
             f'"replay_endpoint":"ipc://{folder}/engines/kv-replays"}}'
    key, wrong_key = ({"BERTH_ENGINE_API_KEY": key} for key in ("right", "wrong"))
    return [
        Worker("streaming", {"enable-streaming-session": None}),
        Worker("radix", {"enable-session-radix-cache": None}),
        Worker("report", {"enable-cache-report": None}),
        Worker("events", {"kv-events-config": None}),
        Worker("replay", {"kv-events-config": no_replay}),
        Worker("way", {"kv-events-config": no_way}, prepare=remove_kv_socket),
        Worker("shim", has_shim=False),
        Worker("storage", {"hicache-storage-backend": "file"}, has_shim=False),
        Worker("protocol", trimmer_version=protocol() - 1),
        Worker("pool", {"context-length": "2000"}),
        Worker("rows", {"max-running-requests": "2"}),
        Worker("page-a", {"served-model-name": "page", "page-size": "16"}),
        Worker("page-b", {"served-model-name": "page", "page-size": "32"}),
        Worker("size-a", {"served-model-name": "size"}),
        Worker("size-b", {"served-model-name": "size", "context-length": "512"}),
        Worker("text-a", {"served-model-name": "text"}),
        Worker("text-b", {"served-model-name": "text", "model-path": str(other_model)}),
        Worker("model", {"model-path": "/no/such/model"}),
        Worker("key", {"api-key": "right"}, agent_env=key),
        Worker("locked", {"api-key": "right"}, agent_env=wrong_key),
    ]


@pytest.fixture(scope="module")
def of_engines(bin_dir: Path, folder: Path) -> Iterator[Diagnosed]:
    fleet = Fleet(bin_dir, folder / "engines")
    try:
        fleet.start_workers(engines(folder))
        workers = fleet.workers
        router = fleet.start_router(Router(), [worker.control for worker in workers.values()])
        plants = [
            Plant("engine-streaming-off", "streaming/0", "--enable-streaming-session"),
            Plant("engine-radix-off", "radix/0", "--enable-session-radix-cache"),
            Plant("engine-cache-report-off", workers["report"].control, "--enable-cache-report"),
            Plant("kv-events-off", "events/0", "--kv-events-config '{"),
            Plant("kv-replay-missing", workers["replay"].control, "replay_endpoint"),
            Plant("kv-events-unreachable", "way/0", "\"endpoint\""),
            Plant("shim-silent", "shim/0", "BERTH_SHIM_SOCKET"),
            Plant("shim-silent", "storage/0", "BERTH_SHIM_SOCKET"),
            Plant("engine-retention-unsafe", "storage/0", "BERTH_SHIM_SOCKET"),
            Plant("shim-other-version", "protocol/0", "install the shim of this agent's"),
            Plant("pool-too-small", "pool/0", "--mem-fraction-static"),
            Plant("rows-too-few", "rows/0", "--max-running-requests"),
            Plant("page-size-differs", "page", "--page-size"),
            Plant("model-differs", "size", "--context-length"),
            Plant("tokenizer-differs", "text", "--model-path"),
            Plant("no-tokenizer", workers["model"].control, "--model-path"),
            Plant("engine-unreadable", workers["key"].control, "BERTH_ENGINE_API_KEY"),
            Plant("engine-unreadable", workers["locked"].control, "BERTH_ENGINE_API_KEY"),
            Plant("worker-stale", workers["locked"].control, "BERTH_ENGINE_API_KEY"),
        ]
        yield diagnose(
            fleet, plants, f"--router={router.url}", "doctor", f"--router-admin={router.admin}",
            *admin_flags(fleet))
    finally:
        fleet.stop()


def gpu_workers(bin_dir: Path, folder: Path) -> list[Worker]:
    """Returns a worker for each fault of a GPU, with the fake NVML."""
    def on(name: str, **gpu: object):
        def prepare(worker: Worker, _: Path) -> None:
            # NVML says which process has how much of the GPU's memory.
            engine = {"pid": worker.processes["engine"].pid, "bytes": 8 * GIB}
            full = {"uuid": f"GPU-{name}", "memory_used": 9 * GIB, "processes": [engine], **gpu}
            for part in full.get("slices", {}).values():
                part["processes"] = [engine]
            library = machine(bin_dir, folder / f"nvml-{worker.name}", {"0": full})
            worker.agent["gpu.nvml_library"] = str(library)
        return prepare

    part = {"uuid": "MIG-a", "memory_total": 16 * GIB, "memory_used": 9 * GIB}
    return [
        Worker("cuda", {"device": "cuda"}),
        Worker("lost", prepare=on("lost", lost=True), agent={"gpu.devices": ["0"]}),
        Worker("foreign", prepare=on("foreign", memory_used=20 * GIB)),
        Worker("slice", prepare=on("slice", mig=True, slices={"0": part})),
        Worker("shared-a", prepare=on("shared")),
        Worker("shared-b", prepare=on("shared")),
    ]


@pytest.fixture(scope="module")
def of_workers(bin_dir: Path, folder: Path) -> Iterator[Diagnosed]:
    """Workers and GPUs with faults, behind one router."""
    fleet = Fleet(bin_dir, folder / "workers")
    openssl = run(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-keyout", fleet.folder / "tls.key", "-out", fleet.folder / "tls.crt", "-days",
        "3", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
        # A CA's certificate is no server's.
        "-addext", "basicConstraints=critical,CA:FALSE")
    assert openssl.returncode == 0, openssl.stderr
    certificate = str(fleet.folder / "tls.crt")
    tls = {"tls.cert": certificate, "tls.key": str(fleet.folder / "tls.key")}
    (fleet.folder / "token").write_text("0123456789abcdef" * 2)
    (fleet.folder / "file").write_text("no folder")
    try:
        fleet.start_workers([
            *gpu_workers(bin_dir, fleet.folder),
            Worker("drained"),
            Worker("killed"),
            Worker("engineless"),
            Worker("same-a", agent={"worker_id": "same"}),
            Worker("one-a"),
            Worker("token", agent={"auth.token_file": str(fleet.folder / "token")}),
            Worker("tls", agent=tls, has_tls=True),
            Worker("folder", agent={"files.state_dir": str(fleet.folder / "file")},
                   is_expected_to_serve=False),
            Worker("few", wrapper=("bash", "-c", 'ulimit -n 4096; exec "$@"', "-")),
        ])
        workers = fleet.workers
        first = workers["one-a"]
        fleet.start_workers([
            Worker("one-b", agent={"engine.url": first.engine_url}, has_engine=False),
            Worker("same-b", agent={"worker_id": "same"}),
        ])
        swapped = f"http://127.0.0.1:{workers['drained'].ports[0]}"
        urls = [*(worker.control for worker in workers.values()), swapped]
        router = fleet.start_router(Router({"agents.ca": certificate}), urls)
        drain = run(bin_dir / "berth", "drain", f"--agent={workers['drained'].control}")
        assert drain.returncode == 0, drain.stderr
        heard = {worker.name for worker in workers.values()} - {"folder", "token", "same-b"}
        fleet.wait_for(router, heard)
        workers["killed"].processes["agent"].send(signal.SIGKILL)
        workers["engineless"].processes["engine"].send(signal.SIGKILL)
        few = f"berth-agent (pid {workers['few'].processes['agent'].pid})"
        plants = [
            Plant("nvml-missing", "cuda/0", "gpu.nvml_library"),
            Plant("gpu-unhealthy", "lost/0 index-0", "replace the GPU"),
            Plant("worker-unhealthy", "lost/0", "see its log"),
            Plant("gpu-foreign-process", "foreign/0 GPU-foreign", "gpu.devices"),
            Plant("gpu-mig", "slice/0 MIG-a", "nvidia-smi -mig 0"),
            Plant("gpu-shared", "GPU-shared", "CUDA_VISIBLE_DEVICES"),
            Plant("drain-left-on", "drained/0", "berth drain --undo --agent"),
            Plant("worker-stale", "killed/0", "start berth-agent"),
            Plant("agent-unreachable", workers["killed"].control, "listen.control_addr"),
            Plant("worker-unhealthy", "engineless/0", "start or continue the engine"),
            Plant("engine-unreadable", workers["engineless"].control, "engine.url"),
            Plant("agent-id-duplicate", "same", "worker_id"),
            Plant("engine-shared", "one-a/0", "engine.url"),
            # The engine's shim has the other agent.
            Plant("shim-silent", "one-b/0", "BERTH_SHIM_SOCKET"),
            Plant("credential-refused", workers["token"].control, "auth.token_file"),
            Plant("worker-stale", workers["token"].control, "agents.token_file"),
            Plant("certificate-expiring", certificate, "replace the file"),
            Plant("agent-unreachable", workers["folder"].control, "start berth-agent"),
            Plant("worker-stale", workers["folder"].control, "router.toml: workers"),
            Plant("ports-swapped", swapped, "listen.control_addr"),
            Plant("worker-stale", swapped, "router.toml: workers"),
            Plant("descriptors-few", few, "LimitNOFILE=65536"),
        ]
        yield diagnose(
            fleet, plants, f"--router={router.url}", "doctor", f"--router-admin={router.admin}",
            f"--ca={certificate}", *admin_flags(fleet))
    finally:
        fleet.stop()


@pytest.fixture(scope="module")
def of_routers(bin_dir: Path, folder: Path) -> Iterator[Diagnosed]:
    """Routers with faults, and two agents."""
    fleet = Fleet(bin_dir, folder / "routers")
    keys = fleet.folder / "keys.toml"
    keys.write_text(f'[[key]]\nname = "a"\nsha256 = "{"ab" * 32}"\n')
    try:
        fleet.start_workers([Worker("w"), Worker("v")])
        agent, other = (worker.control for worker in fleet.workers.values())
        both, start = [agent, other], fleet.start_router
        first = start(Router(), both)
        lone = start(Router({"claims.store": "memory", "connections.keep_alive_ms": 15_000}), both)
        fewer = start(Router(), [agent])
        # The same workers in another order are no fault.
        patient = start(Router({"timeouts.turn_ms_max": 7_200_000}), [f"{other}/", agent])
        ahead = start(Router(env=clock_ahead(fleet.folder, CLOCK_AHEAD_SECONDS)), both)
        everybody = start(Router({"auth.mode": "none"}, host="0.0.0.0"), both)
        keyed = start(Router({"auth.keys_file": str(keys)}), both)
        dead = f"http://127.0.0.1:{free_ports(1)[0]}"
        with_admin = [first, lone, fewer, patient, ahead, everybody, keyed]
        others = [*(router.url for router in with_admin[1:]), first.admin, dead]
        plants = [
            Plant("routers-without-claims", lone.url, "claims.store = \"agents\""),
            Plant("claims-differ", lone.url, "claims.store"),
            Plant("keep-alive-short", lone.url, "connections.keep_alive_ms = 75000"),
            Plant("workers-differ", fewer.url, "workers"),
            Plant("timeouts-contradict", agent, "limits.turn_ms_max = 7200000"),
            Plant("timeouts-contradict", other, "limits.turn_ms_max = 7200000"),
            Plant("clock-skew", ahead.url, "timedatectl"),
            Plant("open-without-key", everybody.url, "auth.keys_file"),
            # Without keys nobody is an admin.
            Plant("credential-refused", everybody.url, "admin = true"),
            Plant("credential-refused", keyed.url, "--key-file"),
            Plant("ports-swapped", first.admin, "listen.data_addr"),
            Plant("router-unreachable", dead, "listen.data_addr"),
        ]
        yield diagnose(
            fleet, plants, f"--router={first.url}", "doctor",
            *(f"--other-router={url}" for url in others),
            *(f"--router-admin={router.admin}" for router in with_admin),
            f"--balancer-keep-alive-ms={BALANCER_KEEP_ALIVE_MS}", *admin_flags(fleet))
    finally:
        fleet.stop()


def assert_named(diagnosed: Diagnosed) -> None:
    """Each plant is found, with the line to change, and nothing else is."""
    wanted = {(plant.check, plant.about) for plant in diagnosed.plants}
    assert diagnosed.found == wanted, (
        f"missing: {sorted(wanted - diagnosed.found)}, more: {sorted(diagnosed.found - wanted)}, "
        f"{diagnosed.report}")
    for plant in diagnosed.plants:
        fixes = [each["fix"] for each in diagnosed.report["findings"]
                 if (each["id"], each["about"]) == (plant.check, plant.about)]
        assert any(plant.fix in fix for fix in fixes), f"{plant}: {fixes}"


def test_nothing_is_found_where_all_is_well(sound: Diagnosed) -> None:
    assert sound.found == set(), sound.report
    assert sound.report["not_asked"] == []


def test_faults_of_engines_are_named(of_engines: Diagnosed) -> None:
    assert_named(of_engines)


def test_faults_of_agents_and_gpus_are_named(of_workers: Diagnosed) -> None:
    assert_named(of_workers)


def test_faults_of_routers_are_named(of_routers: Diagnosed) -> None:
    assert_named(of_routers)


def test_each_check_is_planted(
    bin_dir: Path, of_engines: Diagnosed, of_workers: Diagnosed, of_routers: Diagnosed
) -> None:
    made = run(bin_dir / "berth", "doctor", "--list", env=dict(os.environ))
    checks = {line.split()[0] for line in made.stdout.splitlines()}
    fleets = (of_engines, of_workers, of_routers)
    planted = {plant.check for fleet in fleets for plant in fleet.plants}
    assert planted == checks - NOT_HERE
