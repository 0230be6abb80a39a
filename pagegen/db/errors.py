"""What can be wrong with a tuning database; every message names the database and what to do."""

from __future__ import annotations

ELSEWHERE = "name another database with --db or PAGEGEN_DB"
REMEDY = f"move it away, or {ELSEWHERE}"


class DatabaseError(RuntimeError):
    """The database cannot do what was asked."""


class BadPlace(DatabaseError, ValueError):
    """A path or URL that names no database."""


class Unreachable(DatabaseError):
    """A server does not answer, refuses, or was lost in the middle."""


class MissingDatabase(DatabaseError):
    """There is no database at that place."""


class ForeignDatabase(DatabaseError):
    """The file is no pagegen database: garbage, cut short, or another program's."""


class DamagedDatabase(ForeignDatabase):
    """The file is no whole database: garbage, cut short, or with parts of its tables lost."""


class NewerSchema(DatabaseError):
    """The database was written by a newer pagegen."""


class OlderSchema(DatabaseError):
    """The database was written by an older pagegen and was opened for reading, so that it could not be led up."""


class ReadOnlyDatabase(DatabaseError):
    """The database was opened for reading: its file or folder cannot be written, or reading was asked for."""
