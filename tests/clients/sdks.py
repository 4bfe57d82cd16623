"""The tests of the `openai` and `anthropic` libraries themselves, at the router's URL.

They are in the source distributions, and call each method of the libraries with and without all
its parameters. Those of the APIs that SGLang serves need no mock.
"""

from clients.places import Cluster
from clients.plugin import Case, Runs, Suite
from clients.programs import PytestProgram

OPENAI, ANTHROPIC = "openai-3.54.0", "anthropic-2.12.0"


def openai(file: str, *only: str) -> PytestProgram:
    path = f"tests/api_resources/{file}"
    return PytestProgram(
        "sdks", OPENAI, (path,), only or ("",), url_variable="TEST_API_BASE_URL", url_path="/v1"
    )


def anthropic(file: str, *only: str) -> PytestProgram:
    # The plugin is in the library's own flags for pytest, which also ask for many processes.
    path, plugin = f"tests/api_resources/{file}", ("-p", "tests._alias_httpx")
    return PytestProgram(
        "sdks", ANTHROPIC, (path,), only or ("",), plugin, url_variable="TEST_API_BASE_URL"
    )


# Tests of what SGLang has no route for (stored chats, compaction) are left out.
SUITES = (
    Suite("openai-chat", openai("chat/test_completions.py", "create"), "chats", quick=("simulator",)),
    Suite(
        "openai-completions", openai("test_completions.py"), "completions",
        quick=("simulator",),
    ),
    Suite(
        "openai-responses",
        openai("test_responses.py", "create", "retrieve", "cancel"),
        "chats",
        quick=("simulator",),
    ),
    Suite("openai-models", openai("test_models.py", "list", "retrieve"), "chats", quick=("simulator",)),
    Suite("anthropic-messages", anthropic("test_messages.py"), "messages",
          quick=("simulator",)),
    Suite("anthropic-models", anthropic("test_models.py", "list", "retrieve"), "messages"),
)


def test_library(cluster: Cluster, case: Case, runs: Runs) -> None:
    runs.outcome(cluster, case).check()
