"""The HTTP clients and stream decoders of Python, Node and Go, at answers that some can't read.

A refusal that arrives while a large body is still sent, and a stream that gets comments before its
first event. Each client must see the refusal, and the stream's events alone.
"""

import os
import shutil
from pathlib import Path

from clients.places import Cluster
from clients.plugin import Case, Runs, Suite
from clients.programs import HERE, Missing, Script, environment, python, run

PYTHON = (
    "http.client-refused", "http.client-comments", "curl-refused", "curl-chat", "openai-chat",
    "openai-responses", "openai-async-chat", "anthropic-messages", "langchain-openai-chat",
    "langchain-anthropic-messages", "httpx-sse-chat",
)
NODE = (
    "fetch-refused", "openai-chat", "openai-responses", "anthropic-messages", "ai-sdk-chat",
    "eventsource-parser-chat", "langchain-chat",
)
GO = (
    "net-http-refused", "openai-v1-chat", "openai-v3-chat", "openai-v3-responses",
    "anthropic-messages",
)
GO_FOLDER = HERE / "inner/go"


def node(folder: Path) -> list[str]:
    """Returns the command. A script finds its packages beside itself."""
    shutil.copy(HERE / "inner/decoders.mjs", folder)
    packages = folder / "node_modules"
    packages.unlink(missing_ok=True)
    packages.symlink_to(environment("decoders-node") / "node_modules")
    return ["node", str(folder / "decoders.mjs")]


def go(folder: Path) -> list[str]:
    """Builds the program, whose modules Go keeps in its own cache."""
    program = folder / "decoders"
    build = ["go", "build", "-C", str(GO_FOLDER), "-o", str(program), "."]
    home = {"HOME": os.environ["HOME"]}
    status, printed = run("go", build, folder / "build", home)
    if status != 0:
        raise Missing(f"the Go program can't be built: {printed[-300:]}")
    return [str(program)]


def suite(name: str, script: Script, quick: tuple[str, ...] = ("simulator",)) -> Suite:
    return Suite(name, script, "comments", kinds=("simulator",), quick=quick)


SUITES = (
    suite("python", Script("python", PYTHON, python("decoders", "decoders.py"), ("decoders",))),
    suite("node", Script("node", NODE, node, ("decoders-node",))),
    # To build the libraries of Go takes minutes.
    suite("go", Script("go", GO, go), quick=()),
)


def test_decoder(cluster: Cluster, case: Case, runs: Runs) -> None:
    runs.outcome(cluster, case).check()
