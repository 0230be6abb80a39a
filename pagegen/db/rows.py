"""Writing rows: each thing once, by its digest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from pagegen.db import codec, schema
from pagegen.spec import CompileFacts, Device, DispatchRule, Measurement, Prediction, Profile


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

    def add_parents(self, **rows: tuple[sa.Table, codec.Row]) -> tuple[dict[str, str], dict[str, int]]:
        """Adds what a row refers to; returns each kind's digest and the references for the row."""
        digests = {kind: row["digest"] for kind, (_, row) in rows.items()}
        return digests, {f"{kind}_id": self.add(table, row)[0] for kind, (table, row) in rows.items()}

    def add_trial(self, measurement: Measurement) -> bool:
        """Adds a trial; False when the identical one is there."""
        m = measurement
        digests, references = self.add_parents(
            kernel=(schema.kernels, codec.kernel_row(m.spec, m.layout, m.target, m.code_hash)),
            device=(schema.devices, codec.device_row(m.device)),
            environment=(schema.environments, codec.environment_row(m.environment)),
            variant=(schema.variants, codec.variant_row(m.variant)),
            workload=(schema.workloads, codec.workload_row(m.workload)),
        )
        return self.add(schema.trials, {**codec.trial_row(m, digests), **references})[1]

    def add_profile(self, profile: Profile) -> bool:
        """Adds a profile; False when the identical one is there."""
        return self.add(schema.profiles, codec.profile_row(profile))[1]

    def add_portfolio(
        self, kernel: codec.Row, device: Device, profile: Profile, rule: DispatchRule, created_at: str
    ) -> bool:
        """Adds a portfolio for the kernel of that row; False when the identical one is there."""
        digests, references = self.add_parents(
            kernel=(schema.kernels, kernel),
            device=(schema.devices, codec.device_row(device)),
            profile=(schema.profiles, codec.profile_row(profile)),
        )
        return self.add(schema.portfolios, {**codec.portfolio_row(rule, created_at, digests), **references})[1]

    def add_facts(self, facts: CompileFacts) -> bool:
        """Adds what a compiler made of a kernel; False when the identical facts are there."""
        f = facts
        digests, references = self.add_parents(
            kernel=(schema.kernels, codec.kernel_row(f.spec, f.layout, f.target, f.code_hash)),
            variant=(schema.variants, codec.variant_row(f.variant)),
            environment=(schema.environments, codec.environment_row(f.environment)),
        )
        return self.add(schema.compile_facts, {**codec.facts_row(f, digests), **references})[1]

    def add_prediction(self, prediction: Prediction) -> bool:
        """Adds a prediction; False when the identical one is there."""
        p = prediction
        digests, references = self.add_parents(
            kernel=(schema.kernels, codec.kernel_row(p.spec, p.layout, p.device.target, p.code_hash)),
            device=(schema.devices, codec.device_row(p.device)),
            variant=(schema.variants, codec.variant_row(p.variant)),
            workload=(schema.workloads, codec.workload_row(p.workload)),
        )
        return self.add(schema.predictions, {**codec.prediction_row(p, digests), **references})[1]

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
