"""Publishes the request table's rows in a file, for an agent that audits from its own process.

A page audit checks who holds each page of the KV pool. For that, the agent needs the *live rows*:
the rows of the request table that a session or a request holds. The shim publishes them after each
step if `BERTH_KV_TABLE` names a file. The DP rank is appended to the file's name. `sampler` calls
the `RowPublisher` before and after each step. If no file is named, `audit` makes the audits here.

The device itself marks in the file when a step's changes begin and when they are done, in the order
of the scheduler's CUDA stream. Listing the rows takes about 10 microseconds a step, and a little
for each row.
"""

import hashlib
import os
from collections.abc import Callable
from typing import Any

from . import snapshot
from .library import Library, RowTable

# The number of versions of the table in the file. If a reader is this many steps behind, its
# version was overwritten, and the reader must read again.
TABLE_VERSIONS = 8


def table_path(dp_rank: int) -> str:
    """Returns the file for this rank's rows; empty if they are not published."""
    path = os.environ.get("BERTH_KV_TABLE", "")
    return f"{path}-{dp_rank}" if path else ""


class RowPublisher:
    """Publishes the rows of one scheduler. If `end_step` isn't called for a step, the step ends
    when the next step begins."""

    def __init__(
        self, scheduler: Any, path: str, cuda_ordinal: int, current_stream: Callable[[], int]
    ):
        request_table = scheduler.req_to_token_pool.req_to_token
        pool_pages = scheduler.max_total_num_tokens // scheduler.page_size
        self._scheduler = scheduler
        self._current_stream = current_stream
        self._has_begun_step = False
        self._row_table: RowTable = Library().open_row_table(
            scheduler.page_size, pool_pages, request_table, cuda_ordinal, path, TABLE_VERSIONS
        )

    def begin_step(self) -> None:
        """Must be called before a step's first change."""
        self.end_step()
        self._row_table.begin_step(self._current_stream())
        self._has_begun_step = True

    def end_step(self) -> None:
        """Must be called after a step's last change."""
        if self._has_begun_step:
            session_names, rows = snapshot.list_rows(self._scheduler)
            keys = [session_key(name) for name in session_names]
            # The holders without a name come after the named sessions.
            keys += [0] * (len(rows) - len(session_names))
            self._row_table.end_step(rows, keys, self._current_stream())
            self._has_begun_step = False


def session_key(name: str) -> int:
    """Returns the number by which the agent identifies a session in the table."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
