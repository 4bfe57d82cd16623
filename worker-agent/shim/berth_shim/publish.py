"""Publishes after each step which rows are live, for an agent that audits from its own process (tier
2): only where `BERTH_KV_TABLE` names a file for it. The rank stands behind the file's name.

The device writes when a step's changes have begun and when they are done, in the order of its work.
Reading the rows takes some ten microseconds of each step and some per row.
"""

import hashlib
import os
from collections.abc import Callable
from typing import Any

from . import cut
from .library import Library, RowTable

# A reader is late by fewer steps than this, or looks again.
TABLES = 8


def path_of(dp_rank: int) -> str:
    """Where this rank's rows are published; empty: nowhere."""
    path = os.environ.get("BERTH_KV_TABLE", "")
    return f"{path}-{dp_rank}" if path else ""


class Publisher:
    """Of one scheduler. A step that nobody has ended ends where the next one begins."""

    def __init__(self, scheduler: Any, path: str, ordinal: int, stream: Callable[[], int]):
        table = scheduler.req_to_token_pool.req_to_token
        pages = scheduler.max_total_num_tokens // scheduler.page_size
        self._scheduler = scheduler
        self._stream = stream
        self._open = False
        self._table: RowTable = Library().row_table(
            scheduler.page_size, pages, table, ordinal, path, TABLES
        )

    def begin(self) -> None:
        """Before a step's first change."""
        self.done()
        self._table.begin(self._stream())
        self._open = True

    def done(self) -> None:
        """After its last one."""
        if self._open:
            names, rows = cut.rows_of(self._scheduler)
            keys = [key_of(name) for name in names] + [0] * (len(rows) - len(names))
            self._table.done(rows, keys, self._stream())
            self._open = False


def key_of(name: str) -> int:
    """What the agent knows a session by."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
