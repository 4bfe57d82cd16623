"""Where the suites run: an engine, real or simulated, with an agent and a router before it.

A suite is pointed at the router's URL, or at the engine's own ("bare") for comparison. Fleets are
those of tests/sglang; here they have the sizes that the suites of others expect.
"""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from integration import wire
from integration.fleet import Fleet, engine_home, launch_engine
from integration.processes import Process, free_ports, shim_env

KINDS = ("engine", "simulator")


@dataclass(frozen=True)
class Launch:
    """How an engine is started for some suites."""

    name: str
    # The name of its model: some suites name the model of their makers.
    model: str = "tiny"
    # What the simulator and the real engine both know.
    page_size: int = 16
    pool_tokens: int = 65_536
    context_tokens: int = 4096
    rows: int = 48
    env: dict[str, str] = field(default_factory=dict, hash=False)
    # Flags that only the real engine knows.
    engine_flags: tuple[str, ...] = ()
    # Flags that only the simulator knows.
    simulator_flags: tuple[str, ...] = ()
    # Engines, each with an agent of its own.
    workers: int = 1
    # Whether the simulator has a shim, and whether it publishes its KV events.
    shim: bool = True
    events: bool = False
    # The router's settings.
    router_settings: str = ""

    def flags(self) -> list[str]:
        return [
            "--page-size", str(self.page_size),
            "--max-total-tokens", str(self.pool_tokens),
            "--context-length", str(self.context_tokens),
            "--max-running-requests", str(self.rows),
            "--enable-streaming-session",
            "--enable-session-radix-cache",
        ]


# The simulator's answers end by themselves, as the chat model's do: many requests set no limit.
ENDING = ("--eos-per-mille", "20")
# Slow enough that a computed prompt takes far longer than one that is there.
SLOW = ("--prefill-tokens-per-s", "5000")


def small_pools(name: str, workers: int, **more: bool) -> Launch:
    """Returns the launch of engines that each hold eight contexts of 3,000 tokens."""
    return Launch(
        name, pool_tokens=24_576, context_tokens=8192, workers=workers, simulator_flags=SLOW,
        **{"events": True, **more},
    )

LAUNCHES = {
    launch.name: launch
    for launch in (
        # The kits ask for answers of 100,000 tokens, and abort them. The simulator is slow enough
        # that what they interrupt after a second or two still runs.
        Launch("main", context_tokens=131_072, simulator_flags=("--decode-ms-per-step", "4")),
        # The models that the libraries' own tests name.
        Launch(
            "chats", "gpt-6-astra", engine_flags=("--enable-response-store",),
            simulator_flags=ENDING,
        ),
        Launch("completions", "gpt-3.5-turbo-instruct", simulator_flags=ENDING),
        Launch("messages", "claude-opus-5-5", simulator_flags=ENDING),
        # For prompts of recorded agents.
        Launch("agents", context_tokens=131_072, pool_tokens=1_048_576),
        # Coding agents, whose instructions and tools are long, and longer in tokens of one byte.
        Launch(
            "programs", "qwen3-coder", context_tokens=524_288, pool_tokens=2_097_152,
            simulator_flags=("--eos-per-mille", "100", "--prefill-tokens-per-s", "1000000"),
        ),
        # The sizes of the kit for aborted prefills.
        Launch("small", page_size=256, context_tokens=512, pool_tokens=16_384),
        *(small_pools(f"pressure-{workers}", workers) for workers in (2, 4, 8)),
        small_pools("pressure-2-silent", 2, shim=False, events=False),
        Launch("side-by-side", context_tokens=131_072, pool_tokens=200_000, workers=4, events=True),
        # Streams wait for their first event, and get many comments meanwhile.
        Launch(
            "comments", context_tokens=8192, simulator_flags=("--prefill-tokens-per-s", "4000"),
            router_settings="timeouts.waiting_comment_ms = 50\n",
        ),
        Launch("one-row", rows=1, env={"SGLANG_REQ_WAITING_TIMEOUT": "0.5"}),
        Launch("timeouts", env={"SGLANG_REQ_RUNNING_TIMEOUT": "2"}),
    )
}


