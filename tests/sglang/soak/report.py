"""Counts the outcomes of operations, and collects what must not have happened."""

import threading
from collections import Counter

PROBLEMS_SHOWN = 10


class Report:
    """The outcomes of one phase. Its clients write to it at the same time."""

    def __init__(self, phase: str):
        self.phase = phase
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._problems: list[str] = []

    def count(self, operation: str, outcome: str) -> None:
        with self._lock:
            self._counts[operation, outcome] += 1

    def problem(self, text: str) -> None:
        with self._lock:
            self._problems.append(text)

    @property
    def problems(self) -> list[str]:
        with self._lock:
            return list(self._problems)

    def count_of(self, operation: str, outcome: str) -> int:
        with self._lock:
            return self._counts[operation, outcome]

    def count_with_status(self, status: int) -> int:
        """The number of answers with this status, over all operations."""
        with self._lock:
            counts = self._counts.items()
            return sum(n for (_, outcome), n in counts if outcome.startswith(f"{status} "))

    def table(self) -> str:
        """Returns a line for each operation, with its outcomes by number."""
        with self._lock:
            counts = dict(self._counts)
        operations: dict[str, list[tuple[int, str]]] = {}
        for (operation, outcome), number in counts.items():
            operations.setdefault(operation, []).append((number, outcome))
        width = max(map(len, operations), default=0)
        lines = []
        for operation, outcomes in sorted(operations.items()):
            told = ", ".join(f"{n} {outcome}" for n, outcome in sorted(outcomes, reverse=True))
            lines.append(f"  {operation:{width}}  {told}")
        return "\n".join(lines)


class Verdicts:
    """The soak's own checks: each has a name, and passes or fails."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    def add(self, name: str, problems: list[str], detail: str = "") -> None:
        self.passed += not problems
        self.failed += bool(problems)
        print(f"{name}  {'FAILED' if problems else 'ok'}{detail and f'  ({detail})'}", flush=True)
        for problem in problems[:PROBLEMS_SHOWN]:
            print(f"    {problem}", flush=True)
        if len(problems) > PROBLEMS_SHOWN:
            print(f"    and {len(problems) - PROBLEMS_SHOWN} more", flush=True)
