"""A PostgreSQL server: its connections, what a lost one means, and writes that are done again.

A store keeps one idle connection; what more its threads need at once is closed after use, and a lost one is found out
before it is used. A transaction that loses its connection is done again on the next one, with back-off, as long as all
that was done in it is known: what the database's verbs add is added once by its digest, so that a commit whose answer
was lost may be repeated. Statements of others through the connection cannot be, and their transaction fails.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from pagegen.db.errors import ELSEWHERE, DatabaseError, Unreachable
from pagegen.db.schema import APPLICATION_ID

T = TypeVar("T")

# Seconds: what opening waits for a server that restarts (a model is to start without one), what a store that writes
# waits for one that it has seen, and the longest pause between two attempts.
OPENING_S = 5.0
PATIENCE_S = 60.0
LONGEST_PAUSE_S = 2.0
# A writer that goes silent inside a transaction (a lost host: TCP alone would hold on for hours) is cut by the server,
# before those who queue behind it give up.
SILENCE_S = 30.0
# libpq's own, where a URL names no others: a host that does not answer is given up after so many seconds.
CONNECTING = {
    "connect_timeout": "10", "keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3",
    "tcp_user_timeout": "60000", "fallback_application_name": "pagegen",
}  # fmt: skip
# What a server says while it starts, stops, is promoted or is full; it says the rest for good.
_PASSING = (
    "starting up", "shutting down", "recovery mode", "accepting connections", "terminating connection",
    "too many clients", "too many connections", "slots are",
)  # fmt: skip
# SQLSTATEs of what passes by itself: a server that ends, a standby that needs the rows, a deadlock.
_LOST_STATES = ("57P01", "57P02", "57P03", "40001", "40P01")


def engine_for(url: sa.URL, name: str) -> sa.Engine:
    """The engine of a server's URL. Raises DatabaseError where the driver is missing."""
    missing = {key: value for key, value in CONNECTING.items() if key not in url.query}
    try:
        return sa.create_engine(
            url.update_query_dict(missing),
            poolclass=QueuePool,
            pool_size=1,
            max_overflow=-1,
            pool_pre_ping=True,
            # what is prepared on one server connection is unknown on another, behind a pooler between them
            connect_args={"prepare_threshold": None},
        )
    except ModuleNotFoundError as error:
        raise DatabaseError(
            f"{name} needs the module {error.name}: pip install 'pagegen-attention[postgres]'"
        ) from error


def connected(engine: sa.Engine, name: str, patience_s: float) -> sa.Connection:
    """A connection, waited for while the server may come back. Raises Unreachable."""
    end, pauses = time.monotonic() + patience_s, _pauses()
    while True:
        try:
            return engine.connect()
        except SQLAlchemyError as error:
            cause, pause = cause_of(error), next(pauses)
            passing = "FATAL" not in cause or any(words in cause for words in _PASSING)
            if not passing or time.monotonic() + pause > end:
                raise Unreachable(
                    f"{name} does not answer ({cause}): start or reach the server, or {ELSEWHERE}"
                ) from error
        time.sleep(pause)


def _pauses() -> Iterator[float]:
    """Seconds from attempt to attempt, doubling, and scattered, so that a fleet does not come back at one moment."""
    pause = 0.1
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def cause_of(error: BaseException) -> str:
    """The driver's own words, on one line."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def is_lost(error: SQLAlchemyError) -> bool:
    """Whether a statement failed since its connection, and not what it asked, was at fault."""
    if not isinstance(error, DBAPIError):
        return False
    state = getattr(error.orig, "sqlstate", None)
    return error.connection_invalidated or state in _LOST_STATES or str(state).startswith("08")


def queue(connection: sa.Connection, busy_timeout_s: float) -> None:
    """Waits for the other writers: of two transactions that add the same things in different orders one would
    otherwise fail by deadlock."""
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(busy_timeout_s * 1000)}")
    connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {int(SILENCE_S * 1000)}")
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({APPLICATION_ID})")


def was_lost(error: Unreachable) -> bool:
    """Whether it tells of a server that was lost in the middle, not of one that could not be reached."""
    return isinstance(error.__cause__, SQLAlchemyError) and is_lost(error.__cause__)


class Writing:
    """One write transaction: what is done in it by `run` is done again where its connection is lost."""

    def __init__(self, connect: Callable[[], sa.Connection], busy_timeout_s: float, patience_s: float) -> None:
        self._connect, self._busy_timeout_s, self._patience_s = connect, busy_timeout_s, patience_s
        self._done: list[Callable[[sa.Connection], Any]] = []
        self._by_us = self._by_others = False
        try:
            self._begin()
        except SQLAlchemyError as error:
            self._again(error)

    def _begin(self) -> None:
        self.connection = self._connect()
        try:
            self._transaction = self.connection.begin()
            queue(self.connection, self._busy_timeout_s)
        except BaseException:
            self.connection.close()
            raise
        sa.event.listen(self.connection, "before_cursor_execute", self._note)

    def _note(self, *_: Any) -> None:
        self._by_others = self._by_others or not self._by_us

    @contextmanager
    def _noted_as_ours(self) -> Iterator[None]:
        outer, self._by_us = self._by_us, True
        try:
            yield
        finally:
            self._by_us = outer

    def run(self, work: Callable[[sa.Connection], T], *, keep: bool) -> T:
        """What `work` returns; with `keep` it changes something, and is remembered. It must add what it adds once."""
        while True:
            try:
                with self._noted_as_ours():
                    result = work(self.connection)
                break
            except SQLAlchemyError as error:
                self._again(error)
        if keep:
            self._done.append(work)
        return result

    def commit(self) -> None:
        """Ends it, durably. Where the answer is lost it is done again: what was committed is found to be there."""
        while True:
            try:
                self._transaction.commit()
                return
            except SQLAlchemyError as error:
                self._again(error)

    def _again(self, error: SQLAlchemyError) -> None:
        """Does everything again on a new connection. Raises `error` where it is of another kind, or where not all is
        known that was done."""
        end, pauses = time.monotonic() + self._patience_s, _pauses()
        while True:
            if self._by_others or not is_lost(error) or time.monotonic() > end:
                raise error
            self.close()
            time.sleep(next(pauses))
            try:
                self._begin()
                with self._noted_as_ours():
                    for work in self._done:
                        work(self.connection)
                return
            except SQLAlchemyError as another:
                error = another

    def close(self) -> None:
        """Gives the connection back; what is not committed is undone."""
        self.connection.close()
