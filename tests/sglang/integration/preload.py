"""Starts engines from processes that have imported what every engine imports.

An engine is three processes, each of which spends five seconds of a core on imports. This program
imports once. Then it forks at each command on its standard input, and the child runs an engine
whose two other processes are forks of the same state, not new interpreters. Nothing of SGLang's
own runs before the fork: plugins are loaded in each process, as without this program.
"""

import ctypes
import gc
import json
import multiprocessing.spawn
import multiprocessing.util
import os
import random
import runpy
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

# All that an engine imports.
MODULES = (
    "sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager", "sglang.srt.models.llama",
)
# A plugin knows the scheduler's process by this module.
SCHEDULER = "sglang.srt.managers.scheduler"
# The scheduler and the detokenizer.
MORE_PROCESSES = 2
# Of what a new interpreter is told: its environment, and a pipe or two.
MESSAGE_BYTES_MAX, DESCRIPTORS_MAX = 1 << 20, 16
# Above all descriptors that such a process is told of.
DESCRIPTOR_FREE = 500
PR_SET_PDEATHSIG = 1


def import_all() -> None:
    _hide_scheduler_from_plugins()
    for name in MODULES:
        with suppress(ImportError):
            import_module(name)


def _hide_scheduler_from_plugins() -> None:
    """Lets plugins see the scheduler's module in the scheduler's process alone, as without this
    program. Called before another module has the function."""
    plugins = import_module("sglang.srt.plugins")
    original = plugins.load_plugins

    def load_plugins() -> None:
        target = getattr(multiprocessing.current_process(), "_target", None)
        if getattr(target, "__module__", "") == SCHEDULER:
            return original()
        scheduler = sys.modules.pop(SCHEDULER)
        try:
            original()
        finally:
            sys.modules[SCHEDULER] = scheduler

    plugins.load_plugins = load_plugins


class Nursery:
    """Forks of this process that wait for what a new interpreter would be told."""

    def __init__(self, count: int):
        self._spawn = multiprocessing.util.spawnv_passfds
        self._waiting: list[tuple[int, socket.socket]] = []
        for _ in range(count):
            self._waiting.append(self._fork())

    def _fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        if pid := os.fork():
            theirs.close()
            return pid, ours
        for connection in (ours, *(connection for _, connection in self._waiting)):
            connection.close()
        message, descriptors, _, _ = socket.recv_fds(theirs, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
        if not message:
            # The engine ended without a use for this fork.
            os._exit(0)
        theirs.close()
        _become(json.loads(message), descriptors)
        raise AssertionError("a process of multiprocessing ends by itself")

    def spawn(self, path: bytes, arguments: list[Any], descriptors: list[int]) -> int:
        """Starts a process of `multiprocessing` in one of the forks, else in a new interpreter."""
        words = [os.fsdecode(word) for word in arguments]
        if not self._waiting or "spawn_main" not in " ".join(words):
            return self._spawn(path, arguments, descriptors)
        pid, connection = self._waiting.pop(0)
        message = {"words": words, "numbers": descriptors, "env": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(message).encode()], descriptors)
        connection.close()
        return pid


def _become(message: dict[str, Any], descriptors: list[int]) -> None:
    """Goes on as the interpreter that `multiprocessing` starts with these words, to its exit."""
    held = [os.dup2(each, DESCRIPTOR_FREE + index) for index, each in enumerate(descriptors)]
    for each in descriptors:
        os.close(each)
    for source, number in zip(held, message["numbers"], strict=True):
        os.dup2(source, number)
        os.close(source)
    _set_environment(message["env"])
    words = message["words"]
    code, *sys.argv[1:] = words[words.index("-c") + 1:]
    exec(code, {"__name__": "__main__"})


def _set_environment(env: dict[str, str]) -> None:
    random.seed()
    os.environ.clear()
    os.environ.update(env)
    # What an interpreter does with its environment when it starts, before a module by name.
    sys.path[:1] = [os.getcwd()]
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(":") if path]


def _run_engine(command: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(command["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, number)
    os.chdir(command["folder"])
    # Before this process loads a plugin.
    nursery = Nursery(MORE_PROCESSES)
    multiprocessing.util.spawnv_passfds = nursery.spawn
    _set_environment(command["env"])
    sys.argv = ["sglang.launch_server", *command["arguments"]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def main() -> None:
    """Carries out the commands on the standard input, each a line of JSON, and answers in lines."""
    import_all()
    # Nobody has its own copy of what is never collected.
    gc.freeze()
    commands, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := commands.readline():
        command = json.loads(line)
        if pid := command.get("poll"):
            ended, status = os.waitpid(pid, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            sys.stdout.flush()
            if not (answer := os.fork()):
                answers.close()
                _run_engine(command)
                return
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
