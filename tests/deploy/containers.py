"""Do the images run: as their user, without a shell, with a root that can't be written to?"""

import json
import os
import stat
import subprocess
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.processes import Process, answers_200, free_ports, wait_until

from deploy import charts
from deploy.images import TARGETS, Images
from deploy.programs import ROOT, Missing

pytestmark = pytest.mark.slow

USER = 65532
PROGRAMS = {
    "router": {"berth-router"}, "agent": {"berth-agent", "berth", "cp"}, "engine-sim": {"engine-sim"},
}
START_SECONDS_MAX = 30


@pytest.fixture(scope="module")
def images(folder: Path, bin_dir: Path) -> Iterator[Images]:
    place = folder / "images"
    place.mkdir()
    try:
        images = Images(place)
        images.build(bin_dir)
    except (Missing, subprocess.SubprocessError) as why:
        pytest.skip(str(why))
    yield images
    images.remove()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder /run/berth of a container, of its user."""
    made = tmp_path / "state"
    made.mkdir()
    os.chown(made, USER, USER)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    tmp_path.chmod(0o755)
    return made


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_its_program_and_no_shell(images: Images, target: str, state: Path) -> None:
    found = set()
    for folder, _, files in os.walk(images.root(target)):
        for name in files:
            mode = (Path(folder) / name).lstat().st_mode
            assert not mode & (stat.S_ISUID | stat.S_ISGID), f"{folder}/{name} changes the user"
            if stat.S_ISREG(mode) and mode & 0o111 and ".so" not in name:
                found.add(name)
    assert found == PROGRAMS[target]
    assert images.run(target, state, "sh", "-c", "true").returncode != 0


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_special(images: Images, target: str, state: Path) -> None:
    assert images.config(target)["User"] == f"{USER}:{USER}"
    made = images.run(target, state, "--version")
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    [program] = PROGRAMS[target] - {"berth", "cp"}
    assert made.stdout.strip() == f"{program} {version}", made.stderr


def test_the_driver_finds_the_libraries_that_it_needs(images: Images) -> None:
    folder = images.root("agent") / "usr/lib/x86_64-linux-gnu"
    if not folder.exists():
        pytest.skip("the names are those of amd64")
    for name in ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"):
        assert (folder / name).exists(), f"{name} is missing: NVML can't be loaded"


def test_the_charts_container_installs_the_shim(images: Images, helm: str, state: Path) -> None:
    rendered = charts.render(helm, charts.example("daemonset"))
    [(_, pod)] = [each for each in rendered.workloads() if each[0].endswith("-agent")]
    command = charts.container(pod["spec"], "install-shim")["command"]
    # A second start of a pod finds the files of the first.
    for _ in range(2):
        made = images.run("agent", state, *command)
        assert made.returncode == 0, made.stderr
    shim = state / "shim"
    theirs = {each.name for each in (ROOT / "worker-agent/shim/berth_shim").glob("*.py")}
    assert {each.name for each in (shim / "berth_shim").glob("*.py")} == theirs
    assert (shim / "berth_shim/libberth_kv.so").exists()
    assert list(shim.glob("*.dist-info/entry_points.txt")), "SGLang would not find the plugin"


def test_a_turn_runs_through_the_images(images: Images, state: Path) -> None:
    engine, data, control, admin, front, metrics = free_ports(6)
    (state / "agent.toml").write_text(f"""
worker_id = "image"
engine.url = "http://127.0.0.1:{engine}"
files.state_dir = "/run/berth/agent"
[listen]
data_addr = "127.0.0.1:{data}"
control_addr = "127.0.0.1:{control}"
admin_addr = "127.0.0.1:{admin}"
""")
    socket = f"/run/berth/agent/engine-{engine}.sock"
    flags = {
        "engine-sim": [f"--port={engine}", f"--shim-socket={socket}", "--enable-streaming-session"],
        "agent": ["--config", "/run/berth/agent.toml"],
        "router": [f"--worker=http://127.0.0.1:{control}", f"--data-addr=127.0.0.1:{front}",
                   f"--admin-addr=127.0.0.1:{metrics}"],
    }
    started: list[Process] = []
    try:
        for target, words in flags.items():
            started.append(images.start(target, state, *words))
        url = f"http://127.0.0.1:{metrics}/readyz"
        wait_until(started[-1], "ready", lambda: answers_200(url), START_SECONDS_MAX)
        for process in started:
            assert user_of(process.pid) == USER, process.name
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{front}/v1/chat/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.headers["x-berth-worker"].startswith("image"), answer.headers
            assert json.load(answer)["usage"]["completion_tokens"] == 4
    finally:
        for process in reversed(started):
            process.stop(START_SECONDS_MAX)


def user_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[2]) for line in lines if line.startswith("Uid:"))
