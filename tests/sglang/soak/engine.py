"""Asks the engine directly, for the oracle and the measurements: without Berth or sessions."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from integration import wire

# The engine is asked only while nothing else runs, so even a second is long.
ANSWER_SECONDS_MAX = 60


class EngineDead(Exception):
    """The engine gives no answer, or an answer that isn't one to the request."""


@dataclass(frozen=True)
class GreedyAnswer:
    """A greedy answer, with log probabilities if the engine gives them."""

    output: list[int]
    # The log probabilities of the chosen ids.
    logprobs: list[float]
    # For each position, the log probabilities of the two most likely ids, the best first.
    top: list[dict[int, float]]


class Engine:
    def __init__(self, url: str):
        self.url = url

    def greedy(self, prompt: list[int], tokens: int) -> GreedyAnswer:
        return self._request(prompt, tokens)[0]

    def batch(self, prompts: list[list[int]], tokens: int) -> list[GreedyAnswer]:
        """Sends all prompts in one request, so that they run together."""
        return self._request(prompts, tokens)

    def flush(self) -> None:
        """Empties the prefix cache."""
        answer = wire.post(f"{self.url}/flush_cache?timeout=10", seconds=ANSWER_SECONDS_MAX)
        if answer.status != 200:
            raise EngineDead(f"/flush_cache: {answer}")

    def slow_down(self, seconds: float) -> None:
        answer = wire.post(f"{self.url}/slow_down", {"forward_sleep_time": seconds}, seconds=10)
        if answer.status != 200:
            raise EngineDead(f"/slow_down: {answer}")

    def _request(self, prompts: Any, tokens: int) -> list[GreedyAnswer]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        logprobs = {"return_logprob": True, "top_logprobs_num": 2}
        body = {"input_ids": prompts, "sampling_params": sampling, **logprobs}
        answer = wire.post(f"{self.url}/generate", body, seconds=ANSWER_SECONDS_MAX)
        if answer.status != 200:
            raise EngineDead(f"a plain request: {answer}")
        said = answer.json()
        return [_greedy(one) for one in (said if isinstance(said, list) else [said])]


def _greedy(answer: dict[str, Any]) -> GreedyAnswer:
    meta = answer["meta_info"]
    if meta["finish_reason"]["type"] != "length":
        raise EngineDead(f"a plain request ended with {meta['finish_reason']}")
    top = meta.get("output_top_logprobs") or []
    return GreedyAnswer(
        list(answer["output_ids"]),
        chosen_logprobs(meta),
        [{id: logprob for logprob, id, *_ in place} for place in top],
    )


def chosen_logprobs(meta: dict[str, Any]) -> list[float]:
    return [logprob for logprob, *_ in meta.get("output_token_logprobs") or []]


def side_by_side(call: Any, items: list[Any], width: int = 8) -> list[Any]:
    """Calls the function for all items in parallel. Returns the results in order, or raises an
    error of a call."""
    with ThreadPoolExecutor(width) as pool:
        return list(pool.map(call, items))
