"""Waiting for a database that is out of reach for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from pagegen_autotune.interrupt import StopSignal

log = logging.getLogger(__name__)
T = TypeVar("T")

# A server that is restarted is back in seconds, one that failed over in minutes.
PATIENCE_S = 600.0
FIRST_S, LONGEST_S = 0.1, 5.0  # the pauses between attempts: each twice the last


class Asking(Protocol):
    """Runs what asks a database, and may run it again where it did not answer: the transaction is all or nothing, and
    what is there already is not added twice."""

    def __call__(self, act: Callable[[], T]) -> T: ...


def at_once(act: Callable[[], T]) -> T:
    """Asks once: what the database reports is raised."""
    return act()


class Patience:
    """Asks again until the database answers, for `limit_s` at most. What waiting cannot mend is raised at once: a
    database that is damaged, foreign, read-only, of another version or not there. A stop ends the waiting."""

    def __init__(self, stop: StopSignal, *, limit_s: float = PATIENCE_S) -> None:
        self._stop = stop
        self._limit_s = limit_s

    def __call__(self, act: Callable[[], T]) -> T:
        from pagegen.db import DatabaseError

        start, pause = time.monotonic(), FIRST_S
        while True:
            try:
                return act()
            except DatabaseError as error:
                if not _may_pass(error) or time.monotonic() - start > self._limit_s:
                    raise
                if pause == FIRST_S:
                    log.warning("waiting for the database: %s", error)
            self._stop.check()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)


def _may_pass(error: Exception) -> bool:
    from pagegen.db import ForeignDatabase, MissingDatabase, NewerSchema, OlderSchema, ReadOnlyDatabase

    lasting = (ForeignDatabase, MissingDatabase, NewerSchema, OlderSchema, ReadOnlyDatabase, ValueError)
    return not isinstance(error, lasting)
