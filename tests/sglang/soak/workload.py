"""The workload: clients side by side, in rounds of operations drawn by a seed.

The draw depends on the seed alone, never on how a turn ended. Which operations overlap depends on
the machine. After a round nothing runs; `quiet` has what must hold then.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from soak import operations
from soak.targets import Target
from soak.engine import Engine
from soak.oracle import Turn
from soak.report import Report
from soak.user import User

# Ten users want ten pinned sessions, of which seven fit beside one free row, and ten tagged ones.
USERS = 10
# Seconds added to each forward pass while clients are at work, so that turns overlap.
SLOW_SECONDS = 0.008


class Workload:
    def __init__(self, target: Target, engine: Engine, seed: int, count: int, report: Report):
        self.target = target
        self.report = report
        self.done = 0
        self._engine = engine
        self._users = [User(number, seed, target, engine, report) for number in range(USERS)]
        mix = operations.mix(target)
        drawn = random.Random(f"{seed} mix").choices(list(mix), list(mix.values()), k=count)
        self._drawn: list[Callable[[User], None]] = drawn

    def remaining(self) -> int:
        return len(self._drawn) - self.done

    def round(self, count: int) -> None:
        """Deals the next operations to the users in turn, and returns when all have ended."""
        dealt = self._drawn[self.done : self.done + count]
        begin = time.monotonic()
        self._engine.slow_down(SLOW_SECONDS)
        with ThreadPoolExecutor(USERS) as pool:
            work = [(user, dealt[place::USERS]) for place, user in enumerate(self._users)]
            for future in [pool.submit(_perform, user, mine) for user, mine in work]:
                future.result()
        self.done += len(dealt)
        turns = sum(len(user.turns) for user in self._users)
        print(
            f"  {self.target.name}: {self.done} operations, {turns} turns to judge, "
            f"{time.monotonic() - begin:.1f} s",
            flush=True,
        )

    def close_all(self) -> None:
        for user in self._users:
            user.close_all()

    def take_turns(self) -> list[Turn]:
        """Returns the finished turns since the last call."""
        turns = [turn for user in self._users for turn in user.turns]
        for user in self._users:
            user.turns.clear()
        return turns


def _perform(user: User, mine: list[Callable[[User], None]]) -> None:
    for operation in mine:
        operations.perform(user, operation)
