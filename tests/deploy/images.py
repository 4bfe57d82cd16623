"""Builds Berth's images with buildah, on a Debian that debootstrap made, and runs them.

No registry of images is needed. The Debian stays in the user's cache folder; what is built on it
is removed at the end. An image runs by chroot, as the image's user and with a root that nothing can
write to, in the network of this host.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from integration.processes import Process

from deploy.programs import ROOT, Missing

CONTAINERFILE = ROOT / "deploy/containers/Containerfile"
TARGETS = ("router", "agent", "engine-sim")
BASE, BINARIES = "localhost/debian-bookworm", "localhost/berth-binaries"
# Where the binaries lie in the image that the file's argument BINARIES names.
BINARIES_FOLDER = "/src/target/release/"
BASE_SECONDS_MAX, STEP_SECONDS_MAX = 900, 300


class Images:
    """The built images, in a storage of their own."""

    def __init__(self, folder: Path):
        if os.geteuid() != 0:
            raise Missing("images are built and run by root only")
        for program in ("buildah", "debootstrap", "unshare"):
            if not shutil.which(program):
                raise Missing(f"{program} isn't installed (packages buildah, debootstrap)")
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        self._storage = cache / "berth/containers"
        self._folder = folder
        self._mounted: dict[str, str] = {}

    def buildah(self, *args: str | Path, seconds: float = STEP_SECONDS_MAX) -> str:
        """Runs buildah. Returns what it printed."""
        made = subprocess.run(
            ["buildah", "--root", self._storage, "--runroot", self._folder / "run",
             "--storage-driver", "overlay", *args],
            capture_output=True, text=True, timeout=seconds,
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
        )
        if made.returncode:
            raise subprocess.SubprocessError(f"buildah {args[0]}: {made.stderr}")
        return made.stdout.strip()

    def build(self, bin_dir: Path) -> None:
        """Builds all targets of the Containerfile from this checkout's binaries."""
        if BASE not in self._names():
            self._make_base()
        names = ("berth-router", "berth-agent", "berth", "engine-sim", "libberth_kv.so")
        self._commit([bin_dir / name for name in names], BINARIES_FOLDER, BINARIES)
        for target in TARGETS:
            # Layers that targets share are built once.
            self.buildah(
                "build", "--layers", "--pull-never", "--build-arg", f"DEBIAN={BASE}",
                "--build-arg", f"BINARIES={BINARIES}", "--target", target,
                "--tag", tag(target), "--file", CONTAINERFILE, ROOT,
            )

    def debian(self) -> Path:
        """Returns the folder of a Debian without anything else, which a test may change."""
        if BASE not in self._names():
            self._make_base()
        if BASE not in self._mounted:
            self._mounted[BASE] = self.buildah("from", "--pull-never", BASE)
        return Path(self.buildah("mount", self._mounted[BASE]))

    def _make_base(self) -> None:
        print("deploy: making a Debian for images", flush=True)
        with tempfile.TemporaryDirectory(prefix="berth-debian-") as folder:
            flags = ["--variant=minbase", "--include=ca-certificates"]
            made = subprocess.run(
                ["debootstrap", *flags, "bookworm", folder],
                capture_output=True, text=True, timeout=BASE_SECONDS_MAX,
            )
            if made.returncode:
                last = made.stdout.strip().splitlines()[-1]
                raise Missing(f"debootstrap made no Debian: {last}")
            self._commit([Path(folder)], "/", BASE)

    def _commit(self, sources: list[Path], place: str, name: str) -> None:
        container = self.buildah("from", "scratch")
        self.buildah("copy", "--quiet", container, *sources, place)
        self.buildah("commit", "--quiet", "--rm", container, name, seconds=BASE_SECONDS_MAX)

    def config(self, target: str) -> dict:
        inspected = json.loads(self.buildah("inspect", "--type", "image", tag(target)))
        return inspected["OCIv1"]["config"]

    def root(self, target: str) -> Path:
        """Returns the folder of the image's files."""
        if target not in self._mounted:
            self._mounted[target] = self.buildah("from", "--pull-never", tag(target))
        return Path(self.buildah("mount", self._mounted[target]))

    def command(self, target: str, state: Path, *words: str) -> list[str]:
        """Returns a command that runs `words` in the image, or its entry point with them, if they
        begin with a flag. Only /run/berth, which is `state`, can be written to."""
        root, config = self.root(target), self.config(target)
        if words[0].startswith("-"):
            words = (*config["Entrypoint"], *words)
        script = (
            'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && '
            'mount --bind "$2" "$1/run/berth" && root=$1 user=$3 && shift 3 && '
            'exec chroot --userspec="$user" "$root" "$@"'
        )
        fixed = ["unshare", "--mount", "sh", "-c", script, "sh"]
        return [*fixed, str(root), str(state), config["User"], *words]

    def run(self, target: str, state: Path, *words: str) -> subprocess.CompletedProcess:
        command = self.command(target, state, *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def start(self, target: str, state: Path, *words: str) -> Process:
        return Process.start(target, self.command(target, state, *words), self._folder)

    def remove(self) -> None:
        """Removes all but the Debian."""
        for container in self._mounted.values():
            self.buildah("umount", container)
        self.buildah("rm", "--all")
        names = [each for each in (*map(tag, TARGETS), BINARIES) if each in self._names()]
        if names:
            self.buildah("rmi", "--force", *names)
        self.buildah("rmi", "--prune", "--force")

    def _names(self) -> list[str]:
        return self.buildah("images", "--format", "{{.Name}}").splitlines()


def tag(target: str) -> str:
    return f"localhost/berth-{target}"
