"""Measures what the hooks cost for a turn that isn't trimmed and for a prompt of 100,000 tokens.

    python -m trimming.cost      from tests/sglang

The figures are medians and 99th percentiles of the thread's own time. They include the wrapper
that SGLang's hook registry puts around each hook.
"""

import functools
import statistics
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from berth_shim.trim import Finished
from berth_shim.trimmer import Mark, Trimmer

from .engine import Manager, Request, Tokenizer

HEADERS = [(b"header-%d" % n, b"value") for n in range(15)]
PROMPT, ANSWER, NEW = 100_000, 300, 500
TIMES = 300
TIE = (None, None, None)


def around(hook: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


def microseconds(once: Callable[[], Any]) -> list[float]:
    spent = []
    for _ in range(TIMES):
        begin = time.thread_time_ns()
        once()
        spent.append((time.thread_time_ns() - begin) / 1000)
    return spent


def say(what: str, spent: list[float]) -> None:
    median, worst = statistics.median(spent), sorted(spent)[int(0.99 * len(spent))]
    print(f"{what:44} {median:9.1f} us, p99 {worst:9.1f} us")


def untrimmed(trimmer: Trimmer) -> None:
    def original(*_: Any) -> None:
        return None

    hooks = (trimmer._enter, trimmer._tokenize, trimmer._wait)
    wrapped = [around(hook, original) for hook in hooks]
    asked = Request("a")
    asked.http.scope["headers"] = HEADERS

    def with_hooks() -> None:
        wrapped[0](None, asked, asked.http)
        wrapped[1](None, asked)
        wrapped[2](None, asked, asked.http)

    def without() -> None:
        original(None, asked, asked.http)
        original(None, asked)
        original(None, asked, asked.http)

    bare = statistics.median(microseconds(without))
    say("a turn that isn't trimmed", [spent - bare for spent in microseconds(with_hooks)])


def long(trimmer: Trimmer, differs_at: int | None) -> list[float]:
    """Plans, begins and commits a turn of a session with a long history. Returns microseconds, one
    figure for each repetition."""
    said = array("q", [5, 6, 7, 8, 9] * (PROMPT // 5))
    said[-ANSWER - 1] = 1
    prompt = said + array("q", [1]) + array("q", [5, 6] * (NEW // 2))
    if differs_at is not None:
        prompt[differs_at] = 12
    manager, asked = Manager(), Request("a")
    answer = [4] * ANSWER

    def once() -> float:
        trimmer._transcripts.open("s")
        begin = said[:]
        turn = trimmer._transcripts.change("s", lambda it: it.begin(begin, begin, TIE))
        trimmer._transcripts.change("s", lambda it: it.commit(turn, Finished([])))
        manager.arrive(asked)
        fields = dict(
            input_ids=prompt[:], mm_inputs=None, session_params=None, session_id=None,
            return_logprob=False, sampling_params=None, lora_id=None, extra_key=None,
            cache_salt=None,
        )
        tokenized = SimpleNamespace(**fields)
        start = time.thread_time_ns()
        plan = trimmer._plan(manager, tokenized, Mark(2 * PROMPT, "s"))
        if differs_at is None:
            trimmer._begin(manager, asked, tokenized, "s", plan)
            trimmer._commit(trimmer._running["s"], Finished(answer))
        return (time.thread_time_ns() - start) / 1000

    return [once() for _ in range(TIMES)]


def main() -> None:
    trimmer = Trimmer(bytes(16), "0")
    trimmer.ready(Tokenizer(), SimpleNamespace)
    untrimmed(trimmer)
    say("100,000 tokens, trimmed and committed", long(trimmer, None))
    say("100,000 tokens, diverged at 50,000", long(trimmer, 50_000))


if __name__ == "__main__":
    main()
