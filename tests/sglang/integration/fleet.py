"""The fleet under test: one engine, one agent, one router, all on loopback."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from integration import preloaded, wire
from integration.processes import Failed, Process, answers_200, free_ports, shim_env, wait_until
from integration.seams import is_before

ENGINE_START_SECONDS_MAX = 240  # 4 s alone on two cores, the first 10 s; loaded machines need more.
BERTH_START_SECONDS_MAX = 60
AGENT_STOP_SECONDS_MAX = 30
ROUTER_STOP_SECONDS_MAX = 30
ENGINE_STOP_SECONDS_MAX = 25  # The engine takes 5 s.
SETTLE_SECONDS_MAX = 30

# Small enough that the pool's use shows, large enough that no test is refused for lack of room.
POOL_TOKENS = 8192
CONTEXT_TOKENS = 2048
ROWS = 16

MODEL = "tiny"
WORKER = "integration"


def engine_home() -> Path:
    return Path(os.environ["BERTH_SGLANG_HOME"])


def start_engine(
    folder: Path,
    page_size: int,
    rows: int = ROWS,
    pool_tokens: int = POOL_TOKENS,
    env: dict | None = None,
    model: str = "model",
    more: list[str] | None = None,
    port_min: int | None = None,
    is_forked: bool = True,
) -> tuple[Process, str]:
    """Starts the engine with `env` added to its environment and `more` to its flags, and returns
    before it is ready. Returns the process and its URL."""
    port, events, replay, load = free_ports(4, port_min)
    # Older engines bind only addresses with an asterisk, and connect to others.
    host = "*" if is_before("0.5.22") else "127.0.0.1"
    kv_events = (
        f'{{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://{host}:{events}",'
        f'"bind":true,"replay_endpoint":"tcp://127.0.0.1:{replay}"}}'
    )
    flags = [
        "--page-size", str(page_size),
        "--max-total-tokens", str(pool_tokens),
        "--context-length", str(CONTEXT_TOKENS),
        "--max-running-requests", str(rows),
        "--chunked-prefill-size", "512",
        "--enable-streaming-session",
        "--enable-session-radix-cache",
        "--kv-events-config", kv_events,
        # The engine binds its load feed to every address, or not at all.
        "--load-publish-endpoint", f"tcp://*:{load}",
        *(more or []),
    ]
    url = f"http://127.0.0.1:{port}"
    return launch_engine(folder, port, flags, env, model, is_forked), url


def cpu_flags(model_path: Path) -> list[str]:
    """The flags with which the engine runs a tiny model on a CPU."""
    return [
        "--model-path", str(model_path),
        "--load-format", "safetensors",
        "--served-model-name", MODEL,
        "--device", "cpu",
        "--attention-backend", "torch_native",
        "--dtype", "float32",
        # Without this flag an idle engine uses a whole core.
        "--sleep-on-idle",
    ]


def cpu_env() -> dict[str, str]:
    libraries = [str(engine_home() / "stub"), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def launch_engine(
    folder: Path,
    port: int,
    flags: list[str],
    env: dict | None = None,
    model: str = "model",
    is_forked: bool = True,
) -> Process:
    """Starts the real engine on the CPU with one of the suite's models and these flags. The
    processes of a forked one are forks of one that has imported all of SGLang: alone on two cores
    it is ready after 4 s instead of 27."""
    home = engine_home()
    arguments = [
        *cpu_flags((home / model).resolve()),
        "--host", "127.0.0.1",
        "--port", str(port),
        # By itself the engine may choose another one's port, or the next of its own.
        "--nccl-port", str(free_ports(1)[0]),
        "--enable-metrics",
        "--enable-cache-report",
        *flags,
    ]
    path = f"{home / 'venv/bin'}:{os.environ['PATH']}"
    python, env = str(home / "venv/bin/python"), {**cpu_env(), "PATH": path, **(env or {})}
    if not is_forked:
        command = [python, "-W", "ignore", "-m", "sglang.launch_server", *arguments]
        return Process.start("engine", command, folder, env)
    log = folder / "engine.log"
    popen = preloaded.start(python, arguments, log, {**os.environ, **env})
    return Process("engine", log, popen)


def wait_engine(engine: Process, url: str) -> float:
    # `/health` runs a token through the model, so a 200 means that the engine can serve.
    return wait_until(
        engine, "ready", lambda: answers_200(f"{url}/health"), ENGINE_START_SECONDS_MAX
    )


PROGRAMS = ("berth-agent", "berth-router", "berth")


def binaries(names: tuple[str, ...] = PROGRAMS) -> Path:
    """Returns the folder with these programs: `BERTH_BIN_DIR`, or cargo's after it has built
    them."""
    if named := os.environ.get("BERTH_BIN_DIR"):
        for name in names:
            if not os.access(Path(named) / name, os.X_OK):
                raise Failed(f"BERTH_BIN_DIR has no program {name}: {Path(named) / name}")
        return Path(named)
    root = Path(__file__).resolve().parents[3]
    print(f"integration: building {' and '.join(names)}", flush=True)
    programs = [word for name in names for word in ("--bin", name)]
    try:
        for what in (programs, ["-p", "capi"]):
            subprocess.run(["cargo", "build", "--locked", *what], cwd=root, check=True)
    except FileNotFoundError:
        raise Failed("cargo is not on the PATH; build the binaries and set BERTH_BIN_DIR") from None
    except subprocess.CalledProcessError as error:
        raise Failed(f"the build failed (cargo's exit status is {error.returncode})") from None
    return Path(os.environ.get("CARGO_TARGET_DIR", root / "target")) / "debug"


@dataclass
class Fleet:
    """The processes, their addresses, and methods that start or stop each of them.

    With `serves`, agent and router are one process, `berth-serve`, and `agent` is the same as
    `router`."""

    folder: Path
    bin_dir: Path
    page_size: int
    engine: Process | None = None
    engine_url: str = ""
    agent: Process | None = None
    router: Process | None = None
    agent_data: str = ""
    agent_control: str = ""
    agent_admin: str = ""
    router_url: str = ""
    router_admin: str = ""
    worker: str = WORKER
    serves: bool = False
    # The ids of the sessions that the running test has opened.
    opened: list[str] = field(default_factory=list)

    @property
    def shim_socket(self) -> Path:
        """The socket where the engine's shim looks for its agent."""
        return self.folder / "shim.sock"

    def journal(self, engine_url: str) -> Path:
        """The file where an agent that was given this address of the engine keeps its sessions."""
        return self.folder / f"engine-{urlsplit(engine_url).port}.journal"

    def start_engine(self, env: dict | None = None, **more: Any) -> None:
        """Starts the engine with the shim and waits until it is ready. `env` is added to its
        environment, and `more` is passed on to the function `start_engine`."""
        print(f"integration: starting the engine, page size {self.page_size}", flush=True)
        env = shim_env(self.shim_socket, self.bin_dir) | (env or {})
        self.engine, self.engine_url = start_engine(self.folder, self.page_size, env=env, **more)
        self.wait_engine()

    def start_readmes_engine(self) -> None:
        """Starts the engine as the README does: at SGLang's own port, for chats, with a shim that
        finds its agent's socket by that port."""
        env = {"PYTHONPATH": shim_env(self.shim_socket, self.bin_dir)["PYTHONPATH"]}
        self.engine, self.engine_url = start_engine(
            self.folder, self.page_size, env=env, model="chat-model", port_min=30_000,
            is_forked=False,
        )
        self.wait_engine()

    def wait_engine(self) -> None:
        seconds = wait_engine(self.engine, self.engine_url)
        print(f"integration: engine ready after {seconds:.1f} s", flush=True)

    def revive(self) -> None:
        """Restarts the whole fleet if one of its processes has ended."""
        if any(not process.alive() for process in self.processes()):
            print("integration: a process has ended; starting the fleet again", flush=True)
            self.stop()
            self.start_engine()
            self.start_agent()
            self.start_router()

    def stop(self) -> None:
        """Stops all processes, whatever state they are in."""
        # An engine needs 5 s to end by TERM, and nobody asks how it ends.
        limits = {"engine": 0, "agent": AGENT_STOP_SECONDS_MAX}
        for process in self.processes():
            seconds = limits.get(process.name, ROUTER_STOP_SECONDS_MAX)
            if process.alive() and process.stop(seconds) is None and seconds:
                print(
                    f"integration: {process.name} didn't end within {seconds} s of TERM", flush=True
                )
            process.stop(0)

    def start_agent(
        self,
        engine_url: str | None = None,
        settings: str = "",
        # Tests fill the few rows of the engine with pinned sessions.
        shares: str = "sessions.pin_rows_ratio = 1.0\n",
    ) -> None:
        """Starts the agent at the addresses it had before, with these lines in its settings
        file. `engine_url` is the engine, or a relay before it."""
        config = self.folder / "agent.toml"
        config.write_text(f'files.state_dir = "{self.folder}"\n{shares}{settings}')
        if not self.agent_data:
            self.agent_data, self.agent_control, self.agent_admin = free_addresses(3)
        addresses = [self.agent_data, self.agent_control, self.agent_admin]
        if self.serves:
            return self._start_serve(config, engine_url or self.engine_url)
        self.agent = self.launch_agent("agent", addresses, engine_url or self.engine_url)
        self._wait_ready(self.agent, self.agent_admin)

    def _start_serve(self, config: Path, engine_url: str) -> None:
        names = ("data_addr", "control_addr", "admin_addr")
        addresses = zip(names, (self.agent_data, self.agent_control, self.agent_admin), strict=True)
        listen = "".join(f'listen.{name} = "{address}"\n' for name, address in addresses)
        config.write_text(f'worker_id = "{self.worker}"\n{listen}{config.read_text()}')
        router_config = self.folder / "router.toml"
        router_config.touch()
        if not self.router_url:
            data, self.router_admin = free_addresses(2)
            self.router_url = f"http://{data}"
        self.agent = self.router = Process.start("router", [
            str(self.bin_dir / "berth-serve"),
            "--engine", engine_url,
            "--agent-config", str(config),
            "--router-config", str(router_config),
            "--data-addr", urlsplit(self.router_url).netloc,
            "--admin-addr", self.router_admin,
        ], self.folder)
        self._wait_ready(self.router, self.router_admin)

    def launch_agent(self, name: str, addresses: list[str], engine_url: str) -> Process:
        """Starts an agent with the newest settings at these addresses, and returns before it is
        ready."""
        data, control, admin = addresses
        return Process.start(name, [
            str(self.bin_dir / "berth-agent"),
            "--config", str(self.folder / "agent.toml"),
            "--engine", engine_url,
            "--data-addr", data,
            "--control-addr", control,
            "--admin-addr", admin,
            "--worker-id", self.worker,
        ], self.folder)

    def start_router(self, *others: "Fleet", settings: str = "") -> None:
        """Starts the router before this fleet's agent and the agents of other fleets. `settings` is
        the text of the router's settings file."""
        config = self.folder / "router.toml"
        if self.serves:
            if others:
                pytest.skip("several engines, each started by itself")
            return self._restart_with(config, settings)
        config.write_text(settings)
        data, admin = free_addresses(2)
        controls = [fleet.agent_control for fleet in (self, *others)]
        self.router = Process.start("router", [
            str(self.bin_dir / "berth-router"),
            "--config", str(config),
            *[word for control in controls for word in ("--worker", f"http://{control}")],
            "--data-addr", data,
            "--admin-addr", admin,
        ], self.folder)
        self.router_url, self.router_admin = f"http://{data}", admin
        self._wait_ready(self.router, admin)

    def _restart_with(self, config: Path, settings: str) -> None:
        """Starts the router with these settings, unless it runs with them."""
        if self.router.alive() and config.read_text() == settings:
            return
        self.router.stop(ROUTER_STOP_SECONDS_MAX)
        config.write_text(settings)
        self.start_agent()

    def restart_agent(self, engine_url: str | None = None, settings: str = "") -> None:
        """Stops the agent properly if it runs, starts it, and waits until turns get through
        again."""
        if self.agent.alive():
            status = self.stop_agent()
            assert status == 0, f"the agent's exit status: {status}\n{self.agent.log_tail()}"
        self.start_agent(engine_url, settings)
        self.wait_placing()

    def wait_placing(self) -> None:
        """Waits until turns get through router and agent."""
        turn = {"text": "Back?", "sampling_params": {"max_new_tokens": 1}}
        url = f"{self.router_url}/generate"
        wait_until(
            self.router, "placing turns again", lambda: wire.post(url, turn).status == 200,
            BERTH_START_SECONDS_MAX,
        )

    def wait_trimming(self) -> None:
        """Waits until the router knows that all workers trim full histories."""
        def trims() -> bool:
            workers = wire.get(f"{self.router_url}/v1/workers").json()["workers"]
            return all(worker["trims"] for worker in workers)

        wait_until(self.router, "sure of the trimmer", trims, BERTH_START_SECONDS_MAX)

    def _wait_ready(self, process: Process, admin: str) -> None:
        url = f"http://{admin}/readyz"
        wait_until(process, "ready", lambda: answers_200(url), BERTH_START_SECONDS_MAX)

    def stop_agent(self) -> int | None:
        return self.agent.stop(AGENT_STOP_SECONDS_MAX)

    def kill_agent(self) -> None:
        """Kills the agent with SIGKILL, as in a crash."""
        self.agent.send_group(signal.SIGKILL)
        self.agent.popen.wait()

    def kill_engine(self) -> None:
        """Kills the engine and all its processes with SIGKILL, as in a crash."""
        self.engine.send_group(signal.SIGKILL)
        self.engine.popen.wait()

    def processes(self) -> list[Process]:
        return [process for process in (self.router, self.agent, self.engine) if process]

    def loads(self) -> list[dict]:
        """The engine's own account, which lags by less than a second."""
        return wire.get(f"{self.engine_url}/v1/loads").json()["loads"]

    def pool_used_tokens(self) -> int:
        """The tokens that running turns and sessions hold, by the engine's own account."""
        return sum(load["num_used_tokens"] for load in self.loads())

    def pool_at_rest(self) -> int:
        """Returns the tokens that sessions hold, once no turn runs or waits by the engine's own
        account of after this call."""
        def at_rest() -> bool:
            seen[:] = self.loads()
            busy = [load["num_running_reqs"] + load["num_waiting_reqs"] for load in seen]
            return not any(busy) and all(load["timestamp"] >= begin for load in seen)

        seen: list[dict] = []
        begin = time.time()
        wait_until(self.engine, "at rest", at_rest, SETTLE_SECONDS_MAX)
        return sum(load["num_used_tokens"] for load in seen)

    def flush(self) -> None:
        """Empties the engine's cache. The engine refuses that while a request runs, and the
        previous turn's request may run for one step after its answer: this waits until the
        engine accepts."""
        def flushed() -> bool:
            return wire.post(f"{self.engine_url}/flush_cache", {}).status == 200

        wait_until(self.engine, "flushed", flushed, SETTLE_SECONDS_MAX)

    def baseline(self) -> int:
        """Returns the pool's use before a test. KV that the previous test released gets some time
        to go; what stays after that is taken as given."""
        return self.wait_pool(0)

    def wait_pool(self, tokens: int, seconds: float = SETTLE_SECONDS_MAX) -> int:
        """Waits until the pool's use is `tokens`, for at most `seconds`. Returns the last
        figure."""
        deadline = time.monotonic() + seconds
        while (used := self.pool_used_tokens()) != tokens and time.monotonic() < deadline:
            time.sleep(0.1)
        return used


def free_addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]
