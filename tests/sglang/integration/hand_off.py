"""How a real engine hands its KV over on a CPU: by Mooncake, over TCP, on loopback.

The engine runs Mooncake's own transfer unmodified. These are what a machine without GPU needs:

- A plugin (`pairs_on_cpu/`) keeps the sender from copying page numbers with a CUDA event.
- Without overlap between its steps, a prefill engine sends a prefix that it has without one too.
- A decode engine keeps the KV of retracted requests as plain tensors. By default it reserves a pool
  that it registers with the CUDA driver.
"""

import os
from pathlib import Path

TRANSFER = ("--disaggregation-transfer-backend", "mooncake_tcp")
PREFILL_FLAGS = (*TRANSFER, "--disable-overlap-schedule")
DECODE_FLAGS = (*TRANSFER, "--disaggregation-decode-retraction-backup", "cpu_tensor")


def pair_env(wait_seconds: float) -> dict[str, str]:
    """Returns the environment of an engine of a pair, which waits so long for the other one."""
    home = os.environ.get("BERTH_SGLANG_HOME", "")
    plugin = Path(__file__).resolve().parents[1] / "pairs_on_cpu"
    packages = [f"{home}/transfer/packages", str(plugin), os.environ.get("PYTHONPATH", "")]
    libraries = [f"{home}/stub", f"{home}/transfer/stub", os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "PYTHONPATH": ":".join(filter(None, packages)),
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        # The engine would register the machine's own address with its bootstrap server.
        "SGLANG_HOST_IP": "127.0.0.1",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(wait_seconds),
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(wait_seconds),
    }
