"""Do the units hold for systemd, and do the binaries tell it when they serve, live and stop?

systemd itself doesn't run here: the units are checked by systemd-analyze, and the system calls of
the binaries against the units' filter.
"""

import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration import wire
from integration.processes import Process, answers_200, free_ports, wait_until

from deploy.programs import DEPLOY, run

UNITS = {name: DEPLOY / f"systemd/berth-{name}.service" for name in ("agent", "router")}
SECONDS_MAX = 30
TRIES_MAX = 10
WATCHDOG_SECONDS = 2
# What systemd-analyze calls "OK". A service without any limits has 9.6.
EXPOSURE_MAX = {"agent": 2.0, "router": 1.5}


def settings(unit: str) -> dict[str, list[str]]:
    """Returns the settings of a unit, each with its values in their order."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", UNITS[unit].read_text(), re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


@pytest.fixture(scope="module")
def analyze() -> str:
    """The path of systemd-analyze."""
    if not (path := shutil.which("systemd-analyze")):
        pytest.skip("systemd-analyze isn't installed (package systemd)")
    return path


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_nothing_wrong_in_the_unit(
    analyze: str, unit: str, bin_dir: Path, tmp_path: Path
) -> None:
    # The program lies where this build has it, not where a package puts it.
    copy = tmp_path / UNITS[unit].name
    text = UNITS[unit].read_text()
    assert f"ExecStart=/usr/bin/berth-{unit} " in text
    copy.write_text(text.replace("ExecStart=/usr/bin", f"ExecStart={bin_dir}"))
    made = run(analyze, "verify", "--man=no", copy)
    assert made.returncode == 0 and not made.stderr, made.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_the_service_can_do_little(analyze: str, unit: str) -> None:
    flags = ["--offline=true", "--no-pager", f"--threshold={EXPOSURE_MAX[unit] * 10:.0f}"]
    made = run(analyze, "security", *flags, UNITS[unit])
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_the_settings_of_the_unit_are_in_force_and_readable(unit: str) -> None:
    found = settings(unit)
    assert found["Type"] == ["notify"]
    assert int(found["WatchdogSec"][0]) >= 10, "a busy machine would kill its services"
    assert int(found["LimitNOFILE"][0]) >= 65536
    example = (DEPLOY / f"config/{unit}.toml").read_text()
    folders = {"/etc/berth", *(f"/var/lib/{each}" for each in found.get("StateDirectory", [])),
               *(f"/run/{each}" for each in found.get("RuntimeDirectory", [])),
               *(f"/var/log/{each}" for each in found.get("LogsDirectory", []))}
    # The unit's comments name a file too: that of the router's access log.
    named = re.findall(r'"(/[a-z][^"]*)"', example + UNITS[unit].read_text())
    assert unit == "agent" or "/var/log/berth/access.log" in named
    for path in named:
        assert any(path == each or path.startswith(f"{each}/") for each in folders), path


def test_users_and_folders_of_the_units_are_made(tmp_path: Path) -> None:
    for program in ("systemd-sysusers", "systemd-tmpfiles"):
        if not shutil.which(program):
            pytest.skip(f"{program} isn't installed (package systemd)")
    # Both work on a root of their own.
    for folder, file in (("sysusers.d", "sysusers.conf"), ("tmpfiles.d", "tmpfiles.conf")):
        place = tmp_path / "usr/lib" / folder
        place.mkdir(parents=True)
        shutil.copy(DEPLOY / "systemd" / file, place / "berth.conf")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tmp_path / "etc/group").write_text("root:x:0:\n")
    made = run("systemd-sysusers", f"--root={tmp_path}", "berth.conf")
    assert made.returncode == 0, made.stderr
    users = {line.split(":")[0] for line in (tmp_path / "etc/passwd").read_text().splitlines()}
    groups = dict(re.findall(r"^(\w+):.*:(.*)$", (tmp_path / "etc/group").read_text(), re.M))
    for unit in UNITS:
        found = settings(unit)
        assert set(found["User"]) <= users
        assert set(found.get("SupplementaryGroups", [])) <= set(groups)
    assert groups["berth"] == "sglang", "the agent's user reads /etc/berth"
    made = run("systemd-tmpfiles", f"--root={tmp_path}", "--create", "berth.conf")
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "etc/berth").stat().st_mode & 0o777 == 0o750


class Told:
    """A socket as systemd gives it to a service, and what came in."""

    def __init__(self, folder: Path):
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(SECONDS_MAX)

    def env(self) -> dict[str, str]:
        usec = WATCHDOG_SECONDS * 1_000_000
        return {"NOTIFY_SOCKET": str(self.path), "WATCHDOG_USEC": str(usec), "RUST_LOG": "info"}

    def next(self) -> str:
        return self._socket.recv(4096).decode().strip()

    def skip_to(self, wanted: str) -> list[str]:
        """Returns what comes before `wanted`."""
        before = []
        while (told := self.next()) != wanted:
            before.append(told)
        return before


def command(unit: str, bin_dir: Path, folder: Path, ports: list[int]) -> list[str]:
    data, control, admin, engine = ports
    addresses = ["--data-addr", f"127.0.0.1:{data}", "--admin-addr", f"127.0.0.1:{admin}"]
    file = folder / f"{unit}.toml"
    program = [str(bin_dir / f"berth-{unit}"), "--config", str(file), *addresses]
    if unit == "router":
        settings = f'workers = ["http://127.0.0.1:{control}"]\ntimeouts.lame_duck_ms = 1\n'
        file.write_text(f'{settings}log.access = "{folder}/access.log"\n')
        return program
    file.write_text(f'files.state_dir = "{folder}"\n')
    own = ["--control-addr", f"127.0.0.1:{control}", "--engine", f"http://127.0.0.1:{engine}"]
    return [*program, *own, "--worker-id=w", "--handover"]


@pytest.fixture(params=UNITS)
def service(
    request: pytest.FixtureRequest, bin_dir: Path, tmp_path: Path
) -> Iterator[tuple[Process, Told, str]]:
    """A binary as its unit starts it, what it tells, and its admin port. No engine answers."""
    told, ports = Told(tmp_path), free_ports(4)
    words = command(request.param, bin_dir, tmp_path, ports)
    process = Process.start(f"berth-{request.param}", words, tmp_path, told.env())
    yield process, told, f"http://127.0.0.1:{ports[2]}"
    process.stop(SECONDS_MAX)


def test_systemd_learns_that_the_service_serves_lives_and_stops(
    service: tuple[Process, Told, str]
) -> None:
    process, told, admin = service
    told.skip_to("READY=1")
    healthz = wire.get(f"{admin}/healthz", seconds=SECONDS_MAX)
    assert healthz.status == 200, "the ports weren't open when it said that it serves"
    told.skip_to("WATCHDOG=1")
    # systemd waits for twice as long as the signs are apart. A machine that stops for a moment
    # disturbs some of them.
    for _ in range(TRIES_MAX):
        begin = time.monotonic()
        for _ in range(3):
            assert told.skip_to("WATCHDOG=1") == []
        if is_apart := 2 * WATCHDOG_SECONDS > time.monotonic() - begin > WATCHDOG_SECONDS:
            break
    assert is_apart, "the signs aren't apart by half of the limit"
    process.send(signal.SIGTERM)
    assert set(told.skip_to("STOPPING=1")) <= {"WATCHDOG=1"}
    assert process.wait(SECONDS_MAX) == 0, process.log_tail()


def allowed_calls(analyze: str, unit: str) -> set[str]:
    """Returns the system calls that the unit's filter lets pass."""
    sets: dict[str, list[str]] = {}
    for line in run(analyze, "syscall-filter", "--no-pager").stdout.splitlines():
        if re.match(r"@[\w-]+$", line):
            sets[line] = members = []
        elif (word := line.strip()) and not word.startswith("#"):
            members.append(word)

    def members_of(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        return set().union(*map(members_of, sets[name]))

    # systemd always lets its set @default pass.
    allowed = members_of("@default")
    for value in settings(unit)["SystemCallFilter"]:
        named = set().union(*map(members_of, value.lstrip("~").split()))
        allowed = allowed - named if value.startswith("~") else allowed | named
    return allowed | members_of("@default")


@pytest.mark.parametrize("unit", UNITS)
def test_the_filter_lets_all_system_calls_of_the_service_pass(
    analyze: str, unit: str, bin_dir: Path, tmp_path: Path
) -> None:
    if not shutil.which("strace"):
        pytest.skip("strace isn't installed")
    told, ports = Told(tmp_path), free_ports(4)
    engine = Process.start(
        "engine-sim", [str(bin_dir / "engine-sim"), f"--port={ports[3]}"], tmp_path)
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-qq", "-e", "signal=none", "-o", str(trace)]
    words = [*strace, *command(unit, bin_dir, tmp_path, ports)]
    process = Process.start(f"strace-{unit}", words, tmp_path, told.env())
    try:
        told.skip_to("WATCHDOG=1")
        if unit == "agent":
            admin = f"http://127.0.0.1:{ports[2]}/readyz"
            wait_until(process, "ready", lambda: answers_200(admin), SECONDS_MAX)
    finally:
        # strace passes a signal on to what it runs only if that has its process group.
        process.send_group(signal.SIGTERM)
        process.stop(SECONDS_MAX)
        engine.stop(SECONDS_MAX)
    calls = set(re.findall(r"^\d+ +(?:<\.\.\. )?(\w+)(?:\(| resumed)", trace.read_text(), re.M))
    assert {"execve", "epoll_wait", "sendto"} <= calls, calls
    assert not calls - allowed_calls(analyze, unit)
