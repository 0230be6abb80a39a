"""Statements for those who want their own: what the commands ask, as SQL that runs as it stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pagegen.db import codec, queries
from pagegen.db.order import by_code_point
from pagegen.db.queries import Decoder, Undecodable
from pagegen.db.schema import kernels, trials
from pagegen.spec import AttentionSpec, Measurement, Status, Target, check

if TYPE_CHECKING:
    from pagegen.db.database import Database
    from pagegen.db.engine import Store

CHUNK = 500  # keys a statement


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
    newest_first = (by_code_point(trials.c.created_at).desc(), trials.c.digest.desc())
    return statement.order_by(None).order_by(*newest_first).limit(limit)


def newest(db: Database, limit: int, **wanted: Any) -> tuple[list[Measurement], int]:
    """The newest trials, oldest first, and how many match in all. Rows that cannot be read are left out."""
    check.count("limit", limit)
    statement, matching = listing(limit=limit, **wanted), 0
    counted = sa.select(sa.func.count()).select_from(listing(**wanted).order_by(None).subquery())
    found: dict[str, Measurement] = {}
    decoder = Decoder()
    for store in db.stores:
        with store.reading() as connection:
            matching += int(connection.execute(counted).scalar_one())
            for row in queries.decoded(connection, statement, "trial", lambda row: (row.digest, decoder.trial(row))):
                if not isinstance(row, Undecodable):
                    found[row[0]] = row[1]
    shown = sorted(found.items(), key=lambda one: (one[1].created_at, one[0]))[-limit:]
    return [trial for _, trial in shown], matching - _in_both(db, **wanted)


def _in_both(db: Database, **wanted: Any) -> int:
    """How many matching trials of what ships the user has, too."""
    own, *under = db.stores
    digests: list[str] = []
    for store in under:
        with store.reading() as connection:
            statement = listing(**wanted).order_by(None).with_only_columns(trials.c.digest, maintain_column_froms=True)
            digests += connection.execute(statement).scalars()
    return len(held(own, digests))


def held(store: Store, digests: Sequence[str]) -> set[str]:
    """Those of some trials, by their digests, that a store has."""
    found: set[str] = set()
    with store.reading() as connection:
        for first in range(0, len(digests), CHUNK):
            known = sa.select(trials.c.digest).where(trials.c.digest.in_(digests[first : first + CHUNK]))
            found.update(connection.execute(known).scalars())
    return found


def of_same_questions(db: Database, shown: Iterable[Measurement], **wanted: Any) -> list[Measurement]:
    """All matching trials that answer a question which one of these answers, oldest first."""
    keys = sorted({codec.trial_key(trial) for trial in shown})
    found: dict[str, Measurement] = {}
    decoder = Decoder()
    for store in db.stores:
        for chunk in (keys[i : i + CHUNK] for i in range(0, len(keys), CHUNK)):
            statement = listing(**wanted).where(trials.c.key.in_(chunk))
            with store.reading() as connection:
                for row in queries.decoded(connection, statement, "trial", lambda r: (r.digest, decoder.trial(r))):
                    if not isinstance(row, Undecodable):
                        found[row[0]] = row[1]
    return [trial for _, trial in sorted(found.items(), key=lambda one: (one[1].created_at, one[0]))]


def layouts(spec: AttentionSpec, target: Target, code_hash: str) -> sa.Select[Any]:
    """The layouts that have ok trials for a spec, target and code."""
    columns = (kernels.c.block_size, kernels.c.block_order)
    statement = sa.select(*columns).distinct().join(trials).where(trials.c.status == Status.OK.value)
    return queries.narrowed(statement, spec=spec, target=target, code_hash=code_hash).order_by(*columns)


def text_of(db: Database, statement: sa.Select[Any]) -> str:
    """The statement as text for the database's own dialect, values in place, ended by a semicolon."""
    with db.stores[0].reading() as connection:
        dialect = connection.dialect
    return f"{statement.compile(dialect=dialect, compile_kwargs={'literal_binds': True})};"
