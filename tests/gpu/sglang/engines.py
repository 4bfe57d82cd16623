"""How the script's engine starts: on a GPU from what was packed, or on a CPU for a dry run.

The packed SGLang meets the GPU machine's torch without the packages that it asks for. What follows
from that is here: which environment variables and flags keep it from them.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from integration.fleet import MODEL, Fleet, start_engine, wait_engine
from integration.processes import Process, free_ports, shim_env, wait_until
from integration import wire

HERE = Path(__file__).resolve().parent
PLANT = HERE.parents[1] / "sglang/plant"
HICACHE_ON_CPU = HERE.parents[1] / "sglang/hicache_on_cpu"
PAGE_TOKENS = 16
MEET_SECONDS_MAX = 30

# The tree in Rust is built for a later torch and panics with 2.11. Norms, activations and rotary
# positions run in plain torch, and nothing is compiled by nvcc.
GPU_ENVIRONMENT = {
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    "SGLANG_CRASH_ON_JIT_COMPILE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
GPU_FLAGS = [
    "--device", "cuda", "--dtype", "bfloat16", "--attention-backend", "triton",
    "--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-custom-all-reduce",
]
# As long contexts as the tests of staged prefill have on a CPU.
LONGER = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


@dataclass(frozen=True)
class Shape:
    """An engine: its model, its sizes, and what else it is asked for."""

    name: str
    model: str
    context_tokens: int
    pool_tokens: int
    rows: int
    flags: tuple[str, ...] = ()
    has_plants: bool = False
    # Flags with which it is tried again if it doesn't start.
    second_try: tuple[str, ...] = ()

    @property
    def has_host_tier(self) -> bool:
        return "--enable-hierarchical-cache" in self.flags


@dataclass(frozen=True)
class Machine:
    """Where the engine runs, and how large the questions are there."""

    # The folder that holds what was packed; `None` is the dry run on a CPU.
    pack: Path | None
    long_tokens: int
    decode_tokens: int
    start_seconds_max: int
    # What subagents add up to under pressure, by the pool.
    pressure_ratio: float
    shapes: dict[str, Shape] = field(hash=False)

    @property
    def has_gpu(self) -> bool:
        return self.pack is not None


def tiered(backend: str, layout: str) -> tuple[str, ...]:
    return (
        "--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", backend,
        "--hicache-mem-layout", layout,
    )


def gpu(pack: Path) -> Machine:
    # Memory for KV of 131,072 bytes a token: 52 GB, and twice the smaller pool in the host's memory.
    long, pool = 131_072, 400_000
    small = Shape("small", "model", 2048, 8192, 16, ("--disable-cuda-graph",), has_plants=True)
    # To record graphs may need kernels that nvcc would have to build.
    graphs = ("--load-format", "dummy", "--cuda-graph-backend-prefill", "disabled")
    large = Shape("large", "large-model", long, pool, 16, graphs,
                  second_try=("--disable-cuda-graph",))
    shapes = [small, large]
    for backend, layout in (("kernel", "layer_first"), ("direct", "page_first_direct")):
        flags = ("--load-format", "dummy", "--disable-cuda-graph", *tiered(backend, layout))
        shapes.append(Shape(f"tiered-{backend}", "large-model", long, 160_000, 16, flags))
    dummy, tier = graphs[:2], tiered("direct", "page_first_direct")
    for name, flags in (("pressure", ()), ("pressure-tiered", tier)):
        flags = (*dummy, "--disable-cuda-graph", *flags)
        shapes.append(Shape(name, "large-model", 40_000, 40_000, 24, flags))
    return Machine(pack, 100_000, 600, 150, 4, {shape.name: shape for shape in shapes})


def cpu() -> Machine:
    # The kernel back end copies on the GPU alone.
    long = 8192
    larger = ("--json-model-override-args", json.dumps({"max_position_embeddings": long}))
    shapes = [
        Shape("small", "model", 2048, 8192, 16, has_plants=True),
        Shape("large", "model", long, 16_384, 8, larger),
        Shape("tiered-direct", "model", long, 9216, 8,
              (*larger, *tiered("direct", "page_first_direct"))),
        Shape("pressure", "model", 2048, 2048, 24),
        Shape("pressure-tiered", "model", 2048, 2048, 24, tiered("direct", "page_first_direct")),
    ]
    return Machine(None, 4000, 150, 240, 2, {shape.name: shape for shape in shapes})


@dataclass
class Lane(Fleet):
    """Engine, shim, agent and router of one shape."""

    machine: Machine = None
    shape: Shape = None

    @property
    def plants(self) -> Path:
        """The file that names the next fault to plant."""
        return self.folder / "plant.json"

    @property
    def settings(self) -> str:
        """The agent's settings: the shim's socket, and sessions that outlive a planned restart."""
        return f'files.shim_socket = "{self.shim_socket}"\nshutdown.handover = true\n'

    def start(self) -> None:
        self.start_engine()
        self.start_agent(settings=self.settings)
        self.start_router()
        self.wait_shim()

    def start_engine(self) -> None:
        env, shape = shim_env(self.shim_socket, self.bin_dir) | LONGER, self.shape
        paths, env["BERTH_STEP_TIMES"] = [HERE / "plugin"], str(self.folder / "steps")
        if shape.has_plants:
            paths.append(PLANT)
            env["BERTH_PLANT"] = str(self.plants)
        if self.machine.has_gpu:
            self._start_packed(env, [*paths, self.machine.pack / "site"])
        else:
            if shape.has_host_tier:
                paths.append(HICACHE_ON_CPU)
            env["PYTHONPATH"] = ":".join([*map(str, paths), env["PYTHONPATH"]])
            self.engine, self.engine_url = start_engine(
                self.folder, self.page_size, rows=shape.rows, pool_tokens=shape.pool_tokens, env=env,
                model=shape.model, more=["--context-length", str(shape.context_tokens), *shape.flags],
            )
        wait_engine(self.engine, self.engine_url)

    def _start_packed(self, env: dict[str, str], paths: list[Path]) -> None:
        port, events, replay, distributed = free_ports(4)
        shape, pack = self.shape, self.machine.pack
        kv_events = {
            "publisher": "zmq", "topic": "kv-events", "bind": True,
            "endpoint": f"tcp://127.0.0.1:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        }
        env |= GPU_ENVIRONMENT | {
            "PYTHONPATH": ":".join([*map(str, paths), env["PYTHONPATH"]]),
            "BERTH_KV_FATBIN": str(pack / "bin/kv_account.fatbin"),
            # The next start finds what this one has compiled.
            "PYTHONDONTWRITEBYTECODE": "",
        }
        command = [
            "python3", "-W", "ignore", "-m", "sglang.launch_server",
            "--model-path", str(pack / shape.model), "--served-model-name", MODEL,
            "--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(distributed),
            "--page-size", str(self.page_size), "--context-length", str(shape.context_tokens),
            "--max-running-requests", str(shape.rows), "--max-total-tokens", str(shape.pool_tokens),
            "--chunked-prefill-size", "8192", "--mem-fraction-static", "0.85",
            "--enable-streaming-session", "--enable-session-radix-cache", "--enable-metrics",
            "--enable-cache-report", "--sleep-on-idle", "--kv-events-config", json.dumps(kv_events),
            *GPU_FLAGS, *shape.flags,
        ]
        self.engine = Process.start("engine", command, self.folder, env)
        self.engine_url = f"http://127.0.0.1:{port}"

    def wait_shim(self) -> None:
        """Waits until the agent's figures are the shim's."""
        def is_heard() -> bool:
            load = self.worker_shown().get("load") or {}
            return ((load.get("pool_used_tokens") or {}).get("source")) == "shim"

        wait_until(self.agent, "hearing from the shim", is_heard, MEET_SECONDS_MAX)

    def worker_shown(self) -> dict:
        """Returns what the router shows of the only worker."""
        [worker] = wire.get(f"{self.router_url}/v1/workers").json()["workers"]
        return worker

    def plant(self, fault: str, *sessions: str) -> None:
        """Lets the engine plant a fault in its own pool between two steps."""
        new = self.plants.with_suffix(".new")
        new.write_text(json.dumps({"fault": fault, "sessions": sessions}))
        new.rename(self.plants)
        wait_until(self.engine, "planting", lambda: not self.plants.exists(), MEET_SECONDS_MAX)


def lane(machine: Machine, shape: Shape, folder: Path, bin_dir: Path) -> Lane:
    own = folder / shape.name
    own.mkdir(exist_ok=True)
    return Lane(own, bin_dir, PAGE_TOKENS, machine=machine, shape=shape)
