"""Opening a database: URLs, tables of the present version, transactions, and errors that name the place and the remedy.

Connections to a file live as long as one transaction (NullPool), so none is ever shared between threads or carried
across a fork. Beside them a store that writes to a SQLite file holds one idle connection: without it every transaction
would be the file's last and copy its WAL back and delete it (34 against 5 ms a recorded trial on a busy 2-core
machine). It is closed before a fork. Connections to a server: `pagegen.db.server`. Writers queue, on SQLite's file lock
or on PostgreSQL's advisory lock.
"""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from pagegen.db import filesystem, forks, migrations, places, server, sqlite
from pagegen.db.errors import (
    ELSEWHERE,
    REMEDY,
    DamagedDatabase,
    DatabaseError,
    ForeignDatabase,
    MissingDatabase,
    NewerSchema,
    OlderSchema,
    ReadOnlyDatabase,
    Unreachable,
)
from pagegen.db.explained import explained
from pagegen.db.held import Held, current_task
from pagegen.db.schema import APPLICATION_ID, SCHEMA_VERSION, metadata, mirror, schema_info

log = logging.getLogger(__name__)

T = TypeVar("T")
# What a read does over again where a server is lost in the middle of it.
READ_ATTEMPTS = 3


class Store:
    """One database: its place, and transactions on it."""

    def __init__(self, url: str | os.PathLike[str], *, read_only: bool = False, keeps_mirror: bool = False) -> None:
        place = places.place_of(url)
        self.path, self.name, self.read_only = place.path, place.name, read_only
        self._keeps_mirror = keeps_mirror  # a mirror is written by who makes it, and read by all others
        self._active = threading.local()
        self._keeper: sqlite3.Connection | None = None
        forks.watch(self)
        if place.path is not None:
            self._engine = self._file(place.path)
        elif place.url is not None:
            self._engine = server.engine_for(place.url, self.name)
        self._patience_s = server.OPENING_S
        try:
            self._prepare()
        except DatabaseError:
            self._engine.dispose()
            raise
        if not self.read_only:  # who serves goes on without a server, who tunes waits for it
            self._patience_s = server.PATIENCE_S

    def _file(self, path: Path) -> sa.Engine:
        try:
            self.read_only = self.read_only or sqlite.cannot_write(path)
            if self.read_only and not path.exists():
                raise MissingDatabase(f"there is no tuning database at {path}: run pagegen tune, or {ELSEWHERE}")
            if not self.read_only:
                path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():  # a pipe would be waited for
                what = "folder" if path.is_dir() else "pipe or device"
                raise ForeignDatabase(f"{path} is a {what}, not a tuning database: name a file")
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise DatabaseError(f"{self.name[:300]} cannot hold a tuning database ({why}): {ELSEWHERE}") from error
        connect = functools.partial(sqlite.connect, sqlite.uri(path, self.read_only))
        engine = sa.create_engine("sqlite://", creator=connect, poolclass=NullPool)
        sa.event.listen(engine, "begin", sqlite.on_begin)
        return engine

    # --- making and checking ----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Checks that the database is ours, of a known version and whole; makes or upgrades the tables."""
        if self.read_only or self.path is None:
            self._settle()
            return
        with sqlite.alone(self.path):  # who makes, upgrades or sets aside does it undisturbed by who opens to write
            try:
                self._settle()
            except sqlite3.Error as error:
                raise self._explained(error) from error

    def _settle(self) -> None:
        tables, version = self._found()
        if not self.read_only and (not tables or self._older(tables, version)):
            if self.path is not None:
                sqlite.settle_journal(self.path)
            try:
                self._make_tables()
            except ReadOnlyDatabase as error:
                if self.path is not None:
                    raise
                raise ReadOnlyDatabase(
                    f"{self.name} lacks the tables of schema version {SCHEMA_VERSION}, which this role may not make: "
                    f"have their owner run pagegen db migrate, or {ELSEWHERE}"
                ) from error
            tables, version = self._found()
        self._check(tables, version)
        if mirror.name in tables and not self._keeps_mirror:
            self.read_only = True
        if self.path is not None and not self.read_only and filesystem.is_shared(self.path):
            sqlite.settle_journal(self.path)  # a file that came from elsewhere

    def _found(self) -> tuple[set[str], object]:
        """The names of the tables that are there, and the version that they say they have."""
        with self.reading() as connection:
            if self.path is not None and sqlite.is_cut(self.path):
                raise DamagedDatabase(f"{self.name} is cut short: {REMEDY}")
            tables = set(sa.inspect(connection).get_table_names())
            known = schema_info.name in tables
            return tables, connection.execute(sa.select(schema_info.c.version)).scalar() if known else None

    @staticmethod
    def _older(tables: set[str], version: object) -> bool:
        return schema_info.name in tables and isinstance(version, int) and 0 < version < SCHEMA_VERSION

    def _make_tables(self) -> None:
        """Makes or upgrades the tables in one transaction; of several processes that come at once, one does."""
        with self._transaction(write=True) as connection:
            if not sa.inspect(connection).get_table_names():
                metadata.create_all(connection)
                migrations.stamp(connection)
            elif connection.execute(sa.select(schema_info.c.version)).scalar() != SCHEMA_VERSION:
                migrations.migrate(connection)
                log.info("%s was led up to schema version %d", self.name, SCHEMA_VERSION)
            if self.path is not None:
                connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")

    def _check(self, tables: set[str], version: object) -> None:
        if not tables:
            raise MissingDatabase(f"{self.name} is empty: run pagegen tune, or name another database")
        if schema_info.name not in tables:
            some = ", ".join(sorted(tables)[:3])
            raise ForeignDatabase(f"{self.name} is another program's database (tables {some}): {REMEDY}")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise NewerSchema(
                f"{self.name} has schema version {version}, this pagegen knows up to {SCHEMA_VERSION}: "
                f"upgrade pagegen, or {ELSEWHERE}"
            )
        if self._older(tables, version):
            copy = "copy it to where it can be written, and " if self.path and sqlite.cannot_write(self.path) else ""
            raise OlderSchema(
                f"{self.name} has schema version {version}, this pagegen reads {SCHEMA_VERSION}: "
                f"{copy}run pagegen db migrate --db {self.name if not copy else 'COPY'}, or {ELSEWHERE}"
            )
        if version != SCHEMA_VERSION or not set(metadata.tables) <= tables:
            raise DamagedDatabase(f"{self.name} has lost part of its tables: {REMEDY}")

    def migrate(self, version: int, *, lossy: bool = False) -> None:
        """Leads the tables to another schema version, for an older pagegen. This store cannot use them any more.

        Raises ValueError for a version that there is no way to, and, unless `lossy`, where rows have no place in it."""
        with self.writing() as connection:
            lost = {} if lossy else migrations.losses(connection, version)
            if lost:
                told = ", ".join(f"{count} {table.replace('_', ' ')}" for table, count in lost.items())
                raise ValueError(
                    f"schema version {version} has no place for {told} of {self.name}: export them first, and let them "
                    "go with --lossy"
                )
            migrations.migrate(connection, version)

    # --- transactions -----------------------------------------------------------------------------------------

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
    def _transaction(self, *, write: bool, keep: bool = False) -> Iterator[sa.Connection]:
        joined = self._joined()
        if joined is not None:
            try:
                yield joined.connection
            except SQLAlchemyError as error:
                raise self._explained(error) from error
            return
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

    def _held(self) -> Held | None:
        """The open write transaction of this thread; never a parent's after a fork."""
        held: Held | None = getattr(self._active, "held", None)
        return held if held is not None and held.process == os.getpid() else None

    def _joined(self) -> Held | None:
        """The one that this asyncio task is in, too."""
        held = self._held()
        return held if held is not None and held.task is current_task() else None

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
