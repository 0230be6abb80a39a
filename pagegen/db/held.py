"""Who holds an open write transaction: what joins it is of the same process, thread and asyncio task."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import sqlalchemy as sa


@dataclass(frozen=True)
class Held:
    """The open write transaction of a thread, which nested ones join: of the same process and asyncio task."""

    process: int
    task: object
    connection: sa.Connection


def current_task() -> object:
    """The asyncio task that runs in this thread; None outside of one, and where nothing loaded asyncio."""
    asyncio = sys.modules.get("asyncio")
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None
