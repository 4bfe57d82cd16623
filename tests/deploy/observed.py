"""A fleet that Debian's Prometheus scrapes: a router, and two agents with engine simulators.

The first agent's machine has a GPU, of the fake NVML. Alerts are evaluated without their waiting
times.
"""

import hashlib
import json
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from integration import wire
from integration.processes import Process, answers_200, free_ports, wait_until

from deploy.queries import RULES

SECONDS_MAX = 60
STOP_SECONDS_MAX = 60
# The most connections of an admin port are 64.
CONNECTIONS = 70
# An engine's rate is known after 1,024 tokens, which two of them have.
LONG_PROMPTS_MAX = 50
KEY = "sk-of-the-tests-" + 32 * "0"
# NVML's type of the event that an XID is, and its code for an unknown error.
XID_EVENT, UNKNOWN_ERROR = 8, 999


class Machine:
    """A machine with a GPU that an engine uses: a copy of the fake NVML, with its state."""

    def __init__(self, bin_dir: Path, folder: Path):
        self.library = folder / "libnvidia-ml.so.1"
        self._state = folder / "state.json"
        folder.mkdir()
        places = [bin_dir / name for name in ("libnvml_fake.so", "deps/libnvml_fake.so")]
        built = next((path for path in places if path.exists()), None)
        assert built, f"the fake NVML isn't in {bin_dir}: build the package harness"
        shutil.copy(built, self.library)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(SECONDS_MAX)
        self._listener.bind(str(folder / "control.sock"))
        self._listener.listen()

    def start_engine(self, process: Process) -> None:
        """Puts an engine's process on the GPU, before the library is loaded."""
        gpu = {
            "uuid": "GPU-1", "memory_used": 9 << 30, "throttle_reasons": 4,
            "processes": [{"pid": process.pid, "bytes": 4 << 30}],
            "fail": {"nvmlDeviceGetTotalEnergyConsumption": UNKNOWN_ERROR},
        }
        self._state.write_text(json.dumps({"gpus": {"0": gpu}}))

    def raise_xid(self, number: int) -> None:
        """Has the driver report an error, when the agent has loaded the library."""
        with self._listener.accept()[0] as control, control.makefile("rw") as lines:
            event = {"event": {"gpu": 0, "kind": XID_EVENT, "data": number}}
            lines.write(f"{json.dumps(event)}\n")
            lines.flush()
            assert json.loads(lines.readline()) == "done"

    def close(self) -> None:
        self._listener.close()


