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
NAMESPACE = (None, None, None)


def wrap(hook: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


def measure(run_once: Callable[[], Any]) -> list[float]:
    spent = []
    for _ in range(TIMES):
        begin = time.thread_time_ns()
        run_once()
        spent.append((time.thread_time_ns() - begin) / 1000)
    return spent


def print_figures(label: str, spent: list[float]) -> None:
    median, worst = statistics.median(spent), sorted(spent)[int(0.99 * len(spent))]
    print(f"{label:44} {median:9.1f} us, p99 {worst:9.1f} us")


def measure_untrimmed(trimmer: Trimmer) -> None:
    def original(*_: Any) -> None:
        return None

    hooks = (trimmer._hook_generate, trimmer._hook_tokenize, trimmer._hook_wait)
    wrapped = [wrap(hook, original) for hook in hooks]
    request = Request("a")
    request.http.scope["headers"] = HEADERS

    def run_with_hooks() -> None:
        wrapped[0](None, request, request.http)
        wrapped[1](None, request)
        wrapped[2](None, request, request.http)

    def run_without() -> None:
        original(None, request, request.http)
        original(None, request)
        original(None, request, request.http)

    baseline = statistics.median(measure(run_without))
    spent = [figure - baseline for figure in measure(run_with_hooks)]
    print_figures("a turn that isn't trimmed", spent)


def measure_long(trimmer: Trimmer, differs_at: int | None) -> list[float]:
    """Plans, begins and commits a turn of a session with a long history. Returns microseconds, one
    figure for each repetition."""
    context = array("q", [5, 6, 7, 8, 9] * (PROMPT // 5))
    context[-ANSWER - 1] = 1
    prompt = context + array("q", [1]) + array("q", [5, 6] * (NEW // 2))
    if differs_at is not None:
        prompt[differs_at] = 12
    manager, request = Manager(), Request("a")
    answer = [4] * ANSWER

    def run_once() -> float:
        trimmer._transcripts.open("s")
        begin = context[:]
        turn = trimmer._transcripts.change("s", lambda it: it.begin(begin, begin, NAMESPACE))
        trimmer._transcripts.change("s", lambda it: it.commit(turn, Finished([])))
        manager.arrive(request)
        fields = dict(
            input_ids=prompt[:], mm_inputs=None, session_params=None, session_id=None,
            return_logprob=False, sampling_params=None, lora_id=None, extra_key=None,
            cache_salt=None,
        )
        tokenized = SimpleNamespace(**fields)
        start = time.thread_time_ns()
        plan = trimmer._make_plan(manager, tokenized, Mark(2 * PROMPT, "s"))
        if differs_at is None:
            trimmer._begin_turn(manager, request, tokenized, "s", plan)
            trimmer._commit(trimmer._running_turns["s"], Finished(answer))
        return (time.thread_time_ns() - start) / 1000

    return [run_once() for _ in range(TIMES)]


def main() -> None:
    trimmer = Trimmer(bytes(16), "0")
    trimmer.enable(Tokenizer(), SimpleNamespace)
    measure_untrimmed(trimmer)
    print_figures("100,000 tokens, trimmed and committed", measure_long(trimmer, None))
    print_figures("100,000 tokens, diverged at 50,000", measure_long(trimmer, 50_000))


if __name__ == "__main__":
    main()
