"""Prints which functions of the shim work with an SGLang, and which seams it has.

    python -m berth_shim [--json] [--source FOLDER]

Reads the source files of the SGLang that is installed where this Python finds it, or of the one
whose package is `FOLDER/sglang`. Imports nothing of it and needs no GPU. Exits with 0 if all
functions work, 1 if some are off, and 3 if there is no SGLang.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from . import __version__
from .probe import EngineSources, find_missing, find_problem
from .seams import FUNCTIONS, SEAMS

ALL_WORK, SOME_OFF, NO_ENGINE = 0, 1, 3


def find_package(source: Path | None) -> Path | None:
    """Returns the folder of the package `sglang`; None if there is none."""
    if source is not None:
        package = source / "sglang"
        return package if package.is_dir() else None
    spec = importlib.util.find_spec("sglang")
    # A folder of this name without an `__init__.py` is no SGLang; it has no origin.
    return Path(spec.origin).parent if spec and spec.origin else None


def examine(package: Path | None) -> dict[str, Any]:
    """Returns the state of all functions and seams. Without an SGLang, each state is None."""
    engine = EngineSources(package) if package else None
    missing = find_missing(engine) if engine else {}
    functions = {
        name: {"on": name not in missing if engine else None, "missing": missing.get(name, [])}
        for name in FUNCTIONS
    }
    seams = [
        {
            "kind": seam.kind.value,
            "path": seam.path,
            "needs": list(seam.needs),
            "functions": list(seam.functions),
            "found": not find_problem(engine, seam) if engine else None,
        }
        for seam in SEAMS
    ]
    return {
        "shim": __version__,
        "sglang": _version(package) if package else None,
        "functions": functions,
        "seams": seams,
    }


def _version(package: Path) -> str | None:
    """Returns the version of the SGLang in this folder; None if its metadata isn't beside it."""
    found = importlib.metadata.distributions(name="sglang", path=[str(package.parent)])
    return next((each.version for each in found), None)


def _table(report: dict[str, Any]) -> str:
    states = {True: "on", False: "off", None: "?"}
    sglang = report["sglang"] or "of unknown version"
    has_engine = report["functions"]["reports"]["on"] is not None
    lines = [f"shim {report['shim']}, " + (f"SGLang {sglang}" if has_engine else "no SGLang here")]
    for name, function in report["functions"].items():
        why = "; ".join(function["missing"])
        lines.append(f"  {name:<13} {states[function['on']]}" + (f": {why}" if why else ""))
    lines.append("seams:")
    for seam in report["seams"]:
        state = {True: "found", False: "MISSING", None: "?"}[seam["found"]]
        needs = ", ".join(seam["needs"])
        lines.append(f"  {state:<8}{seam['kind']:<7}{seam['path']} ({needs})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m berth_shim", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="the folder of `sglang`")
    arguments = parser.parse_args()
    package = find_package(arguments.source)
    report = examine(package)
    print(json.dumps(report, indent=2) if arguments.json else _table(report))
    if package is None:
        return NO_ENGINE
    return ALL_WORK if all(each["on"] for each in report["functions"].values()) else SOME_OFF


if __name__ == "__main__":
    sys.exit(main())
