"""What a driver's error means, as an error of ours that names the database and what to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from pagegen.db import server, sqlite
from pagegen.db.errors import ELSEWHERE, REMEDY, DamagedDatabase, DatabaseError, ReadOnlyDatabase, Unreachable

# What SQLite and PostgreSQL say when nothing may be written, and when another held a lock for too long.
_READ_ONLY = ("readonly", "read-only", "permission denied", "must be owner")
_BUSY = ("locked", "lock timeout")


def explained(error: SQLAlchemyError | sqlite3.Error, name: str, path: Path | None) -> DatabaseError:
    """The error of a database called `name`, a file at `path` or on a server."""
    cause = server.cause_of(error)
    if path is None and isinstance(error, SQLAlchemyError) and server.is_lost(error):
        return Unreachable(f"{name} does not answer ({cause}): start or reach the server, or {ELSEWHERE}")
    if "not a database" in cause or "malformed" in cause:
        return DamagedDatabase(f"{name} is damaged or no database ({cause}): {REMEDY}")
    if path is not None and "unable to open" in cause and sqlite.has_log_out_of_reach(path):
        return DatabaseError(
            f"{name} has commits in its log, which SQLite reads only where it may write: copy it and "
            f"{path.name}-wal to a folder that can be written, and name that with --db or PAGEGEN_DB"
        )
    if any(words in cause for words in _READ_ONLY):
        return ReadOnlyDatabase(f"{name} cannot be written ({cause}): {ELSEWHERE}")
    if any(words in cause for words in _BUSY):
        return DatabaseError(
            f"{name} was busy for {sqlite.BUSY_TIMEOUT_S:.0f} s ({cause}): end what holds it, or {ELSEWHERE}"
        )
    return DatabaseError(f"{name} cannot be used ({cause}): check the place and the disk, or {REMEDY}")
