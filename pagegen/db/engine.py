"""Opening a database: URLs, SQLite's pragmas, transactions, and errors that name the file and the remedy.

Connections live as long as one transaction (NullPool), so none is ever shared between threads or carried across a
fork. SQLite runs in WAL mode where the file system allows it, with a busy timeout. Beside them a store that writes
holds one idle connection: without it every transaction would be the file's last and copy its WAL back and delete it
(34 against 5 ms a recorded trial on a busy 2-core machine). It is closed before a fork.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from pagegen.db.errors import DatabaseError, ForeignDatabase, MissingDatabase, NewerSchema, ReadOnlyDatabase
from pagegen.db.schema import SCHEMA_VERSION, metadata, schema_info

BUSY_TIMEOUT_S = 30.0
ELSEWHERE = "name another database with --db or PAGEGEN_DB"
REMEDY = f"move it away, or {ELSEWHERE}"

_STORES: weakref.WeakSet[Store] = weakref.WeakSet()


def _before_fork() -> None:
    # SQLite forbids a child even to close a connection that its parent opened
    for store in list(_STORES):
        store.release()


os.register_at_fork(before=_before_fork)


class Store:
    """One database: its place, and transactions on it."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self.path = sqlite_path(url)
        self.name = str(self.path) if self.path is not None else _masked(url)
        self.read_only = read_only or (self.path is not None and _cannot_write(self.path))
        self._active = threading.local()
        self._keeper: sqlite3.Connection | None = None
        self._keeper_lock = threading.Lock()
        _STORES.add(self)
        self._engine = self._create_engine(url)
        try:
            self._prepare()
        except DatabaseError:
            self._engine.dispose()
            raise

    def _create_engine(self, url: str) -> sa.Engine:
        if self.path is None:
            try:
                return sa.create_engine(url, poolclass=NullPool)
            except ModuleNotFoundError as error:
                raise DatabaseError(f"{self.name} needs the module {error.name}: install it") from error
        try:
            if self.read_only and not self.path.exists():
                raise MissingDatabase(f"there is no tuning database at {self.path}: run pagegen tune, or {ELSEWHERE}")
            if not self.read_only:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir():
                raise ForeignDatabase(f"{self.path} is a folder, not a tuning database: name a file")
        except OSError as error:
            raise DatabaseError(
                f"{self.path} cannot hold a tuning database ({error}): name another place with --db or PAGEGEN_DB"
            ) from error
        connect = functools.partial(_connect, _sqlite_uri(self.path, self.read_only))
        engine = sa.create_engine("sqlite://", creator=connect, poolclass=NullPool)
        sa.event.listen(engine, "begin", _on_begin)
        return engine

    def _prepare(self) -> None:
        """Checks that the database is ours, of a known version and whole; makes the tables in an empty one."""
        with self.reading() as connection:
            tables = set(sa.inspect(connection).get_table_names())
            version = None
            if schema_info.name in tables:
                version = connection.execute(sa.select(schema_info.c.version)).scalar()
        if not tables and not self.read_only:
            self._create_tables()
        elif not tables:
            raise MissingDatabase(f"{self.name} is empty: run pagegen tune, or name another database")
        elif schema_info.name not in tables:
            some = ", ".join(sorted(tables)[:3])
            raise ForeignDatabase(f"{self.name} is another program's database (tables {some}): {REMEDY}")
        elif isinstance(version, int) and version > SCHEMA_VERSION:
            raise NewerSchema(
                f"{self.name} has schema version {version}, this pagegen knows up to {SCHEMA_VERSION}: "
                f"upgrade pagegen, or {ELSEWHERE}"
            )
        elif version != SCHEMA_VERSION or not set(metadata.tables) <= tables:
            raise ForeignDatabase(f"{self.name} has lost part of its tables: {REMEDY}")

    def _create_tables(self) -> None:
        # one immediate transaction: of several processes that open a new file, one makes the tables
        with self._transaction(write=True) as connection:  # not `writing`: the WAL switch needs the file alone
            if sa.inspect(connection).get_table_names():
                return
            metadata.create_all(connection)
            connection.execute(schema_info.insert().values(version=SCHEMA_VERSION))
        if self.path is not None:
            self._switch_to_wal()

    def _switch_to_wal(self) -> None:
        # The switch ignores the busy timeout and needs the file alone. Whoever loses that race, or has a file system
        # without shared memory, keeps the rollback journal: slower with many writers, as safe.
        try:
            with self._engine.connect() as connection:
                connection.connection.cursor().execute("PRAGMA journal_mode=WAL").close()
        except (DBAPIError, sqlite3.Error):
            return

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A write transaction: committed at the end, rolled back by any exception. Nested ones join the outermost.

        Raises ReadOnlyDatabase, or DatabaseError for whatever the database reports.
        """
        if self.read_only:
            raise ReadOnlyDatabase(
                f"{self.name} was opened for reading: its file or folder cannot be written, or reading was asked for; "
                f"{ELSEWHERE}"
            )
        self._keep_open()
        with self._transaction(write=True) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A read transaction, or the write transaction that this thread is in."""
        with self._transaction(write=False) as connection:
            yield connection

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[sa.Connection]:
        held = getattr(self._active, "held", None)
        if held is not None and held[0] == os.getpid():  # never a parent's connection after a fork
            yield held[1]
            return
        try:
            with self._engine.connect() as connection:
                connection = connection.execution_options(pagegen_write=write)
                with connection.begin():
                    if write:
                        self._active.held = (os.getpid(), connection)
                    try:
                        yield connection
                    finally:
                        self._active.held = None
        except SQLAlchemyError as error:
            raise self._explained(error) from error

    def _explained(self, error: SQLAlchemyError) -> DatabaseError:
        cause = str(getattr(error, "orig", None) or error).splitlines()[0]
        if "not a database" in cause or "malformed" in cause:
            return ForeignDatabase(f"{self.name} is damaged or no database ({cause}): {REMEDY}")
        if "readonly" in cause:
            return ReadOnlyDatabase(f"{self.name} cannot be written ({cause}): {ELSEWHERE}")
        if isinstance(error, OperationalError) and "locked" in cause:
            return DatabaseError(
                f"{self.name} was busy for {BUSY_TIMEOUT_S:.0f} s ({cause}): end what holds it, or {ELSEWHERE}"
            )
        return DatabaseError(f"{self.name} cannot be used ({cause}): check the place and the disk, or {REMEDY}")

    def _keep_open(self) -> None:
        if self.path is None or self._keeper is not None:
            return
        with self._keeper_lock:
            if self._keeper is None:
                keeper = _connect(_sqlite_uri(self.path, read_only=False), check_same_thread=False)
                try:
                    # opens the file; connecting alone does not
                    keeper.execute("SELECT 1 FROM sqlite_master").fetchall()
                except sqlite3.Error:  # whatever it is, the transaction to come meets it and says so
                    keeper.close()
                    return
                self._keeper = keeper

    def release(self) -> None:
        """Closes the idle connection."""
        with self._keeper_lock:
            if self._keeper is not None:
                self._keeper.close()
                self._keeper = None

    def close(self) -> None:
        """Releases all connections; the database may be used again, which opens it again."""
        self.release()
        self._engine.dispose()


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite database given as a path or a sqlite URL; None for a server's URL.

    Raises ValueError for an in-memory database or a database that is neither SQLite nor PostgreSQL.
    """
    text = str(url)
    if "://" not in text:
        if text in ("", ":memory:"):
            raise ValueError(f"url must be a path or a URL, got {text!r}: a tuning database lives in a file")
        return Path(text).expanduser()
    try:
        parsed = sa.engine.make_url(text)
    except SQLAlchemyError as error:
        raise ValueError(f"url must be a path, sqlite:///PATH or postgresql://..., got {text!r}") from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise ValueError(f"url must name a file, got {text!r}: a tuning database lives in a file")
        return Path(str(parsed.database)).expanduser()
    if backend != "postgresql":
        raise ValueError(f"url must be a path, sqlite:///PATH or postgresql://..., got {_masked(text)!r}")
    return None


def _masked(url: str) -> str:
    return sa.engine.make_url(url).render_as_string(hide_password=True)


def _cannot_write(path: Path) -> bool:
    if not path.exists():
        return False
    return not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))


def _sqlite_uri(path: Path, read_only: bool) -> str:
    place = "file:" + quote(str(path.absolute()))
    if not read_only:
        return place + "?mode=rwc"
    # In a folder that cannot be written SQLite has nowhere to put a WAL file's shared memory; without pending WAL
    # pages the file cannot change under us, which is what immutable promises.
    wal = path.with_name(path.name + "-wal")
    pending = wal.exists() and wal.stat().st_size > 0
    frozen = not os.access(path.parent, os.W_OK) and not pending
    return place + "?mode=ro" + ("&immutable=1" if frozen else "")


def _connect(uri: str, *, check_same_thread: bool = True) -> sqlite3.Connection:
    # isolation_level None: the driver begins no transaction of its own; `_on_begin` does
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=check_same_thread
    )
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA synchronous=NORMAL")  # WAL: a power cut may lose the last commits, never the file
    return connection


def _on_begin(connection: sa.Connection) -> None:
    # IMMEDIATE: a transaction that reads and then writes would fail at once when another writer came between
    write = connection.get_execution_options().get("pagegen_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
