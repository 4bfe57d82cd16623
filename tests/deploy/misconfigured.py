"""Starts fleets of real processes, each with its own settings, and asks `berth doctor` about them.

An engine is the engine simulator with its shim. The trimmer, the other half of the shim, is played
by a connection that greets the agent as the real one does.
"""

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration import wire
from integration.processes import Process, answers_200, free_ports, wait_until

from deploy.programs import ROOT, run

START_SECONDS_MAX = 60
# How long a fleet may take until it looks as it should.
SETTLE_SECONDS_MAX = 60
MODEL = ROOT / "tests/data/model"
CODEC = ROOT / "worker-agent/src/shim/codec.rs"
# What a finding is about, with its check.
Found = set[tuple[str, str]]


def protocol() -> int:
    """Returns the version of the protocol between shim and agent."""
    [version] = re.findall(r"pub const VERSION: u8 = (\d+);", CODEC.read_text())
    return int(version)


def greeting(version: int) -> bytes:
    """Returns the first message of a trimmer that works, in MessagePack."""
    def text(value: str) -> bytes:
        return bytes([0xA0 | len(value)]) + value.encode()

    process = b"\xce" + struct.pack(">I", os.getpid())
    message = (b"\x96" + text("Trimmer") + process + b"\xc4\x10" + bytes(16)
               + text("0.5.23") + text("0.1.0") + b"\xc0")
    return struct.pack("<IB", 1 + len(message), version) + message


def toml(settings: dict[str, Any]) -> str:
    """Returns settings, named `table.key`, as TOML."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


@dataclass
class Worker:
    """An engine with its agent, and what is set otherwise than in a sound one."""

    name: str
    # Flags of the engine; None leaves a flag out. `agent` are settings.
    engine: dict[str, str | None] = field(default_factory=dict)
    agent: dict[str, Any] = field(default_factory=dict)
    engine_env: dict[str, str] = field(default_factory=dict)
    agent_env: dict[str, str] = field(default_factory=dict)
    # Put before the agent's command line.
    wrapper: tuple[str, ...] = ()
    has_engine: bool = True
    has_shim: bool = True
    trimmer_version: int | None = None
    # Settings that depend on the running engine.
    prepare: "Callable[[Worker, Path], None]" = lambda worker, folder: None
    is_expected_to_serve: bool = True
    has_tls: bool = False
    ports: list[int] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def control(self) -> str:
        return f"{'https' if self.has_tls else 'http'}://127.0.0.1:{self.ports[1]}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.ports[2]}"

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.ports[3]}"


@dataclass
class Router:
    """A router's settings besides its addresses, and how it is started."""

    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    ports: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.ports[1]}"