class Observed:
    """The fleet and its Prometheus."""

    def __init__(self, programs: Path, bin_dir: Path, folder: Path):
        folder.mkdir()
        self._programs, self._bin_dir, self._folder = programs, bin_dir, folder
        self._started: list[Process] = []
        self._data, self._admin, self._port = free_ports(3)
        self._machine = Machine(bin_dir, folder / "machine")
        self._engines: list[Process] = []
        self._prometheus: Process | None = None
        # The addresses of the agents' admin ports, by worker id.
        self.agents: dict[str, str] = {}

    def start(self) -> None:
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        rights = 'announce = { agents = ["w*"], addresses = ["127.0.0.0/8"] }'
        self._write("keys.toml", f'[[key]]\nname = "tests"\nsha256 = "{digest}"\n{rights}\n')
        self._write("key", KEY)
        self._write("token", 8 * "token-")
        controls = [self._start_worker(name) for name in ("w1", "w2")]
        router = self._run("router", "berth-router", "--config", self._write("router.toml", f"""
            workers = {json.dumps([f"http://127.0.0.1:{port}" for port in controls])}
            listen.data_addr = "127.0.0.1:{self._data}"
            listen.admin_addr = "127.0.0.1:{self._admin}"
            log.access = "{self._folder}/access.log"
            agents.token_file = "{self._folder}/token"
            auth.keys_file = "{self._folder}/keys.toml"
            auth.metrics_auth = "none"
            discovery.announce = true
        """))
        self._prometheus = self._start_prometheus()
        for address in (*self.agents.values(), f"127.0.0.1:{self._admin}"):
            url = f"http://{address}/readyz"
            wait_until(router, "ready", lambda: answers_200(url), SECONDS_MAX)
        # What happens before the first scrape is in no rate.
        self.wait("aware of the fleet", lambda: self._answers() and self.sum("sum(up)") == 3)

    def stop(self) -> None:
        for process in reversed(self._started):
            process.send(signal.SIGINT)
            process.stop(STOP_SECONDS_MAX)
        self._machine.close()

    def provoke(self) -> None:
        """Brings about what operators look at: turns, refusals, an expired session and more."""
        for number in range(4):
            self.converse(f"s{number}", 4)
        self.converse("volatile", 7, lambda turn: f"It is {turn} o'clock. ")
        for worker in self.agents:
            with self._only(worker):
                self._measure_prefill(worker)
        hi = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert self.turn(hi, x_session_id="").status == 200
        assert self.turn(hi, x_berth_session_id="gone", x_berth_delta="true").status == 404
        delta = self.turn(hi, x_berth_session_id="s0", x_berth_delta="true")
        assert delta.status == 409, delta
        opened = self.turn({"session_id": "short", "timeout": 1}, "v1/sessions")
        assert opened.status in (200, 201), opened
        self._machine.raise_xid(31)
        for address in (*self.agents.values(), f"127.0.0.1:{self._admin}"):
            with ExitStack() as open_connections:
                host, port = address.split(":")
                opened = [
                    open_connections.enter_context(
                        socket.create_connection((host, int(port)), SECONDS_MAX))
                    for _ in range(CONNECTIONS)
                ]
                assert opened[0].recv(1) == b"", "the port keeps a connection that was idle longest"

    def end_an_engine(self) -> str:
        """Ends the engine of the second agent, with a session. Returns the agent's address."""
        with self._only("w2"):
            assert self.converse("lost", 2).startswith("w2/")
        self._engines[1].send(signal.SIGKILL)
        return self.agents["w2"]

    def _measure_prefill(self, worker: str) -> None:
        """Sends long prompts, which are computed in stages, until the agent has measured its
        engine's prefill rate."""
        metric = b"\nberth_agent_prefill_rate_tokens_per_second{"
        for number in range(LONG_PROMPTS_MAX):
            ids = [5 + (number + 1) * position % 200 for position in range(900)]
            answer = self.turn(
                {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}}, "generate")
            assert answer.headers["x-berth-worker"].startswith(worker), answer
            if metric in wire.get(f"http://{self.agents[worker]}/metrics").body:
                return
        raise AssertionError(f"{LONG_PROMPTS_MAX} long prompts measured no rate at {worker}")

    @contextmanager
    def _only(self, worker: str) -> Iterator[None]:
        """Drains the other agent, so that new sessions begin at this one."""
        [other] = [address for name, address in self.agents.items() if name != worker]

        def is_draining() -> bool:
            return b'berth_router_workers{state="draining"} 1' in wire.get(
                f"http://127.0.0.1:{self._admin}/metrics").body

        assert wire.post(f"http://{other}/drain").status == 200
        self.wait("aware that an agent drains", is_draining)
        yield
        assert wire.post(f"http://{other}/undrain").status == 200
        self.wait("aware that no agent drains", lambda: not is_draining())

    def turn(self, body: dict, route: str = "v1/chat/completions", **headers: str) -> wire.Answer:
        """Sends a request to the router, and returns its whole answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"http://127.0.0.1:{self._data}/{route}"
        return wire.post(url, body, {"authorization": f"Bearer {KEY}", **named})

    def converse(
        self, session: str, turns: int, begin: Callable[[int], str] = lambda _: ""
    ) -> str:
        """Runs a conversation whose client sends the whole history with each turn. Its system
        prompt begins with what `begin` returns. Returns the last turn's worker."""
        history: list[dict] = []
        worker = ""
        for number in range(turns):
            system = f"{begin(number)}You help with {session}. {40 * 'Be brief. '}"
            history.append({"role": "user", "content": f"Question {number}, please."})
            answer = self.turn({
                "model": "tiny", "messages": [{"role": "system", "content": system}, *history],
                "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True},
            }, x_session_id=session)
            assert answer.status == 200, answer
            events = re.findall(rb"^data: (\{.*\})", answer.body, re.MULTILINE)
            choices = [choice for event in events for choice in json.loads(event)["choices"]]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            history.append({"role": "assistant", "content": text})
            worker = answer.headers["x-berth-worker"]
        return worker

    def query(self, expr: str) -> list[dict]:
        """Returns what Prometheus answers to a query: an instant vector."""
        answer = self._get(f"query?query={quote(expr)}")
        assert answer["resultType"] == "vector", expr
        return answer["result"]

    def sum(self, expr: str) -> float:
        """Returns the sum of what Prometheus answers to a query."""
        return sum(float(sample["value"][1]) for sample in self.query(expr))

    def labels(self, metric: str) -> set[str]:
        """Returns the labels that the metric's series have."""
        return set(self._get(f"labels?match[]={metric}"))

    def names(self) -> set[str]:
        """Returns the names of all metrics that have series."""
        return set(self._get("label/__name__/values"))

    def rules(self) -> dict[str, dict]:
        """Returns what Prometheus says of each alert, by its name."""
        groups = self._get("rules")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def firing(self, alert: str) -> set[str]:
        """Returns the instances for which an alert fires."""
        found = self.rules()[alert]["alerts"]
        return {each["labels"]["instance"] for each in found if each["state"] == "firing"}

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        wait_until(self._prometheus, what, holds, SECONDS_MAX)

    def _answers(self) -> bool:
        return answers_200(f"http://127.0.0.1:{self._port}/-/ready")

    def _get(self, path: str) -> Any:
        answer = wire.get(f"http://127.0.0.1:{self._port}/api/v1/{path}", seconds=30)
        assert answer.status == 200, f"{path}: {answer}"
        return answer.json()["data"]

    def _start_worker(self, name: str) -> int:
        """Starts an engine with its agent. Returns the agent's control port."""
        engine, events, replay, data, control, admin = free_ports(6)
        folder = self._folder / name
        kv_events = {
            "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{events}", "bind": True,
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        }
        process = self._run(
            f"engine-{name}", "engine-sim", f"--port={engine}",
            f"--shim-socket={folder}/engine-{engine}.sock", "--enable-streaming-session",
            "--enable-session-radix-cache", "--enable-cache-report",
            f"--kv-events-config={json.dumps(kv_events)}",
        )
        gpu = ""
        if not self._engines:
            self._machine.start_engine(process)
            library = self._machine.library
            gpu = f'gpu = {{ nvml_library = "{library}", devices = ["0"], gpm = true }}'
        self._engines.append(process)
        self._run(f"agent-{name}", "berth-agent", "--config", self._write(f"{name}.toml", f"""
            worker_id = "{name}"
            engine.url = "http://127.0.0.1:{engine}"
            # Prompts of more than 256 tokens are computed in stages.
            engine.prefill_stage_ms = 1
            listen.data_addr = "127.0.0.1:{data}"
            listen.control_addr = "127.0.0.1:{control}"
            listen.admin_addr = "127.0.0.1:{admin}"
            files.state_dir = "{folder}"
            auth.token_file = "{self._folder}/token"
            announce.routers = ["http://127.0.0.1:{self._data}"]
            announce.key_file = "{self._folder}/key"
            {gpu}
        """))
        self.agents[name] = f"127.0.0.1:{admin}"
        return control

    def _start_prometheus(self) -> Process:
        for path in RULES:
            text = path.read_text()
            self._write(path.name, re.sub(r"^ +for: .*\n", "", text, flags=re.MULTILINE))
        jobs = {
            "berth-router": [f"127.0.0.1:{self._admin}"],
            "berth-agent": list(self.agents.values()),
        }
        config = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
            "rule_files": [path.name for path in RULES],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": targets}]}
                for job, targets in jobs.items()
            ],
        }
        return self._run(
            "prometheus", self._programs / "prometheus",
            f"--config.file={self._write('prometheus.yml', yaml.safe_dump(config))}",
            f"--storage.tsdb.path={self._folder}/data",
            f"--web.listen-address=127.0.0.1:{self._port}",
        )

    def _run(self, name: str, program: str | Path, *words: str) -> Process:
        process = Process.start(name, [str(self._bin_dir / program), *words], self._folder)
        self._started.append(process)
        return process

    def _write(self, name: str, text: str) -> str:
        (self._folder / name).write_text(text)
        return str(self._folder / name)
