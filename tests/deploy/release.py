"""Do the archive, the Debian package, the manual pages and completions hold what people install?"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from deploy.images import Images
from deploy.programs import DEPLOY, ROOT, UNAVAILABLE, Missing, run

# Of each program, the folder of its package.
FOLDERS = dict(line.split() for line in (DEPLOY / "release/programs").read_text().splitlines())
PROGRAMS = tuple(FOLDERS)
BUILD_SECONDS_MAX = 900
WHEEL_BYTES_MAX = 40 << 20
SHIM = ROOT / "worker-agent/shim"
VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]

WHEEL = re.compile(rf"berth_sglang-{re.escape(VERSION)}-py3-none-(manylinux_2_(\d+)_\w+)\.whl")


@pytest.fixture(scope="module")
def manuals(bin_dir: Path, folder: Path) -> Path:
    """A folder with all manual pages and completions."""
    made = run(bin_dir / "berth-manuals", folder / "manuals")
    assert made.returncode == 0, made.stderr
    return folder / "manuals"


def help_pages(bin_dir: Path, *words: str) -> Iterator[tuple[list[str], str]]:
    """Yields a program's and its commands' words, with what each says to --help."""
    program, *commands = words
    text = run(bin_dir / program, *commands, "--help").stdout
    yield list(words), text
    listed = re.search(r"^Commands:\n((?:  .*\n)+)", text, re.MULTILINE)
    for name in re.findall(r"^  (\w+) ", listed[1], re.MULTILINE) if listed else []:
        # `berth serve` is berth-serve, whose page has the same name.
        if name not in ("help", "serve"):
            yield from help_pages(bin_dir, *words, name)


def test_every_command_and_flag_has_its_manual(bin_dir: Path, manuals: Path) -> None:
    pages = {page.stem: page.read_text() for page in (manuals / "man").iterdir()}
    commands = 0
    for program in PROGRAMS:
        for words, text in help_pages(bin_dir, program):
            page = pages.pop("-".join(words)).replace("\\", "")
            flags = set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", text, re.MULTILINE))
            assert flags and all(flag in page for flag in flags), (words, flags)
            commands += 1
    assert commands > 10 and not pages, f"pages of no command: {sorted(pages)}"


def test_manual_pages_are_well_formed(manuals: Path) -> None:
    if not shutil.which("groff"):
        pytest.skip("groff isn't installed")
    for page in sorted((manuals / "man").iterdir()):
        made = run("groff", "-man", "-Tutf8", "-ww", "-z", page)
        assert made.returncode == 0 and not made.stderr, made.stderr
    # What --help can't say.
    for program in ("berth-agent", "berth-router"):
        text = (manuals / f"man/{program}.1").read_text()
        assert all(f".SH {each}" in text for each in ("SIGNALS", "EXIT STATUS", "FILES"))


# Asks bash for what follows the words $2…, with the completions in the file $1.
COMPLETE = r"""
source "$1" && shift && COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
[[ $(complete -p "$1") =~ -F\ ([^ ]+) ]] && "${BASH_REMATCH[1]}" "$1" "${!#}" "${*: -2:1}" &&
  printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("words, wanted", [
    (("berth", "wor"), "workers"),
    (("berth", "session", "cl"), "close"),
    (("berth", "sessions", "--js"), "--json"),
    (("berth-agent", "--hand"), "--handover"),
    (("berth-router", "--check"), "--check-config"),
], ids=str)
def test_bash_completes(manuals: Path, words: tuple[str, ...], wanted: str) -> None:
    file = manuals / f"completions/{words[0]}.bash"
    made = run("bash", "-c", COMPLETE, "bash", file, *words)
    assert made.stdout.split() == [wanted], made.stderr


def metadata_of(folder: Path) -> dict[str, object]:
    """Returns what the metadata of an installed shim says."""
    found = Distribution.at(folder)
    points = {(each.group, each.name, each.value) for each in found.entry_points}
    names = ("Name", "Version", "Summary", "Requires-Python")
    return {name: found.metadata[name] for name in names} | {
        "requires": found.requires, "points": points
    }


