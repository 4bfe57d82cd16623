"""Finds and runs the programs that the checks need."""

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEPLOY = ROOT / "deploy"
# The exit status with which `tool` says that a program can't be had here.
UNAVAILABLE = 3


class Missing(Exception):
    """A program can't be had on this machine. The text says why."""


def tool(name: str) -> str:
    """Returns the path of a tool, after building it if it isn't in the cache."""
    made = subprocess.run([HERE / "tool", name], capture_output=True, text=True)
    if made.returncode == UNAVAILABLE:
        raise Missing(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def run(*command: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Runs a program to its end, within two minutes."""
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=env, timeout=120
    )
