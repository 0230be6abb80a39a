"""What can be wrong with a tuning database; every message names the database and what to do."""

from __future__ import annotations


class DatabaseError(RuntimeError):
    """The database cannot do what was asked."""


class MissingDatabase(DatabaseError):
    """There is no database at that place."""


class ForeignDatabase(DatabaseError):
    """The file is no pagegen database: garbage, cut short, or another program's."""


class NewerSchema(DatabaseError):
    """The database was written by a newer pagegen."""


class ReadOnlyDatabase(DatabaseError):
    """The database was opened for reading: its file or folder cannot be written, or reading was asked for."""
