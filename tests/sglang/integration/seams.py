"""What the installed SGLang lacks: functions of the shim that are off, as the shim's own check says,
and what a later version has mended.

On the version that Berth is developed with, no test is left out.
"""

import json
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SHIM = TESTS.parents[1] / "worker-agent/shim"


@cache
def functions_off() -> dict[str, str]:
    """Returns why functions of the shim are off, by their names."""
    if f"sglang=={version('sglang')}" in (TESTS / "requirements-engine.txt").read_text().split():
        return {}
    command = [sys.executable, "-B", "-m", "berth_shim", "--json"]
    made = subprocess.run(command, cwd=SHIM, stdout=subprocess.PIPE, timeout=60)
    report = json.loads(made.stdout)
    return {
        name: f"{name} is off on SGLang {report['sglang']}: {function['missing'][0]}"
        for name, function in report["functions"].items() if not function["on"]
    }


def is_before(release: str) -> bool:
    """Whether the installed SGLang is older than this version."""
    # Also the soak at the simulator reads this file, where no package is installed.
    installed, wanted = (re.findall(r"\d+", each)[:3] for each in (version("sglang"), release))
    return [*map(int, installed)] < [*map(int, wanted)]


def written(tokens: int) -> int:
    """Returns how many tokens of a finished turn's history have KV. Since SGLang 0.5.22, the last token
    of an answer doesn't go through the model."""
    return tokens if is_before("0.5.22") else tokens - 1
