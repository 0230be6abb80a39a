"""Writing rows: each thing once, by its digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from pagegen.db import codec, schema
from pagegen.db.queries import Portfolio
from pagegen.spec import CompileFacts, Measurement, Prediction, Profile

V = TypeVar("V", Measurement, Portfolio, CompileFacts, Prediction)


@dataclass
class Writer:
    """Adds rows in one transaction; remembers the ids it has seen, so that bulk work looks each thing up once."""

    connection: sa.Connection
    ids: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, table: sa.Table, row: codec.Row) -> tuple[int, bool]:
        """The row's id, and whether it was new."""
        known = self.ids.get((table.name, row["digest"]))
        if known is not None:
            return known, False
        of_digest = sa.select(table.c.id).where(table.c.digest == row["digest"])
        identity = self.connection.execute(of_digest).scalar()
        added = False
        if identity is None:
            columns = {name: value for name, value in row.items() if name in table.c}
            added = self.connection.execute(_insert_or_ignore(self.connection, table).values(columns)).rowcount == 1
            identity = self.connection.execute(of_digest).scalar_one()
        self.ids[table.name, row["digest"]] = identity
        return identity, added

    def add_trial(self, measurement: Measurement) -> bool:
        """Adds a trial; False when the identical one is there."""
        return self._add_referring(schema.trials, measurement, codec.trial_row)

    def add_profile(self, profile: Profile) -> bool:
        """Adds a profile; False when the identical one is there."""
        return self.add(schema.profiles, codec.profile_row(profile))[1]

    def add_portfolio(self, portfolio: Portfolio) -> bool:
        """Adds a portfolio; False when the identical one is there."""
        return self._add_referring(schema.portfolios, portfolio, codec.portfolio_row)

    def add_facts(self, facts: CompileFacts) -> bool:
        """Adds what a compiler made of a kernel; False when the identical facts are there."""
        return self._add_referring(schema.compile_facts, facts, codec.facts_row)

    def add_prediction(self, prediction: Prediction) -> bool:
        """Adds a prediction; False when the identical one is there."""
        return self._add_referring(schema.predictions, prediction, codec.prediction_row)

    def _add_referring(self, table: sa.Table, value: V, own_row: Callable[[V, Mapping[str, str]], codec.Row]) -> bool:
        """Adds what a value's row refers to, and the row; False when the identical row is there."""
        parents = schema.parents(table)
        rows = codec.parent_rows(value, parents)
        references = {f"{kind}_id": self.add(parents[kind], row)[0] for kind, row in rows.items()}
        own = own_row(value, {kind: row["digest"] for kind, row in rows.items()})
        return self.add(table, {**own, **references})[1]

    def add_extra(self, record: str, owner: str, field: str, value: Any) -> bool:
        """Keeps what a record held that this version does not know; see `schema.extras`."""
        return self.add(schema.extras, codec.extra_row(record, owner, field, value))[1]


def _insert_or_ignore(connection: sa.Connection, table: sa.Table) -> Any:
    """An insert that leaves an existing row of the same digest alone, in the connection's dialect; its result counts
    the rows that were new."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(table).on_conflict_do_nothing(index_elements=["digest"])
    # inline: a statement that returns keys does not count
    return statement.inline().execution_options(preserve_rowcount=True)
