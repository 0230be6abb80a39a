"""The tuning database: every trial kept, shared safely, asked in one line."""

from pagegen.db import figures, leads  # noqa: F401  what a first answer needs is loaded with the package
from pagegen.db.absorbing import TransferReport
from pagegen.db.block_size import BlockSizeRow
from pagegen.db.database import Database, open_db
from pagegen.db.errors import (
    DamagedDatabase,
    DatabaseError,
    ForeignDatabase,
    MissingDatabase,
    NewerSchema,
    OlderSchema,
    ReadOnlyDatabase,
    Unreachable,
)
from pagegen.db.queries import Portfolio

__all__ = [
    "BlockSizeRow",
    "DamagedDatabase",
    "Database",
    "DatabaseError",
    "ForeignDatabase",
    "MissingDatabase",
    "NewerSchema",
    "OlderSchema",
    "Portfolio",
    "ReadOnlyDatabase",
    "TransferReport",
    "Unreachable",
    "open_db",
]