def test_the_shim_on_the_path_has_the_metadata_of_its_project() -> None:
    """The folder on `PYTHONPATH` has metadata that no tool writes."""
    project = tomllib.loads((SHIM / "pyproject.toml").read_text())["project"]
    [version] = re.findall(r'^__version__ = "(.+)"$', (SHIM / "berth_shim/__init__.py").read_text(),
                           re.MULTILINE)
    [folder] = SHIM.glob("*.dist-info")
    assert folder.name == f"berth_sglang-{version}.dist-info" and version == VERSION
    assert metadata_of(folder) == {
        "Name": project["name"], "Version": version, "Summary": project["description"],
        "Requires-Python": project["requires-python"], "requires": project["dependencies"],
        "points": {(group, *point) for group, points in project["entry-points"].items()
                   for point in points.items()},
    }


@pytest.fixture(scope="module")
def wheel(bin_dir: Path, folder: Path) -> Path:
    """The wheel of this checkout's binaries."""
    made = run(DEPLOY / "release/wheel", "--bin-dir", bin_dir, folder / "wheel")
    if made.returncode == UNAVAILABLE:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    [wheel] = (folder / "wheel").iterdir()
    return wheel


def pip(environment: Path, command: str, *words: str | Path) -> None:
    made = run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python",
               environment / "bin/python", command, "--quiet", *words)
    assert made.returncode == 0, made.stderr


def new_environment(folder: Path, wheel: Path) -> Path:
    """Returns the folder of an environment in which only the wheel is installed."""
    made = run(sys.executable, "-m", "venv", "--without-pip", folder)
    assert made.returncode == 0, made.stderr
    pip(folder, "install", "--constraint", ROOT / "tests/sglang/requirements-tests.txt", wheel)
    return folder


@pytest.fixture(scope="module")
def environment(wheel: Path, folder: Path) -> Path:
    return new_environment(folder / "environment", wheel)


def site_of(environment: Path) -> Path:
    [site] = environment.glob("lib/python*/site-packages")
    return site


def test_the_wheel_is_small_and_promises_no_older_glibc_than_it_needs(wheel: Path) -> None:
    assert wheel.stat().st_size <= WHEEL_BYTES_MAX
    name = WHEEL.fullmatch(wheel.name)
    assert name, wheel.name
    python = run(DEPLOY / "release/python", "wheel.txt").stdout.strip()
    text = run(python, "-m", "auditwheel", "show", wheel).stdout
    needed = re.search(r'tag:\s+"manylinux_2_(\d+)_\w+"', text)
    assert needed and int(name[2]) == max(28, int(needed[1])), text


def test_the_wheel_puts_programs_beside_the_python(environment: Path) -> None:
    for program in PROGRAMS:
        made = run(environment / "bin" / program, "--version")
        assert made.stdout.strip() == f"{program} {VERSION}", made.stderr
        made = run(environment / "bin" / program, "--help")
        assert made.returncode == 0 and "Usage: " in made.stdout, made.stderr


def test_the_wheel_has_the_files_and_the_metadata_of_the_shim(environment: Path) -> None:
    site = site_of(environment)
    files = {each.name for each in (site / "berth_shim").glob("*.py")}
    assert files == {each.name for each in (SHIM / "berth_shim").glob("*.py")}
    [folder], [on_path] = site.glob("berth_sglang-*.dist-info"), SHIM.glob("*.dist-info")
    assert metadata_of(folder) == metadata_of(on_path)
    assert metadata_of(folder)["requires"] == ["msgspec"], "SGLang needs no more than that"
    assert list(folder.glob("**/LICENSE"))
    code = ("from importlib.metadata import entry_points; "
            "print(*(each.load().__name__ for each in entry_points(group='sglang.srt.plugins')))")
    assert run(environment / "bin/python", "-c", code).stdout.split() == ["register"]


