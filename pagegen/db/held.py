"""Who holds an open write transaction: what joins it is of the same process, thread and asyncio task."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa

from pagegen.db.server import Writing

T = TypeVar("T")


@dataclass(frozen=True)
class Held:
    """The open write transaction of a thread, which nested ones join: of the same process and asyncio task."""

    process: int
    task: object
    file: sa.Connection | None = None
    server: Writing | None = None

    @property
    def connection(self) -> sa.Connection:
        """The present one: a server's may be lost and replaced."""
        connection = self.file if self.server is None else self.server.connection
        if connection is None:
            raise RuntimeError("a transaction must be of a file or of a server, got neither")
        return connection

    def run(self, work: Callable[[sa.Connection], T], *, keep: bool) -> T:
        """Does something in the transaction; see `server.Writing.run`."""
        return work(self.connection) if self.server is None else self.server.run(work, keep=keep)


def current_task() -> object:
    """The asyncio task that runs in this thread; None outside of one, and where nothing loaded asyncio."""
    asyncio = sys.modules.get("asyncio")
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None
