"""Publishes the live rows after each step, for an agent that audits from its own process (tier 2).

This is done only if `BERTH_KV_TABLE` names a file; the DP rank is appended to the name. The device
writes when a step's changes begin and when they are done, in stream order. Reading the rows takes
some ten microseconds a step, and a little for each row.
"""

import hashlib
import os
from collections.abc import Callable
from typing import Any

from . import snapshot
from .library import Library, RowTable

# The number of table versions kept. A reader that falls this many steps behind must read again.
TABLES = 8


def path_of(dp_rank: int) -> str:
    """Returns the file for this rank's rows; empty if they are not published."""
    path = os.environ.get("BERTH_KV_TABLE", "")
    return f"{path}-{dp_rank}" if path else ""


class Publisher:
    """Publishes the rows of one scheduler. If a step's end was not seen, it ends when the next step
    begins."""

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
        """Must be called before a step's first change."""
        self.done()
        self._table.begin(self._stream())
        self._open = True

    def done(self) -> None:
        """Must be called after a step's last change."""
        if self._open:
            names, rows = snapshot.rows_of(self._scheduler)
            keys = [key_of(name) for name in names] + [0] * (len(rows) - len(names))
            self._table.done(rows, keys, self._stream())
            self._open = False


def key_of(name: str) -> int:
    """Returns the key by which the agent knows a session."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