def test_the_installed_shim_finds_its_library(environment: Path) -> None:
    code = "from berth_shim.library import Library; print(Library()._functions._name)"
    library = site_of(environment) / "berth_shim/libberth_kv.so"
    env = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_KV_")}
    made = run(environment / "bin/python", "-B", "-c", code, env=env)
    assert made.stdout.strip() == str(library), made.stderr


def test_an_uninstalled_wheel_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    environment = new_environment(tmp_path / "environment", wheel)
    assert list(environment.rglob("*berth*"))
    pip(environment, "uninstall", "--yes", "berth-sglang")
    assert not list(environment.rglob("*berth*"))


def test_the_installed_shim_checks_itself(environment: Path) -> None:
    python, site = environment / "bin/python", site_of(environment)

    def check(*flags: str) -> tuple[int, str]:
        made = run(python, "-B", "-m", "berth_shim", *flags)
        assert not made.stderr, made.stderr
        return made.returncode, made.stdout

    status, text = check()
    assert status == 3 and "no SGLang here" in text and "TokenizerManager" in text
    # An SGLang with all that the shim needs, and nothing else.
    code = ("import sys; from pathlib import Path; from trimming.seamed import Tree; "
            "Tree(Path(sys.argv[1])).write()")
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests/sglang")}
    made = run(python, "-B", "-c", code, site, env=env)
    assert made.returncode == 0, made.stderr
    status, text = check("--json")
    report = json.loads(text)
    assert status == 0 and {each["on"] for each in report["functions"].values()} == {True}
    (site / "sglang/srt/mem_cache/common.py").unlink()
    status, text = check()
    assert status == 1 and "demotion      off: release_kv_cache is missing" in text


class Released:
    """What deploy/release/build made."""

    def __init__(self, folder: Path):
        self.folder = folder
        [self.archive], [self.deb] = folder.glob("*.tar.gz"), folder.glob("*.deb")
        [self.wheel] = folder.glob("*.whl")


@pytest.fixture(scope="module")
def released(bin_dir: Path, folder: Path) -> Released:
    """The archive and the package of this checkout's binaries."""
    out = folder / "release"
    made = subprocess.run(
        [DEPLOY / "release/build", "--bin-dir", bin_dir, out],
        capture_output=True, text=True, timeout=BUILD_SECONDS_MAX,
    )
    if made.returncode == UNAVAILABLE:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    return Released(out)


@pytest.mark.slow
def test_the_archive_has_all_that_a_host_needs(released: Released, tmp_path: Path) -> None:
    made = run("sh", "-c", 'cd "$1" && sha256sum --check --strict SHA256SUMS', "sh",
               released.folder)
    assert made.returncode == 0 and made.stdout.count(": OK") == 3, made.stdout + made.stderr
    assert WHEEL.fullmatch(released.wheel.name), released.wheel.name
    with zipfile.ZipFile(released.wheel) as wheel:
        assert "berth_shim/kv_account.fatbin" in wheel.namelist(), "audits on a GPU need it"
    with tarfile.open(released.archive) as archive:
        archive.extractall(tmp_path, filter="data")
        assert {(each.uid, each.gid) for each in archive.getmembers()} == {(0, 0)}
    [root] = tmp_path.iterdir()
    assert root.name.startswith(f"berth-{VERSION}-")
    for program in PROGRAMS:
        made = run(root / "bin" / program, "--version")
        assert made.stdout.strip() == f"{program} {VERSION}", made.stderr
    for path in (*(f"man/{program}.1" for program in PROGRAMS), "lib/libberth_kv.so",
                 "lib/kv_account.fatbin", "LICENSE", "completions/_berth", "deploy/systemd/berth-agent.service",
                 "deploy/config/router.toml", "deploy/docs/systemd.md", "deploy/helm/berth",
                 "deploy/docs/runbook.md", "deploy/prometheus/fleet.yaml",
                 "deploy/grafana/fleet.json"):
        assert (root / path).exists(), path
    # What the README and the guide of systemd name is there, as in a checkout.
    for page in ("README.md", "deploy/README.md", "deploy/docs/systemd.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", (root / page).read_text()):
            assert (root / page).parent.joinpath(target).exists(), f"{page}: {target}"


