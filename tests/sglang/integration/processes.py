"""Starts and stops the processes of the integration suite: the engine, the agent, the router.

Each process runs in a process group of its own and is stopped by that group's id, never by a name.
Each writes a log in the suite's folder; the end of the log is shown when something goes wrong.
"""

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from integration import wire
from integration.preloaded import Forked

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Failed(Exception):
    """A process didn't start, or ended too early. The text is for people."""


def _die_with_the_suite() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Process:
    """A process with its process group and its log."""

    name: str
    log: Path
    popen: subprocess.Popen | Forked = field(repr=False)

    @classmethod
    def start(
        cls, name: str, command: list[str], folder: Path, env: dict | None = None
    ) -> "Process":
        log = folder / f"{name}.log"
        with log.open("ab") as out:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                process_group=0,
                preexec_fn=_die_with_the_suite,
            )
        return cls(name, log, popen)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def alive(self) -> bool:
        return self.popen.poll() is None

    def send(self, number: int) -> None:
        """Sends a signal to the process alone."""
        if self.alive():
            self.popen.send_signal(number)

    def send_group(self, number: int) -> None:
        """Sends a signal to the process and to all processes it has started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def wait(self, seconds: float) -> int | None:
        """Returns the exit status, or None if the process hasn't ended within `seconds`."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, seconds: float) -> int | None:
        """Sends TERM, waits for `seconds`, and kills what is left of the group. Returns the exit
        status, or None if TERM didn't end the process in time."""
        # A router serves on for some seconds after TERM, for its balancers.
        self.send(signal.SIGINT if self.name == "router" else signal.SIGTERM)
        status = self.wait(seconds)
        self.send_group(signal.SIGKILL)
        self.popen.wait()
        return status

    def log_tail(self, lines: int = 30) -> str:
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(f"    {self.name}| {line}" for line in text)


def wait_until(process: Process, what: str, ready: Callable[[], bool], seconds: float) -> float:
    """Waits until `ready` is true, with a progress line every 10 s. Returns how many seconds it
    took."""
    begin = time.monotonic()
    printed = begin
    while True:
        now = time.monotonic()
        if ready():
            return now - begin
        if not process.alive():
            raise Failed(
                f"{process.name} ended with status {process.popen.returncode} "
                f"before it was {what}:\n{process.log_tail()}"
            )
        if now - begin > seconds:
            raise Failed(f"{process.name} is not {what} after {seconds:.0f} s:\n{process.log_tail()}")
        if now - printed >= 10:
            printed = now
            print(f"  {process.name}: not yet {what} after {now - begin:.0f} s", flush=True)
        time.sleep(0.1)


def shim_env(socket_path: Path, bin_dir: Path) -> dict[str, str]:
    """Returns the environment in which an engine runs this checkout's shim, with its agent's
    socket at that path."""
    shim = Path(__file__).resolve().parents[3] / "worker-agent/shim"
    paths = [str(shim), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": ":".join(filter(None, paths)),
        "BERTH_SHIM_SOCKET": str(socket_path),
        "BERTH_KV_LIBRARY": str(bin_dir / "libberth_kv.so"),
    }


# The flags of a hierarchical cache on a CPU, without its size.
TIER_FLAGS = [
    "--enable-hierarchical-cache",
    "--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct",
]


def tier_env(env: dict[str, str]) -> dict[str, str]:
    """Adds the plugin that lets an engine on a CPU run its hierarchical cache."""
    plugin = Path(__file__).resolve().parents[1] / "hicache_on_cpu"
    paths = [str(plugin), env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    return env | {"PYTHONPATH": ":".join(filter(None, paths))}


_next_port = int(os.environ.get("BERTH_PORT_FIRST", 20_000 + os.getpid() % 10_000))
# One for each port that was given out. Held until this process ends.
_reservations: list[socket.socket] = []


def free_ports(count: int, lowest: int | None = None) -> list[int]:
    """Returns consecutive free ports, below the range that the kernel assigns from. No port is
    returned twice, because a process that died may be restarted on its old port. Nor is one that
    another suite on this machine was given, because an engine binds its ports late."""
    global _next_port
    for first in range(lowest or _next_port, 32_000):
        ports = range(first, first + count)
        reservations = [_reserve(port) for port in ports]
        if all(reservations):
            _reservations.extend(reservations)
            _next_port = first + count
            return list(ports)
        for reservation in filter(None, reservations):
            reservation.close()
    raise Failed(f"no {count} free ports in a row")


def _reserve(port: int) -> socket.socket | None:
    """Reserves the port as long as the returned socket is open. `None` if it is not free."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0berth-port-{port}")
        with socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("0.0.0.0", port))
    except OSError:
        reservation.close()
        return None
    return reservation


def answers_200(url: str) -> bool:
    try:
        return wire.get(url, seconds=3).status == 200
    except OSError:
        return False