class Cluster(Fleet):
    """A fleet of tests/sglang with an engine of a kind and a launch given here."""

    def __init__(
        self, folder: Path, bin_dir: Path, kind: str, launch: Launch, worker: str = "clients"
    ):
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, bin_dir, launch.page_size, worker=worker)
        self.kind = kind
        self.launch = launch
        alone = replace(launch, workers=1)
        self.others = [
            Cluster(folder / f"worker-{number}", bin_dir, kind, alone, f"clients-{number}")
            for number in range(1, launch.workers)
        ]

    @property
    def model_path(self) -> str:
        """The folder of the model. The simulator knows only the ids of the model of bytes."""
        name = "chat-model" if self.kind == "engine" else "model"
        return str((engine_home() / name).resolve())

    def start(self) -> None:
        print(f"clients: starting the {self.kind}, launch {self.launch.name!r}", flush=True)
        for each in (self, *self.others):
            each.start_worker()
        self.start_router(*self.others, settings=self.launch.router_settings)
        self.wait_placing()

    def processes(self) -> list[Process]:
        return super().processes() + [
            process for other in self.others for process in other.processes()
        ]

    def start_worker(self) -> None:
        if self.kind == "engine":
            self._start_engine()
        else:
            self._start_simulator()
        self.wait_engine()
        self.start_agent(settings=f'files.shim_socket = "{self.shim_socket}"\n')

    def revive(self) -> None:
        """Starts the fleet again if one of its processes has ended."""
        if any(not process.alive() for process in self.processes()):
            self.stop()
            self.start()

    def _start_engine(self) -> None:
        (port, *ports) = free_ports(3)
        flags = [
            *self.launch.flags(),
            "--chunked-prefill-size", "512",
            "--kv-events-config", kv_events(*ports),
            "--json-model-override-args",
            json.dumps({"max_position_embeddings": self.launch.context_tokens}),
            # The later of two flags wins.
            "--served-model-name", self.launch.model,
            *self.launch.engine_flags,
        ]
        env = shim_env(self.shim_socket, self.bin_dir) | self.launch.env
        self.engine = launch_engine(self.folder, port, flags, env, self.model_path)
        self.engine_url = f"http://127.0.0.1:{port}"

    def _start_simulator(self) -> None:
        (port, *ports) = free_ports(3)
        command = [
            str(self.bin_dir / "engine-sim"),
            "--port", str(port),
            "--model-path", self.model_path,
            "--served-model-name", self.launch.model,
            *(("--shim-socket", str(self.shim_socket)) if self.launch.shim else ()),
            *(("--kv-events-config", kv_events(*ports)) if self.launch.events else ()),
            "--health-ms", "50",
            "--enable-metrics",
            "--enable-cache-report",
            *self.launch.flags(),
            *self.launch.simulator_flags,
        ]
        self.engine = Process.start("engine", command, self.folder, self.launch.env)
        self.engine_url = f"http://127.0.0.1:{port}"

    def placements(self) -> dict[str, float]:
        """Returns the router's placements by reason."""
        text = wire.get(f"http://{self.router_admin}/metrics").body.decode()
        name = "berth_router_placements_total{reason="
        return {
            line.split('"')[1]: float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(name)
        }


def kv_events(events: int, replay: int) -> str:
    """Returns the engine's setting to publish KV events at these ports."""
    return json.dumps({
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": f"tcp://127.0.0.1:{events}",
        "bind": True,
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
    })


@dataclass(frozen=True)
class Target:
    """The address that a suite gets."""

    url: str
    model: str
    model_path: str
    # The engine's process, whose life the kits check.
    engine_pid: int

    def env(self) -> dict[str, str]:
        """Returns the target as environment variables, for programs."""
        return {
            "CLIENTS_URL": self.url,
            "CLIENTS_MODEL": self.model,
            "CLIENTS_MODEL_PATH": self.model_path,
            "CLIENTS_ENGINE_PID": str(self.engine_pid),
        }


def target(cluster: Cluster, bare: bool) -> Target:
    return Target(
        cluster.engine_url if bare else cluster.router_url,
        cluster.launch.model,
        cluster.model_path,
        cluster.engine.pid,
    )


def added(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Returns by how much each placement's count has grown."""
    return {name: count - before.get(name, 0) for name, count in after.items()}


def traces(option: str | None) -> Path | None:
    """Returns the folder of recorded traces, if one was named."""
    named = option or os.environ.get("BERTH_TRACES")
    if not named:
        return None
    folder = Path(os.environ.get("BERTH_CALLED_FROM", "."), named)
    return folder if folder.is_dir() else None


