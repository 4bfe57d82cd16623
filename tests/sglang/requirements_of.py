"""Writes what an older version of SGLang needs on a CPU, from what the newest one needs.

    python requirements_of.py WHEEL FOLDER

Writes requirements.txt, requirements-engine.txt and constraints.txt to FOLDER. They are those of
this folder, except that a package that the wheel pins has the wheel's version. What torch brings along
belongs to torch's version, so it isn't pinned.
"""

import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

HERE = Path(__file__).resolve().parent
OF_TORCH = ("torch", "torchvision", "triton", "nvidia-", "cuda-")


def canonical(requirement: str) -> str:
    """Returns the name of the package, in the one way of many to write it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def lines(name: str) -> list[str]:
    """Returns the requirements in a file of this folder."""
    bare = (re.sub(r"\s*#.*", "", line).strip() for line in (HERE / name).read_text().splitlines())
    return [line for line in bare if line]


def pins(wheel: Path) -> dict[str, str]:
    """Returns the wheel's requirements with one exact version, by name."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        wanted = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    exact = [each.partition(";") for each in wanted if "==" in each.partition(";")[0]]
    # An extra's requirements are not the package's.
    return {canonical(each): re.sub(r"\[.*?\]|\s", "", each)
            for each, _, condition in exact if "extra" not in condition}


def write(wheel: Path, folder: Path) -> None:
    version, pinned = wheel.name.split("-")[1], pins(wheel)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [pinned.get(canonical(line), line) for line in lines("requirements.txt")]
    # The same packages, in whichever version fits the pins.
    wanted = [line if canonical(line) in pinned else re.split(r"[=<>]", line)[0] for line in wanted]
    engine = [f"sglang=={version}", pinned["sglang-kernel"]]
    kept = [line for line in lines("constraints.txt")
            if canonical(line) not in pinned and not canonical(line).startswith(OF_TORCH)]
    for name, content in (
        ("requirements.txt", wanted), ("requirements-engine.txt", engine), ("constraints.txt", kept)
    ):
        (folder / name).write_text("\n".join(content) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
