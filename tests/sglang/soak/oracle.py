"""Judges whether an answer is the one to its context, by the engine's answer to a plain request.

The engine gets the same context as a plain request, alone. Each token must be the same and, if the
engine gives log probabilities, as likely: a context that is wrong far back may leave the tokens as
they are, but hardly their probabilities. Where a token differs, the answer is still right if the
two ids are closer than the engine's own noise. The rest is then judged with the answer's id in
place.
"""

from dataclasses import dataclass

from soak.engine import Engine


@dataclass(frozen=True)
class Turn:
    """A finished turn as its client saw it."""

    what: str
    session: str
    # The ids of all prompts and answers before this answer, in order.
    context: list[int]
    output: list[int]
    # The log probabilities of the output's ids as the client got them; empty if the engine gives
    # none.
    logprobs: list[float]
    # The positions in the context where the session's turns began.
    starts: list[int]


@dataclass(frozen=True)
class Verdict:
    right: bool
    # The number of differences within the noise.
    ties: int
    why: str = ""


class Oracle:
    def __init__(self, engine: Engine, noise: float):
        self._engine = engine
        self._noise = noise

    def judge(self, context: list[int], output: list[int], logprobs: list[float]) -> Verdict:
        at = ties = 0
        while at < len(output):
            own = self._engine.greedy(context + output[:at], len(output) - at)
            rest, said = output[at:], logprobs[at:]
            pairs = enumerate(zip(own.output, rest))
            differs = next((i for i, (a, b) in pairs if a != b), len(rest))
            if len(own.logprobs) != len(said):
                why = f"{len(said)} log probabilities where there are {len(own.logprobs)}"
                return Verdict(False, ties, why)
            for place, (mine, theirs) in enumerate(zip(own.logprobs[:differs], said)):
                if abs(mine - theirs) > self._noise:
                    why = f"token {at + place} of {len(output)} has log probability {theirs:.5f}"
                    return Verdict(False, ties, f"{why}, not {mine:.5f}")
            at += differs
            if at < len(output):
                gap = _gap(own.top[differs], output[at]) if own.top else float("inf")
                if gap > self._noise:
                    why = f"token {at} of {len(output)} is {output[at]}, not {own.output[differs]}"
                    return Verdict(False, ties, why)
                at, ties = at + 1, ties + 1
        return Verdict(True, ties)


def _gap(top: dict[int, float], id: int) -> float:
    """Returns how much less likely this id is than the likeliest one, as a log probability."""
    return max(top.values()) - top[id] if id in top else float("inf")
