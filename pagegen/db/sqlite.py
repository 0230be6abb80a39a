"""SQLite files: how they are opened, locked, journalled, judged and set aside.

WAL where one host has the file to itself, a rollback journal where hosts may share it (see `pagegen.db.filesystem`).
Commits are synced: what `record` returned from survives a power cut as well as a kill.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.pool import NullPool
from sqlalchemy.util import LRUCache

from pagegen.db import filesystem
from pagegen.db.errors import REMEDY, DatabaseError
from pagegen.db.schema import APPLICATION_ID

# 32 processes that record without a pause waited up to 1 s for their turn on a busy 2-core machine.
BUSY_TIMEOUT_S = 60.0
# A commit is on the disk when it returns: 2 ms here, and a trial takes a tenth of a second.
SYNCHRONOUS = "FULL"
# Cached pages: bulk imports into large files read most index pages again and again.
CACHE_KIB = 65536
_JOURNAL_SWITCH_S = 5.0
_POLL_S = 0.005
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF, errno.EACCES, errno.ENOSYS)
_COMPANIONS = ("-wal", "-shm", "-journal")
# The file header, by SQLite's "Database File Format": 16 bytes of magic, then these at their offsets.
_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100


_ANY_FILE = sa.make_url("sqlite://")  # which one is in the connections
_text = functools.partial(str, encoding="utf-8", errors="surrogateescape")


def connect(uri: str, *, check_same_thread: bool = True) -> sqlite3.Connection:
    """A connection that begins no transaction of its own: `on_begin` does."""
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=check_same_thread
    )
    # a damaged byte is judged with the row it is in, and does not keep the others from being read
    connection.text_factory = _text
    try:
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA synchronous={SYNCHRONOUS}")
        connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
    except UnicodeDecodeError:  # what SQLite says of a damaged schema quotes it
        connection.close()
        raise sqlite3.DatabaseError("malformed database schema") from None
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def engine(connect: Callable[[], Any]) -> sa.Engine:
    """An engine for one file, with connections that live as long as a transaction. All files share the dialect and what
    was compiled for it, a millisecond a statement: questions go to the user's file and to the records that ship."""
    dialect, compiled = _dialect()
    made = sa.Engine(NullPool(connect), dialect, _ANY_FILE, execution_options={"compiled_cache": compiled})
    sa.event.listen(made, "begin", on_begin)
    return made


@functools.cache
def _dialect() -> tuple[sa.Dialect, LRUCache[Any, Any]]:
    """SQLite's dialect, initialised, and an empty cache."""
    scratch = sa.create_engine(_ANY_FILE, poolclass=NullPool)
    scratch.connect().close()
    return scratch.dialect, LRUCache(500)  # as many as an engine keeps of its own


def on_begin(connection: sa.Connection) -> None:
    """Begins a transaction: IMMEDIATE to write, since one that reads first and then writes would fail at once when
    another writer came between."""
    write = connection.get_execution_options().get("pagegen_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def tables(connection: sa.Connection) -> set[str]:
    """The names of the tables."""
    return set(connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars())


def uri(path: Path, read_only: bool) -> str:
    """SQLite's URI of a file."""
    place = "file:" + quote(str(path.absolute()))
    if not read_only:
        return place + "?mode=rwc"
    # In a folder that cannot be written SQLite has nowhere to put a WAL file's shared memory; without pending WAL
    # pages the file cannot change under us, which is what immutable promises.
    frozen = not os.access(path.parent, os.W_OK) and not _pending(path, "-wal")
    return place + "?mode=ro" + ("&immutable=1" if frozen else "")


def cannot_write(path: Path) -> bool:
    """Whether a file that is there, or the folder for its journal, cannot be written."""
    return path.exists() and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))


def has_log_out_of_reach(path: Path) -> bool:
    """Whether a file has commits in its log and lies in a folder where the log's shared memory cannot be made."""
    return _pending(path, "-wal") and not os.access(path.parent, os.W_OK)