@pytest.mark.slow
def test_the_list_of_parts_is_that_of_the_lock_file(released: Released) -> None:
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    known = {(each["name"], each["version"]) for each in locked}
    with tarfile.open(released.archive) as archive:
        for program, part in (("berth", "ratatui"), ("berth-agent", "nvml-wrapper"),
                              ("berth-router", "tokenizers")):
            [member] = (each for each in archive.getnames() if each.endswith(f"/{program}.cdx.json"))
            document = json.load(archive.extractfile(member))
            assert document["bomFormat"] == "CycloneDX"
            parts = {(each["name"], each["version"]) for each in document["components"]}
            assert part in {name for name, _ in parts} and len(parts) > 50
            assert parts <= known, parts - known
            nameless = [each["name"] for each in document["components"] if "licenses" not in each]
            assert not nameless, nameless


@pytest.mark.slow
def test_the_package_puts_files_where_debian_wants_them(released: Released) -> None:
    listed = run("dpkg-deb", "--contents", released.deb).stdout
    files = {path: mode for mode, path in
             re.findall(r"^-(\S+) +(?:root/root|0/0) .* \./(\S+)$", listed, re.MULTILINE)}
    for program in PROGRAMS:
        assert files[f"usr/bin/{program}"] == "rwxr-xr-x"
        assert f"usr/share/man/man1/{program}.1.gz" in files
        assert f"usr/share/bash-completion/completions/{program}.bash" in files
    for path in ("lib/systemd/system/berth-agent.service", "lib/systemd/system/berth-router.service",
                 "lib/sysusers.d/berth.conf", "lib/tmpfiles.d/berth.conf", "lib/berth/libberth_kv.so",
                 "lib/berth/kv_account.fatbin", "share/berth/prometheus/fleet.yaml", "share/berth/grafana/fleet.json",
                 "share/doc/berth/copyright", "share/doc/berth/changelog.Debian.gz"):
        assert files.get(f"usr/{path}") == "rw-r--r--", path
    depends = run("dpkg-deb", "--field", released.deb, "Depends").stdout
    [glibc] = re.findall(r"libc6 \(>= 2\.(\d+)\)", depends)
    assert int(glibc) <= int(WHEEL.fullmatch(released.wheel.name)[2]), "runs where the wheel does"
    # Settings and secrets are an operator's: an upgrade never asks about them.
    assert not [path for path in files if path.startswith(("etc/", "var/"))]


@pytest.mark.slow
def test_the_package_installs_runs_and_goes(released: Released, folder: Path) -> None:
    place = folder / "package-images"
    place.mkdir()
    try:
        images = Images(place)
        debian = images.debian()
    except (Missing, subprocess.SubprocessError) as why:
        pytest.skip(str(why))
    try:
        shutil.copy(released.deb, debian / "berth.deb")
        made = run("chroot", debian, "dpkg", "--install", "/berth.deb")
        assert made.returncode == 0, made.stdout + made.stderr
        for program in PROGRAMS:
            made = run("chroot", debian, program, "--version")
            assert made.stdout.strip() == f"{program} {VERSION}", made.stderr
        made = run("chroot", debian, "dpkg", "--purge", "berth")
        assert made.returncode == 0, made.stderr
        assert not [path for path in debian.glob("usr/**/*berth*")]
    finally:
        images.remove()


@pytest.mark.slow
@pytest.mark.parametrize("package", FOLDERS.values())
def test_cargo_installs_from_a_checkout(package: str, tmp_path: Path) -> None:
    # Builds in the checkout's target folder: only what the package's own features ask for is new.
    target = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target"))
    made = subprocess.run(
        ["cargo", "install", "--quiet", "--locked", "--debug", "--path", ROOT / package,
         "--root", tmp_path, "--target-dir", target],
        capture_output=True, text=True, timeout=BUILD_SECONDS_MAX,
    )
    assert made.returncode == 0, made.stderr
    [program] = (tmp_path / "bin").iterdir()
    assert run(program, "--version").stdout.strip() == f"{program.name} {VERSION}"
