"""Shows that the oracle detects a wrong context.

The oracle is given answers to contexts that were tampered with, as if they were answers to the true
contexts.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from soak.engine import Engine, side_by_side
from soak.oracle import Oracle, Turn
from soak import tokens

CASES = 200
CONTEXT_TOKENS_MIN = 48
# One changed token among 450 shows within about ten tokens of the answer.
OUTPUT_TOKENS = 32


@dataclass
class Detection:
    """The number of wrong contexts of each kind, and how many of them the oracle caught."""

    tampered: Counter[str] = field(default_factory=Counter)
    caught: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> tuple[int, int]:
        return self.caught.total(), self.tampered.total()

    def __str__(self) -> str:
        kinds = [f"{kind} {self.caught[kind]}/{self.tampered[kind]}" for kind in self.tampered]
        return f"{self.caught.total()} of {self.tampered.total()} caught ({', '.join(kinds)})"


def tamper_and_judge(engine: Engine, oracle: Oracle, turns: list[Turn], seed: int) -> Detection:
    chance = random.Random(f"{seed} planted")
    usable = [t for t in turns if len(t.context) >= CONTEXT_TOKENS_MIN and len(t.starts) >= 2]
    cases = [_tamper(chance, usable, number) for number in range(CASES)] if usable else []

    def caught(case: tuple[str, list[int], list[int]]) -> bool:
        _, context, wrong = case
        said = engine.greedy(wrong, OUTPUT_TOKENS)
        return not oracle.judge(context, said.output, said.logprobs).right

    result = Detection()
    for (kind, *_), seen in zip(cases, side_by_side(caught, cases)):
        result.tampered[kind] += 1
        result.caught[kind] += seen
    return result


def _tamper(
    chance: random.Random, turns: list[Turn], number: int
) -> tuple[str, list[int], list[int]]:
    """Returns the kind of change, a true context and a wrong one."""
    turn = chance.choice(turns)
    context = turn.context
    if number % 3 == 0:
        at = chance.randrange(len(context))
        others = [id for id in range(tokens.VOCABULARY) if id != context[at]]
        changed = [*context[:at], chance.choice(others), *context[at + 1 :]]
        return "one token changed", context, changed
    last = turn.starts[-1]
    if number % 3 == 1:
        # This turn's prompt after the history of another session.
        others = [other for other in turns if other.session != turn.session]
        if others:
            other = chance.choice(others)
            swapped = other.context[: other.starts[-1]] + context[last:]
            return "another's history", context, swapped
    place = chance.randrange(len(turn.starts) - 1)
    gone = context[: turn.starts[place]] + context[turn.starts[place + 1] :]
    return "one turn missing", context, gone
