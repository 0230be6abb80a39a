"""Opening a database: its file or server, tables of the present version, errors that name the place and the remedy."""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
from pathlib import Path

import sqlalchemy as sa

from pagegen.db import filesystem, migrations, places, server, sqlite
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
)
from pagegen.db.schema import APPLICATION_ID, SCHEMA_VERSION, metadata, mirror, schema_info
from pagegen.db.transactions import Transactions

log = logging.getLogger(__name__)


class Store(Transactions):
    """One database: its place, and transactions on it."""

    def __init__(self, url: str | os.PathLike[str], *, read_only: bool = False, keeps_mirror: bool = False) -> None:
        place = places.place_of(url)
        super().__init__(place, read_only=read_only)
        self._keeps_mirror = keeps_mirror  # a mirror is written by who makes it, and read by all others
        if place.path is not None:
            self._engine = self._file(place.path)
        elif place.url is not None:
            self._engine = server.engine_for(place.url, self.name)
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
        return sqlite.engine(connect)

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
            tables = self._tables(connection)
            known = schema_info.name in tables
            return tables, connection.execute(sa.select(schema_info.c.version)).scalar() if known else None

    def _tables(self, connection: sa.Connection) -> set[str]:
        if self.path is None:
            return set(sa.inspect(connection).get_table_names())
        return sqlite.tables(connection)

    @staticmethod
    def _older(tables: set[str], version: object) -> bool:
        return schema_info.name in tables and isinstance(version, int) and 0 < version < SCHEMA_VERSION

    def _make_tables(self) -> None:
        """Makes or upgrades the tables in one transaction; of several processes that come at once, one does."""
        with self._transaction(write=True) as connection:
            if not self._tables(connection):
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
