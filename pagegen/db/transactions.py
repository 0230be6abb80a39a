"""Transactions on one database: who may be in one, what joins it, and what is done again where a server is lost.

Connections to a file live as long as one transaction (NullPool), so none is ever shared between threads or carried
across a fork. Beside them a store that writes to a SQLite file holds one idle connection: without it every transaction
would be the file's last and copy its WAL back and delete it (34 against 5 ms a recorded trial on a busy 2-core
machine). It is closed before a fork. Connections to a server: `pagegen.db.server`. Writers queue, on SQLite's file lock
or on PostgreSQL's advisory lock.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pagegen.db import forks, places, server, sqlite
from pagegen.db.errors import ELSEWHERE, DatabaseError, ReadOnlyDatabase, Unreachable
from pagegen.db.explained import explained
from pagegen.db.held import Held, current_task

T = TypeVar("T")
READ_ATTEMPTS = 3  # of what only reads, where a server is lost in the middle of it


class Transactions:
    """Transactions on the database at `place`, through `_engine`, which the subclass makes."""

    _engine: sa.Engine

    def __init__(self, place: places.Place, *, read_only: bool) -> None:
        self.path, self.name, self.read_only = place.path, place.name, read_only
        self._active = threading.local()
        self._keeper: sqlite3.Connection | None = None
        self._patience_s = server.OPENING_S
        forks.watch(self)

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A write transaction: committed at the end, rolled back by any exception. Nested ones join the outermost.

        Raises ReadOnlyDatabase, or DatabaseError for whatever the database reports.
        """
        if self.read_only:
            raise ReadOnlyDatabase(
                f"{self.name} was opened for reading: it is a mirror, its file or folder cannot be written, or reading "
                f"was asked for; {ELSEWHERE}"
            )
        with self._transaction(write=True, keep=True) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A read transaction, or the write transaction that this thread is in."""
        with self._transaction(write=False) as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """What this thread reads inside it is of one moment, of a file at least: what is asked of a server stays
        transactions of their own, each of which can be done again where the server is lost."""
        if self.path is None or self._joined(reading=True) is not None:
            yield
            return
        with self.reading() as connection:
            self._active.seen = Held(os.getpid(), current_task(), file=connection)
            try:
                yield
            finally:
                self._active.seen = None

    @contextmanager
    def _transaction(self, *, write: bool, keep: bool = False) -> Iterator[sa.Connection]:
        joined = self._joined(reading=not write)
        if joined is not None:
            try:
                yield joined.connection
            except SQLAlchemyError as error:
                raise self._explained(error) from error
            return
        if write and self._held("seen") is not None:  # on a shared file system it would wait for its own reading
            raise DatabaseError(f"{self.name} is being read by this thread: write nothing inside snapshot()")
        if write and self._held() is not None:  # waiting for it would be for ever: it goes on when this returns
            raise DatabaseError(
                f"{self.name} is being written by another task of this thread: await nothing inside atomic()"
            )
        if write and self.path is not None and forks.is_lost(self.path):
            raise DatabaseError(
                f"{self.name} cannot be written by this process, which was forked inside a transaction on it: fork "
                "before or after, or start the process anew"
            )
        try:
            if self.path is None and write:
                with self._written_on_server() as connection:
                    yield connection
                return
            with self._watched(keep), self._connected() as connection:
                connection = self._set_up(connection, write)
                with connection.begin():
                    if write:
                        self._active.held = Held(os.getpid(), current_task(), file=connection)
                    try:
                        yield connection
                    finally:
                        if write:
                            self._active.held = None
        except SQLAlchemyError as error:
            raise self._explained(error) from error

    @contextmanager
    def _written_on_server(self) -> Iterator[sa.Connection]:
        writing = server.Writing(self._connected, sqlite.BUSY_TIMEOUT_S, self._patience_s)
        self._active.held = Held(os.getpid(), current_task(), server=writing)
        try:
            yield writing.connection
            writing.commit()
        finally:
            self._active.held = None
            writing.close()

    def _connected(self) -> sa.Connection:
        if self.path is not None:
            return self._engine.connect()
        return server.connected(self._engine, self.name, self._patience_s)

    def add(self, work: Callable[[sa.Connection], T]) -> T:
        """What `work` returns, in a write transaction. It must add what it adds once, however often it is done: where a
        server is lost, all that was done in the transaction is done again."""
        with self.writing():
            return self._in_held(work, keep=True)

    def ask(self, work: Callable[[sa.Connection], T]) -> T:
        """What `work` reads, in the write transaction that this thread is in, or else in one of its own, which is done
        again where a server is lost in the middle."""
        if self._joined() is not None:
            return self._in_held(work, keep=False)
        for _ in range(READ_ATTEMPTS - 1):
            try:
                with self.reading() as connection:
                    return work(connection)
            except Unreachable as error:
                if not server.was_lost(error):
                    raise
        with self.reading() as connection:
            return work(connection)

    def _held(self, name: str = "held") -> Held | None:
        """The open write transaction of this thread, or its snapshot ("seen"); never a parent's after a fork."""
        held: Held | None = getattr(self._active, name, None)
        return held if held is not None and held.process == os.getpid() else None

    def _joined(self, *, reading: bool = False) -> Held | None:
        """The one that this asyncio task is in, too; for `reading` a snapshot will do."""
        for held in (self._held(), self._held("seen") if reading else None):
            if held is not None and held.task is current_task():
                return held
        return None

    def _in_held(self, work: Callable[[sa.Connection], T], *, keep: bool) -> T:
        held: Held = self._active.held
        try:
            return held.run(work, keep=keep)
        except SQLAlchemyError as error:
            raise self._explained(error) from error

    @contextmanager
    def _watched(self, keep: bool) -> Iterator[None]:
        if self.path is None:
            yield
            return
        with forks.transaction(self.path):
            if keep:
                self._keep_open(self.path)
            yield

    def _set_up(self, connection: sa.Connection, write: bool) -> sa.Connection:
        if self.path is not None:
            return connection.execution_options(pagegen_write=write)
        if write:
            return connection
        # as SQLite has it: all statements of a transaction that reads see one moment
        return connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def _explained(self, error: SQLAlchemyError | sqlite3.Error) -> DatabaseError:
        return explained(error, self.name, self.path)

    def _keep_open(self, path: Path) -> None:
        if self._keeper is not None:
            return
        with forks.undisturbed():
            if self._keeper is None:
                keeper = sqlite.connect(sqlite.uri(path, read_only=False), check_same_thread=False)
                try:
                    # opens the file; connecting alone does not
                    keeper.execute("SELECT 1 FROM sqlite_master").fetchall()
                except sqlite3.Error:  # whatever it is, the transaction to come meets it and says so
                    keeper.close()
                    return
                self._keeper = keeper

    def release(self) -> None:
        """Closes the idle connection."""
        with forks.undisturbed():
            if self._keeper is not None:
                self._keeper.close()
                self._keeper = None

    def leave(self) -> None:
        """In a child after a fork: leaves the parent's connections to a server as they are."""
        if self.path is None:
            self._engine.dispose(close=False)

    def close(self) -> None:
        """Releases all connections; the database may be used again, which opens it again."""
        self.release()
        self._engine.dispose()
