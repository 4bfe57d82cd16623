"""Runs the programs of others in environments of their own, and returns the outcome of each case."""

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest
from integration.processes import Process

from clients.places import Target

HERE = Path(__file__).parent
RUN_SECONDS_MAX = 1200
CANNOT_INSTALL = 3


class Missing(Exception):
    """A suite can't run here. The text is the reason, for people."""


@cache
def environment(name: str) -> Path:
    """Returns the folder of an environment, after installing it if it is missing."""
    made = subprocess.run([HERE / "environment", name], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    if made.returncode == CANNOT_INSTALL:
        raise Missing(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, f"environment {name}: {made.stderr}"
    return Path(made.stdout.strip())


@dataclass(frozen=True)
class Outcome:
    """How a case ended: it passed if both are None."""

    error: str | None
    # Why its makers skip the case.
    skip: str | None = None

    def check(self) -> None:
        if self.skip:
            pytest.skip(self.skip)
        if self.error is not None:
            raise AssertionError(self.error)


def outcomes(report: Path, cases: list[str], printed: str) -> dict[str, Outcome]:
    """Reads the outcomes of cases that `inner/report.py` has written, or a program in its form."""
    said = report.read_text().splitlines() if report.exists() else []
    ends = {line["case"]: Outcome(line["error"], line.get("skip")) for line in map(json.loads, said)}
    lost = Outcome(f"the program gave no outcome:\n{printed[-2000:]}")
    return {case: ends.get(case, lost) for case in cases}


class Program(Protocol):
    """A suite of others with several cases."""

    def cases(self) -> list[str]:
        """Returns the names of the cases."""

    def run(self, target: Target, cases: list[str], folder: Path) -> dict[str, Outcome]:
        """Runs these cases against the target, with files in the folder."""


def run(
    name: str, command: list[str], folder: Path, env: dict[str, str] | None = None,
    seconds: float = RUN_SECONDS_MAX,
) -> tuple[int | None, str]:
    """Runs a program to its end. Returns its status, None if it had to be stopped, and all that it
    printed."""
    folder.mkdir(parents=True, exist_ok=True)
    fixed = {
        "PYTHONDONTWRITEBYTECODE": "1",
        # The suites' own path is none of the program's.
        "PYTHONPATH": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": "200",
        "HOME": str(folder),
    }
    process = Process.start(name, command, folder, {**fixed, **(env or {})})
    status = process.wait(seconds)
    process.stop(5)
    return status, process.log.read_text(errors="replace")


@dataclass(frozen=True)
class Script:
    """A program that runs the cases which a file lists, and reports each as `outcomes` reads it."""

    name: str
    names: tuple[str, ...]
    # Returns the program with its arguments, for a run with files in this folder.
    command: Callable[[Path], list[str]]
    # What the program needs before it can run.
    environments: tuple[str, ...] = ()

    def cases(self) -> list[str]:
        for name in self.environments:
            environment(name)
        return list(self.names)

    def run(self, target: Target, cases: list[str], folder: Path) -> dict[str, Outcome]:
        folder.mkdir(parents=True, exist_ok=True)
        report, chosen = folder / "report.jsonl", folder / "cases"
        chosen.write_text("\n".join(cases))
        env = target.env() | {"CLIENTS_REPORT": str(report), "CLIENTS_CASES": str(chosen)}
        _, printed = run(self.name, self.command(folder), folder, env)
        return outcomes(report, cases, printed)


def python(environment_name: str, file: str) -> Callable[[Path], list[str]]:
    """Returns the command of a file of `inner` in an environment of Python."""
    return lambda _: [str(environment(environment_name) / "bin/python"), str(HERE / "inner" / file)]


@dataclass(frozen=True)
class PytestProgram:
    """Tests that pytest runs, in an environment of theirs."""

    environment: str
    # The name of the tests' folder under `sources`; None: the folder `inner`.
    source: str | None
    files: tuple[str, ...]
    # The cases that apply here: those whose name contains one of these texts.
    only: tuple[str, ...] = ("",)
    flags: tuple[str, ...] = ()
    # The name of a variable that gets the target's URL, and what is added to the URL.
    url_variable: str = "CLIENTS_URL"
    url_path: str = ""

    def root(self) -> Path:
        if self.source is None:
            return HERE / "inner"
        return environment("sources") / self.source

    def cases(self) -> list[str]:
        root, python = self.root(), environment(self.environment)
        command = [*self._command(), "--collect-only", *self._select(self.files)]
        texts = [*command, *((root / file).read_text() for file in self.files)]
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
        kept = python / f"cases-{digest}"
        if not kept.exists():
            made = subprocess.run(command, capture_output=True, text=True, env=self._env())
            lines = [line for line in made.stdout.splitlines() if "::" in line]
            assert made.returncode == 0 and lines, f"no cases:\n{made.stdout}{made.stderr}"
            # A rename, so that a reader never finds a part of it.
            new = kept.with_suffix(f".{os.getpid()}")
            new.write_text("\n".join(lines))
            new.rename(kept)
        names = kept.read_text().splitlines()
        return [name for name in names if any(text in name for text in self.only)]

    def run(self, target: Target, cases: list[str], folder: Path) -> dict[str, Outcome]:
        folder.mkdir(parents=True, exist_ok=True)
        report, chosen = folder / "report.jsonl", folder / "cases"
        chosen.write_text("\n".join(self._select(cases)))
        env = self._env() | target.env() | {
            self.url_variable: target.url + self.url_path,
            "CLIENTS_REPORT": str(report),
        }
        _, printed = run("pytest", [*self._command(), f"@{chosen}"], folder, env)
        return outcomes(report, cases, printed)

    def _env(self) -> dict[str, str]:
        paths = f"{self.root()}:{HERE / 'inner'}"
        return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}

    def _command(self) -> list[str]:
        python = str(environment(self.environment) / "bin/python")
        config = "pyproject.toml" if self.source else "pytest.ini"
        return [
            python, "-m", "pytest", "-c", str(self.root() / config), "-o", "addopts=",
            "-p", "no:cacheprovider", "-p", "report", "-q", "--tb=short", *self.flags,
        ]

    def _select(self, names: tuple[str, ...] | list[str]) -> list[str]:
        return [str(self.root() / name) for name in names]
