"""Does `berth serve` of the wheel start real engines, and end with them?

The wheel is installed into an environment of its own, beside the one that has SGLang."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration import wire
from integration.fleet import (
    CONTEXT_TOKENS, MODEL, POOL_TOKENS, PROGRAMS, ROWS, binaries, cpu_env, cpu_flags, engine_home,
)
from integration.processes import Process, free_ports, wait_until

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = ("What is a KV cache?", "Why is it large?", "How is it freed?")
START_SECONDS_MAX = 240
END_SECONDS_MAX = 60


@dataclass
class Installed:
    """The environment with the wheel, and how long pip took."""

    bin: Path
    seconds: float


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    programs = binaries((*PROGRAMS, "berth-serve"))
    folder = tmp_path_factory.mktemp("wheel")
    build = [str(ROOT / "deploy/release/wheel"), "--bin-dir", str(programs), str(folder)]
    subprocess.run(build, check=True)
    [wheel] = folder.glob("berth_sglang-*.whl")
    venv = folder / "venv"
    python = engine_home() / "venv/bin/python"
    subprocess.run([python, "-m", "venv", venv], check=True)
    [packages] = venv.glob("lib/python*/site-packages")
    [engine_packages] = (engine_home() / "venv").glob("lib/python*/site-packages")
    (packages / "sglang.pth").write_text(f"{engine_packages}\n")
    begin = time.monotonic()
    # Its one dependency is SGLang's, too.
    subprocess.run([venv / "bin/pip", "install", "--quiet", "--no-deps", wheel], check=True)
    return Installed(venv / "bin", time.monotonic() - begin)


@dataclass
class Serve:
    process: Process
    url: str

    @property
    def log(self) -> str:
        return self.process.log.read_text(errors="replace")

    def wait_ready(self) -> float:
        return wait_until(
            self.process, "ready", lambda: "berth: ready" in self.log, START_SECONDS_MAX
        )

    def engines(self) -> list[int]:
        pid = self.process.pid
        return [int(it) for it in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def tree(self) -> set[int]:
        """All processes below, engines with their schedulers."""
        found, left = set(), [self.process.pid]
        while left:
            for children in Path(f"/proc/{left.pop()}/task").glob("*/children"):
                new = {int(it) for it in children.read_text().split()} - found
                found |= new
                left += new
        return found


@pytest.fixture
def serve(installed: Installed, tmp_path: Path) -> Iterator:
    started: list[Serve] = []

    def start(*flags: str, model: str = "chat-model", engine_flags: tuple[str, ...] = ()) -> Serve:
        data, admin = free_ports(2)
        config = tmp_path / f"agent-{len(started)}.toml"
        listen = (f'listen.{name} = "127.0.0.1:0"\n' for name in (
            "data_addr", "control_addr", "admin_addr",
        ))
        config.write_text(f'files.state_dir = "{tmp_path}/state"\n{"".join(listen)}')
        path = engine_home() / model
        command = [
            str(installed.bin / "berth"), "serve", *flags, "--agent-config", str(config),
            "--data-addr", f"127.0.0.1:{data}", "--admin-addr", f"127.0.0.1:{admin}", "--",
            str(installed.bin / "python"), "-W", "ignore", "-m", "sglang.launch_server",
            *cpu_flags(path.resolve() if path.exists() else path), *SIZES, *engine_flags,
        ]
        env = cpu_env() | {"PATH": f"{installed.bin}:{os.environ['PATH']}"}
        process = Process.start(f"serve-{len(started)}", command, tmp_path, env)
        started.append(Serve(process, f"http://127.0.0.1:{data}"))
        return started[-1]

    yield start
    for each in started:
        each.process.stop(END_SECONDS_MAX)


SIZES = (
    "--max-total-tokens", str(POOL_TOKENS), "--context-length", str(CONTEXT_TOKENS),
    "--max-running-requests", str(ROWS), "--chunked-prefill-size", "512",
)


def own_port() -> tuple[str, ...]:
    return "--port", str(free_ports(1)[0]), "--nccl-port", str(free_ports(1)[0])


def gone(processes: set[int]) -> bool:
    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return not any(lives(pid) for pid in processes)


def talk(url: str) -> list[str | None]:
    """Sends the README's conversation. Returns how each turn ran."""
    messages, ran = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = {"model": MODEL, "messages": messages, "max_tokens": 20}
        headers = {"x-berth-session-id": "my-agent-2"}
        answer = wire.post(f"{url}/v1/chat/completions", body, headers=headers)
        assert answer.status == 200, answer.body
        ran.append(answer.headers.get("x-berth-session-turn"))
        text = json.loads(answer.body)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
    return ran


def test_two_engines_serve_the_readmes_client_and_ctrl_c_leaves_nothing(
    installed: Installed, serve
) -> None:
    begin = time.monotonic()
    both = serve("--gpus", "0,1")
    both.wait_ready()
    ran = talk(both.url)
    seconds = time.monotonic() - begin
    assert ran[0] == "tagged" and ran[1] in ("pinned", "reopened"), ran
    workers = wire.get(f"{both.url}/v1/workers").json()["workers"]
    assert len({each["agent"] for each in workers}) == 2, workers
    assert all(each["trims"] for each in workers), "the wheel's plugin is in both engines"
    print(f"pip {installed.seconds:.1f} s; two engines and three turns {seconds:.1f} s")
    processes = both.tree()
    assert len(both.engines()) == 2
    both.process.send(signal.SIGINT)
    assert both.process.wait(END_SECONDS_MAX) == 0, both.process.log_tail()
    assert gone(processes)
    assert '"GET /v1/loads' not in both.log, "the agent's own questions"


def test_a_killed_engine_ends_berth_serve_with_its_status(serve) -> None:
    one = serve(engine_flags=own_port())
    one.wait_ready()
    processes = one.tree()
    os.kill(one.engines()[0], signal.SIGKILL)
    assert one.process.wait(END_SECONDS_MAX) == 128 + signal.SIGKILL, one.process.log_tail()
    wait_until_gone(processes)


def test_no_process_of_an_engine_outlives_berth_serve(serve) -> None:
    one = serve(engine_flags=own_port())
    one.wait_ready()
    processes = one.tree()
    one.process.send(signal.SIGKILL)
    wait_until_gone(processes)


def wait_until_gone(processes: set[int]) -> None:
    deadline = time.monotonic() + END_SECONDS_MAX
    while not gone(processes):
        assert time.monotonic() < deadline, f"some of {processes} still run"
        time.sleep(0.1)


def test_a_model_that_is_not_there_is_named_as_the_cause(serve) -> None:
    one = serve(model="no-such-model", engine_flags=own_port())
    status = one.process.wait(START_SECONDS_MAX)
    assert status not in (0, None), one.process.log_tail()
    assert "before it was ready: the model isn't there" in one.log, one.process.log_tail()
    assert "its last lines:" in one.log