def _pending(path: Path, companion: str) -> bool:
    try:
        return path.with_name(path.name + companion).stat().st_size > 0
    except FileNotFoundError:  # it comes and goes with another's transaction
        return False


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the file's folder against others who do the same: for the few things that SQLite's own locks do not order.

    A lock on the folder leaves no file behind, and goes with the process. Where there are no such locks, nothing is
    held. Raises DatabaseError when another holds it for longer than the busy timeout.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except PermissionError:
        yield
        return
    try:
        held = _flock(folder, path)
        try:
            yield
        finally:
            if held:  # not left to close(): a child forked meanwhile has the folder open, too
                fcntl.flock(folder, fcntl.LOCK_UN)
    finally:
        os.close(folder)


def _flock(folder: int, path: Path) -> bool:
    end = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                raise
        if time.monotonic() > end:
            raise DatabaseError(
                f"the folder of {path} was held for {BUSY_TIMEOUT_S:.0f} s: end what opens or repairs a database there"
            )
        time.sleep(_POLL_S)


def settle_journal(path: Path) -> None:
    """Gives the file the journal that works where it is. Call `alone`: the switch needs the file for itself, and
    ignores the busy timeout.

    Where others have the file open for longer, a local file keeps its rollback journal, slower with many writers and as
    safe. Raises DatabaseError for a WAL that cannot be left on a shared file system.
    """
    wanted = "delete" if filesystem.is_shared(path) else "wal"
    if _journal(path) == wanted:
        return
    end, cause = time.monotonic() + _JOURNAL_SWITCH_S, "others have it open"
    while True:
        connection = connect(uri(path, read_only=False))
        try:
            if connection.execute(f"PRAGMA journal_mode={wanted}").fetchone()[0] == wanted:
                return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            cause = str(error)
        finally:
            connection.close()
        if time.monotonic() > end:
            break
        time.sleep(_POLL_S)
    if wanted == "delete":
        raise DatabaseError(
            f"{path} has a write-ahead log, which loses data on {filesystem.type_of(path)}, and it cannot be left "
            f"({cause}): end what uses the file, or {REMEDY}"
        )


def _journal(path: Path) -> str:
    """The journal mode that a file's header names; "" for one without a header."""
    header = _header(path)
    return {1: "delete", 2: "wal"}.get(header[18], "") if header else ""


def _header(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            found = file.read(_HEADER_BYTES)
    except OSError:
        return None
    return found if len(found) == _HEADER_BYTES and found.startswith(_MAGIC) else None


def is_ours(path: Path) -> bool:
    """Whether a file's header says that pagegen made it, whatever became of the rest."""
    header = _header(path)
    return header is not None and struct.unpack_from(">I", header, 68)[0] == APPLICATION_ID


def is_part_of_a_database(path: Path) -> bool:
    """Whether a file is a SQLite database, whoever's, or one of the files that SQLite keeps beside one."""
    beside = [path.with_name(path.name.removesuffix(c)) for c in _COMPANIONS if path.name.endswith(c)]
    return any(_is_file(file) and _header(file) is not None for file in (path, *beside))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def is_cut(path: Path) -> bool:
    """Whether a file is shorter than its header says, and stays so: another's checkpoint passes through such states."""
    for wait_s in (0.05, 0.1):
        if not _seems_cut(path):
            return False
        time.sleep(wait_s)
    return _seems_cut(path)


def _seems_cut(path: Path) -> bool:
    if _pending(path, "-wal") or _pending(path, "-journal"):
        return False
    header = _header(path)
    if header is None:
        return False
    page_bytes, changes = struct.unpack_from(">H", header, 16)[0], struct.unpack_from(">I", header, 24)[0]
    pages, valid_for = struct.unpack_from(">I", header, 28)[0], struct.unpack_from(">I", header, 92)[0]
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    return bool(changes == valid_for and pages * page_bytes > path.stat().st_size)


def set_aside(path: Path) -> Path:
    """Renames a file, and what SQLite keeps beside it, so that a new one can be made; returns its new name. Call
    `alone`."""
    stem = f"{path.name}.damaged-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
    number = 0
    while (target := path.with_name(stem + (f".{number}" if number else ""))).exists():
        number += 1
    # The file last, or the next one would be made beside this one's log; and then what a reader left meanwhile.
    for companion in (*_COMPANIONS, "", *_COMPANIONS):
        file = path.with_name(path.name + companion)
        if file.exists():
            file.rename(target.with_name(target.name + companion))
    return target
