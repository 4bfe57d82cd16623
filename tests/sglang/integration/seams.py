"""Which functions of the shim are off on the installed SGLang, as the shim's own check says.

On the version that Berth is developed with, none may be off, so no test is left out.
"""

import json
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
