"""Message threads of the `anthropic` library, on which its tool runner relies by itself.

The library asks the server to keep the conversation and then sends only each new message. SGLang
ignores that, and would answer to the new message alone. At Berth the library has to learn that
there are no threads; it then sends whole histories by itself.
"""

from clients.places import Cluster
from clients.plugin import Case, Runs, Suite
from clients.programs import Script, python

# A thread of several turns, and the tool runner, streamed or not.
CASES = ("thread", "runner", "runner-streamed")
THREADS = Script("threads", CASES, python("sdks", "message_threads.py"), ("sdks",))
SUITES = (Suite("anthropic-threads", THREADS, "messages", quick=("simulator",)),)


def test_threads(cluster: Cluster, case: Case, runs: Runs) -> None:
    runs.outcome(cluster, case).check()
