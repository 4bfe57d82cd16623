"""The fleets for the soak: with the real engine, with the simulator, or one that already runs.

The engine has eight rows and a small pool, so that sessions compete for room.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from integration.fleet import CONTEXT_TOKENS, Fleet, binaries, start_engine, wait_engine
from integration.processes import TIER_FLAGS, Process, free_ports, shim_env, tier_env
from soak.tokens import VOCABULARY

ROWS = 8
POOL_TOKENS = 2048


@dataclass
class Cluster(Fleet):
    """A fleet of the integration suite whose engine has the soak's own size."""

    simulated: bool = False
    pool_tokens: int = POOL_TOKENS
    # The size of the host tier as a multiple of the pool; 0 for none.
    host_ratio: float = 0

    def start_engine(self) -> None:
        print(
            f"soak: starting the {'simulator' if self.simulated else 'engine'}: {ROWS} rows, "
            f"{self.pool_tokens} tokens, {self.host_ratio:g} times as many on the host, "
            f"page size {self.page_size}",
            flush=True,
        )
        start = self._start_simulator if self.simulated else self._start_real
        self.engine, self.engine_url = start()
        seconds = wait_engine(self.engine, self.engine_url)
        print(f"soak: ready after {seconds:.1f} s", flush=True)

    def _start_real(self) -> tuple[Process, str]:
        env, more = shim_env(self.shim_socket, self.bin_dir), []
        if self.host_ratio:
            env, more = tier_env(env), [*TIER_FLAGS, *self._ratio()]
        return start_engine(self.folder, self.page_size, ROWS, self.pool_tokens, env, more=more)

    def _sim_tier_flags(self) -> list[str]:
        # Only a shim loads KV ahead.
        return [TIER_FLAGS[0], *self._ratio(), "--shim-socket", str(self.shim_socket)]

    def _ratio(self) -> list[str]:
        return ["--hicache-ratio", str(self.host_ratio)]

    def _start_simulator(self) -> tuple[Process, str]:
        # The agent needs nothing else of the model.
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
        (port,) = free_ports(1)
        command = [
            str(self.bin_dir / "engine-sim"),
            "--port", str(port),
            "--model-path", str(model),
            "--served-model-name", "tiny",
            "--page-size", str(self.page_size),
            "--max-total-tokens", str(self.pool_tokens),
            "--context-length", str(CONTEXT_TOKENS),
            "--max-running-requests", str(ROWS),
            "--enable-streaming-session",
            "--enable-session-radix-cache",
            "--health-ms", "50",
            *(self._sim_tier_flags() if self.host_ratio else []),
        ]
        return Process.start("engine", command, self.folder), f"http://127.0.0.1:{port}"


def programs(simulated: bool, guarded: bool) -> Path:
    """Returns the folder of the programs that a phase needs."""
    berth = ("berth-agent", "berth-router", "berth") if guarded else ()
    names = berth + (("engine-sim",) if simulated else ())
    return binaries(names) if names else Path()


def running_at(engine_url: str, router_url: str, agent_data: str, agent_admin: str) -> Cluster:
    """A fleet that already runs, and that the soak doesn't stop."""
    return Cluster(
        Path(),
        Path(),
        page_size=0,
        engine_url=engine_url,
        router_url=router_url,
        agent_data=agent_data,
        agent_admin=agent_admin,
    )