class Fleet:
    """Workers, and routers that have all of them in their settings."""

    def __init__(self, bin_dir: Path, folder: Path):
        folder.mkdir()
        self.bin_dir, self.folder = bin_dir, folder
        self.workers: dict[str, Worker] = {}
        self.routers: list[Router] = []
        self._started: list[Process] = []
        self._trimmers: list[socket.socket] = []

    def start_workers(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.ports = free_ports(6)
            self.workers[worker.name] = worker
            if worker.has_engine:
                self._start_engine(worker)
        for worker in workers:
            if worker.has_engine:
                url = f"{worker.engine_url}/server_info"
                key = worker.engine.get("api-key")
                engine = worker.processes["engine"]
                check = (lambda: engine.alive() and is_open(worker.ports[3])) if key else (
                    lambda: answers_200(url))
                wait_until(engine, "ready", check, START_SECONDS_MAX)
            worker.prepare(worker, self.folder)
            self._start_agent(worker)
        for worker in filter(lambda it: it.is_expected_to_serve, workers):
            url, agent = f"{worker.admin}/healthz", worker.processes["agent"]
            wait_until(agent, "serving", lambda: answers_200(url), START_SECONDS_MAX)
            if worker.has_engine and worker.has_shim:
                self._greet(worker)

    def start_router(self, router: Router, workers: list[str]) -> Router:
        number = len(self.routers)
        router.ports = free_ports(2)
        data, admin = router.ports
        settings = {
            "workers": workers, "listen.data_addr": f"{router.host}:{data}",
            "listen.admin_addr": f"127.0.0.1:{admin}", "claims.store": "agents",
            "timeouts.lame_duck_ms": 1, **router.settings,
        }
        process = self._start(
            "berth-router", f"router-{number}", self._write(f"router-{number}", settings),
            router.env)
        wait_until(process, "serving", lambda: answers_200(f"{router.admin}/healthz"),
                   START_SECONDS_MAX)
        self.routers.append(router)
        return router

    def wait_for(self, router: Router, agents: set[str]) -> None:
        """Waits until the router has heard these workers."""
        ids = {self.workers[name].agent.get("worker_id", name) for name in agents}
        url = f"{router.url}/v1/workers"

        def are_heard() -> bool:
            workers = wire.get(url).json()["workers"]
            return ids <= {each["agent"] for each in workers if each.get("load")}
        wait_until(self._started[-1], "aware of its workers", are_heard, START_SECONDS_MAX)

    def stop(self) -> None:
        for trimmer in self._trimmers:
            trimmer.close()
        for process in self._started:
            process.send(signal.SIGKILL)
        for process in self._started:
            process.stop(START_SECONDS_MAX)

    def doctor(self, *flags: str) -> dict:
        """Returns the report of one run."""
        made = run(self.bin_dir / "berth", *flags, "--json", env={"PATH": "/usr/bin:/bin"})
        assert made.returncode in (0, 1), made.stderr
        report = json.loads(made.stdout)
        assert made.returncode == bool(report["findings"]), made.stdout
        return report

    def settle(self, wanted: Found, *flags: str) -> dict:
        """Asks until exactly these findings are there, or for SETTLE_SECONDS_MAX. Returns the last
        report."""
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while True:
            report = self.doctor(*flags)
            is_asked = wanted or not report["not_asked"]
            if (self.found(report) == wanted and is_asked) or time.monotonic() > deadline:
                return report

    def found(self, report: dict) -> Found:
        """Returns the findings of a report, without those of others' processes on this host."""
        own = {f"(pid {process.pid})" for process in self._started}
        return {
            (each["id"], each["about"]) for each in report["findings"]
            if each["id"] != "descriptors-few" or any(pid in each["about"] for pid in own)
        }

    def shim_socket(self, worker: Worker) -> Path:
        return self.folder / f"{worker.name}.sock"

    def _start_engine(self, worker: Worker) -> None:
        events, replays = worker.ports[4:]
        kv_events = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{events}", "bind": True,
                     "replay_endpoint": f"tcp://127.0.0.1:{replays}"}
        flags = {
            "port": str(worker.ports[3]), "model-path": str(MODEL),
            "served-model-name": worker.name, "enable-streaming-session": "",
            "enable-session-radix-cache": "", "enable-cache-report": "",
            "random-seed": str(worker.ports[3]), "kv-events-config": json.dumps(kv_events),
            "shim-socket": str(self.shim_socket(worker)) if worker.has_shim else None,
            **worker.engine,
        }
        words = [f"--{name}={value}" if value else f"--{name}"
                 for name, value in flags.items() if value is not None]
        worker.processes["engine"] = self._start(
            "engine-sim", f"engine-{worker.name}", words, worker.engine_env)

    def _start_agent(self, worker: Worker) -> None:
        data, control, admin, *_ = worker.ports
        settings = {
            "worker_id": worker.name, "engine.url": worker.engine_url,
            "listen.data_addr": f"127.0.0.1:{data}", "listen.control_addr": f"127.0.0.1:{control}",
            "listen.admin_addr": f"127.0.0.1:{admin}",
            "files.state_dir": str(self.folder / f"{worker.name}.state"),
            "files.shim_socket": str(self.shim_socket(worker)), "gpu.nvml_library": "no-nvml",
            "reports.interval_ms": 100, "engine.load_interval_ms": 100,
            "engine.vocabulary": 320, **worker.agent,
        }
        words = self._write(f"agent-{worker.name}", settings)
        worker.processes["agent"] = self._start(
            "berth-agent", f"agent-{worker.name}", words, worker.agent_env, worker.wrapper)

    def _greet(self, worker: Worker) -> None:
        """Connects to the agent as the engine's trimmer does."""
        path = Path(f"{self.shim_socket(worker)}.trim")
        wait_until(worker.processes["agent"], "listening", path.exists, START_SECONDS_MAX)
        trimmer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        trimmer.connect(str(path))
        version = worker.trimmer_version
        trimmer.sendall(greeting(protocol() if version is None else version))
        self._trimmers.append(trimmer)

    def _write(self, name: str, settings: dict[str, Any]) -> list[str]:
        path = self.folder / f"{name}.toml"
        path.write_text(toml(settings))
        return ["--config", str(path)]

    def _start(self, program: str, name: str, words: list[str], env: dict[str, str],
               wrapper: tuple[str, ...] = ()) -> Process:
        command = [*wrapper, str(self.bin_dir / program), *words]
        process = Process.start(name, command, self.folder, {"RUST_LOG": "info", **env})
        self._started.append(process)
        return process


def is_open(port: int) -> bool:
    """Whether something listens at a port of this host."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def machine(bin_dir: Path, folder: Path, gpus: dict[str, Any]) -> Path:
    """Makes a machine with these GPUs, for an agent that loads the returned library."""
    places = [bin_dir / "libnvml_fake.so", bin_dir / "deps/libnvml_fake.so"]
    library = next(place for place in places if place.exists())
    folder.mkdir()
    shutil.copy(library, folder / "libnvidia-ml.so.1")
    (folder / "state.json").write_text(json.dumps({"gpus": gpus}))
    return folder / "libnvidia-ml.so.1"


def clock_ahead(folder: Path, seconds: int) -> dict[str, str]:
    """Returns the environment of a process on a host whose clock is ahead of this one's."""
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(f"""
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *now) {{
  int failed = (int)syscall(SYS_clock_gettime, id, now);
  if (!failed && id == CLOCK_REALTIME) now->tv_sec += {seconds};
  return failed;
}}
""")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library)}
