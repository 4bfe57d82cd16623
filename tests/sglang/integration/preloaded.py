"""Engines that are forks of a process which has imported all that they import (`preload.py`)."""

import json
import os
import subprocess
import threading
import time
from pathlib import Path

# What libraries and SGLang read when they are loaded.
READ_EARLY = (
    "LD_", "OMP_", "KMP_", "MKL_", "TORCH", "TRITON_", "CUDA_", "SGLANG_", "HF_", "TRANSFORMERS_",
)


class Forked:
    """An engine's first process, with the methods of `subprocess.Popen` that the suites use."""

    def __init__(self, preload: "Preload", pid: int):
        self._preload = preload
        self._lock = threading.Lock()
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        # A status can be asked for once.
        with self._lock:
            if self.returncode is None:
                self.returncode = self._preload.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("engine", timeout)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Preload:
    """A process that starts engines, for as long as this one lives."""

    def __init__(self, python: str, env: dict[str, str]):
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(Path(__file__).with_name("preload.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, process_group=0,
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, arguments: list[str], log: Path, env: dict[str, str]) -> Forked:
        command = {"arguments": arguments, "log": str(log), "env": env, "folder": os.getcwd()}
        return Forked(self, self.ask(command))

    def ask(self, command: dict) -> int | None:
        with self._lock:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            if not (answer := self._process.stdout.readline()):
                raise RuntimeError(f"what forks engines has ended: {self._process.wait()}")
            return json.loads(answer)


_preloads: dict[tuple, Preload] = {}
_lock = threading.Lock()


def start(python: str, arguments: list[str], log: Path, env: dict[str, str]) -> Forked:
    """Starts `sglang.launch_server` with these arguments and this environment."""
    early = {name: value for name, value in env.items() if name.startswith(READ_EARLY)}
    key = (python, *sorted(early.items()))
    with _lock:
        if key not in _preloads or not _preloads[key].is_alive():
            # Plugins are found by it, and are each engine's own.
            plain = {name: value for name, value in env.items() if name != "PYTHONPATH"}
            _preloads[key] = Preload(python, plain)
        return _preloads[key].start(arguments, log, env)
