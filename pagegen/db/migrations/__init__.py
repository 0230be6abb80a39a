"""From one version of the tuning database's schema to another, with Alembic.

Each file in versions/ is one step, and says what the tables were at its time in its own words, so that later changes
of the code cannot change it. A new one needs: the next number, `upgrade`, `downgrade`, `SCHEMA_VERSION` raised, and a
file of the version before it under tests/db/.
"""

from __future__ import annotations

import threading
from pathlib import Path

import sqlalchemy as sa

from pagegen.db.schema import SCHEMA_VERSION, revision, schema_info

FIRST = 1
# The tables that came with a version, whose rows have no place in an earlier one.
_SINCE = {2: ("compile_facts", "predictions", "extras")}
# Alembic hands the connection to a migration by a name that the whole process shares.
_ONE_AT_A_TIME = threading.Lock()


def name_of(version: int) -> str:
    """The revision of a schema version, as Alembic names it."""
    return f"{version:04d}"


def stamp(connection: sa.Connection, version: int = SCHEMA_VERSION) -> None:
    """Writes down, where nothing is, which version the tables of this connection have."""
    connection.execute(schema_info.insert().values(version=version))
    connection.execute(revision.insert().values(version_num=name_of(version)))


def migrate(connection: sa.Connection, version: int = SCHEMA_VERSION) -> None:
    """Leads the tables of this connection to `version`, up or down, in the transaction that it is in.

    Raises ValueError for a version that there is no way to.
    """
    if not FIRST <= version <= SCHEMA_VERSION:
        raise ValueError(f"version must be from {FIRST} to {SCHEMA_VERSION}, got {version}")
    here = connection.execute(sa.select(schema_info.c.version)).scalar_one()
    if not sa.inspect(connection).has_table(revision.name):  # version 1 did not know Alembic
        revision.create(connection)
        connection.execute(revision.insert().values(version_num=name_of(here)))
    _run(connection, up=version > here, to=name_of(version))
    connection.execute(schema_info.update().values(version=version))
    if version == FIRST:
        revision.drop(connection)


def losses(connection: sa.Connection, version: int) -> dict[str, int]:
    """What goes on the way down to `version`: rows by table, of those that it does not have. Empty on the way up."""
    tables = [name for first, names in _SINCE.items() if first > version for name in names]
    counts = {name: connection.execute(sa.select(sa.func.count()).select_from(sa.table(name))) for name in tables}
    return {name: int(found) for name, result in counts.items() if (found := result.scalar_one())}


def build(connection: sa.Connection, version: int) -> None:
    """Makes the tables of `version` in an empty database, step by step as they came to be."""
    _run(connection, up=True, to=name_of(version))
    connection.execute(schema_info.insert().values(version=version))


def _run(connection: sa.Connection, *, up: bool, to: str) -> None:
    # imported here: opening a database of the present version needs none of it, and it takes a tenth of a second
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _ONE_AT_A_TIME:
        (command.upgrade if up else command.downgrade)(config, to)
