"""Measures how far this engine's greedy answers depend on batches, chunks and cached prefixes.

The same prompt is answered alone from an empty cache, then again with its prefix cached at several
lengths, and in batches of two to eight, which also moves the borders of its prefill chunks. Some
prompts get an answer as long as the workload's longest. Its end is answered again, with what comes
before it as the prompt: then that part's KV comes from a prefill, not from decoding. On a CPU,
float32 sums run in another order for another shape, so log probabilities differ a little. Where
the two best ids are closer than that, the answer may differ too.
"""

import random
from dataclasses import dataclass, field

from soak import operations, tokens
from soak.engine import Engine, GreedyAnswer

PROMPT_TOKENS = (20, 33, 64, 100, 127, 200, 260, 333, 400, 480, 520, 600, 700, 777, 850, 900)
ANSWER_TOKENS = 24
# The longest answer of the workload, and how many of its tokens are decoded before the part that is
# answered again.
LONG_ANSWER_TOKENS = operations.LONG_ANSWER[1]
DECODED_TOKENS = (8, 32, 64, 96)
# Only every third prompt gets the long answer: all of them would take a minute.
LONG_ANSWER_STRIDE = 3
BATCHES = range(2, 9)
# How many times the largest measured difference still counts as noise.
MARGIN = 10.0


@dataclass
class Noise:
    """The measured differences."""

    comparisons: int = 0
    # The answers whose tokens differed: what was compared, where it differed, and how close the two
    # best ids were there.
    differences: list[tuple[str, int, float]] = field(default_factory=list)
    # The largest difference of a log probability while the tokens were the same.
    spread: float = 0.0
    # The smallest distance between the two best ids, over all positions.
    closest: float = float("inf")

    @property
    def bound(self) -> float:
        """Two ids whose log probabilities are closer than this may change places without a
        fault."""
        return self.spread * MARGIN

    def compare(self, what: str, alone: GreedyAnswer, other: GreedyAnswer) -> None:
        self.comparisons += 1
        pairs = list(zip(alone.output, other.output))
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        apart = [abs(a - b) for a, b in zip(alone.logprobs[:same], other.logprobs[:same])]
        self.spread = max([self.spread, *apart])
        if same < len(pairs):
            best, second = list(alone.top[same].values())[:2] if alone.top else (0.0, 0.0)
            self.differences.append((what, same, best - second))

    def __str__(self) -> str:
        places = [f"{what} at token {at}, gap {gap:.1e}" for what, at, gap in self.differences[:5]]
        return (
            f"{len(self.differences)} of {self.comparisons} answers differ"
            + (f" ({'; '.join(places)})" if places else "")
            + f"; log probabilities within {self.spread:.1e}, closest choice {self.closest:.1e}"
        )


def measure(engine: Engine, seed: int) -> Noise:
    chance = random.Random(f"{seed} noise")
    prompts = [tokens.ids(chance, count) for count in PROMPT_TOKENS]
    noise = Noise()
    alone = []
    for prompt in prompts:
        engine.flush()
        alone.append(engine.greedy(prompt, ANSWER_TOKENS))
    for one in alone:
        gaps = [a - b for a, b, *_ in (list(place.values()) for place in one.top)]
        noise.closest = min([noise.closest, *gaps])
    for prompt, own in zip(prompts, alone):
        for share in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
            engine.flush()
            engine.greedy(prompt[: max(1, int(len(prompt) * share))], 1)
            again = engine.greedy(prompt, ANSWER_TOKENS)
            noise.compare(f"{share:.0%} cached", own, again)
    for size in BATCHES:
        for first in range(0, len(prompts) - size + 1, max(1, size // 2)):
            engine.flush()
            some = slice(first, first + size)
            together = engine.batch(prompts[some], ANSWER_TOKENS)
            for own, other in zip(alone[some], together):
                noise.compare(f"batch of {size}", own, other)
    for prompt in prompts[::LONG_ANSWER_STRIDE]:
        _compare_decoded(engine, noise, prompt)
    return noise


def _compare_decoded(engine: Engine, noise: Noise, prompt: list[int]) -> None:
    """Compares the end of a long answer with the answer to all that comes before that end."""
    engine.flush()
    whole = engine.greedy(prompt, LONG_ANSWER_TOKENS)
    for decoded in DECODED_TOKENS:
        end = GreedyAnswer(whole.output[decoded:], whole.logprobs[decoded:], whole.top[decoded:])
        engine.flush()
        again = engine.greedy(prompt + whole.output[:decoded], LONG_ANSWER_TOKENS - decoded)
        noise.compare(f"{decoded} tokens decoded before", end, again)
