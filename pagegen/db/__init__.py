"""The tuning database: every trial kept, shared safely, asked in one line."""

from pagegen.db.block_size import BlockSizeRow
from pagegen.db.database import Database, open_db
from pagegen.db.errors import DatabaseError, ForeignDatabase, MissingDatabase, NewerSchema, ReadOnlyDatabase
from pagegen.db.queries import Portfolio
from pagegen.db.transfer import TransferReport

__all__ = [
    "BlockSizeRow",
    "Database",
    "DatabaseError",
    "ForeignDatabase",
    "MissingDatabase",
    "NewerSchema",
    "Portfolio",
    "ReadOnlyDatabase",
    "TransferReport",
    "open_db",
]
