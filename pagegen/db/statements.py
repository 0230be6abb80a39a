"""Statements for those who want their own: what the commands ask, as SQL that runs as it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pagegen.db import queries
from pagegen.db.queries import Decoder, Undecodable
from pagegen.db.schema import kernels, trials
from pagegen.spec import AttentionSpec, Measurement, Status, Target

if TYPE_CHECKING:
    from pagegen.db.database import Database


def listing(
    *,
    spec: AttentionSpec | None = None,
    block_size: int | None = None,
    target: Target | None = None,
    status: Status | None = None,
    limit: int | None = None,
) -> sa.Select[Any]:
    """The newest trials that match everything given, newest first."""
    statement = queries.narrowed(queries.TRIALS, spec=spec, target=target, status=status)
    if block_size is not None:
        statement = statement.where(kernels.c.block_size == block_size)
    return statement.order_by(None).order_by(trials.c.created_at.desc(), trials.c.digest.desc()).limit(limit)


def newest(db: Database, limit: int, **wanted: Any) -> tuple[list[Measurement], int]:
    """The newest trials, oldest first, and how many match in all. Rows that cannot be read are left out."""
    statement, matching, found = listing(limit=limit, **wanted), 0, []
    counted = sa.select(sa.func.count()).select_from(listing(**wanted).order_by(None).subquery())
    for store in db.stores:
        with store.reading() as connection:
            matching += int(connection.execute(counted).scalar_one())
            rows = queries.decoded(connection, statement, "trial", Decoder().trial)
            found += [trial for trial in rows if not isinstance(trial, Undecodable)]
    found.sort(key=lambda trial: trial.created_at)
    return found[-limit:], matching


def layouts(spec: AttentionSpec, target: Target, code_hash: str) -> sa.Select[Any]:
    """The layouts that have ok trials for a spec, target and code."""
    columns = (kernels.c.block_size, kernels.c.block_order)
    statement = sa.select(*columns).distinct().join(trials).where(trials.c.status == Status.OK.value)
    return queries.narrowed(statement, spec=spec, target=target, code_hash=code_hash).order_by(*columns)


def text_of(db: Database, statement: sa.Select[Any]) -> str:
    """The statement as text for the database's own dialect, values in place, ended by a semicolon."""
    with db.store.reading() as connection:
        dialect = connection.dialect
    return f"{statement.compile(dialect=dialect, compile_kwargs={'literal_binds': True})};"
