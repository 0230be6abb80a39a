"""Upkeep: how much is in the database, and throwing old things away. Whether it is sound: `pagegen.db.soundness`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from pagegen.db.engine import Store
from pagegen.db.order import by_code_point
from pagegen.db.schema import (
    SCHEMA_VERSION,
    compile_facts,
    devices,
    environments,
    extras,
    kernels,
    metadata,
    portfolios,
    predictions,
    revision,
    schema_info,
    trials,
    variants,
    workloads,
)
from pagegen.spec import Target, check

# So many characters of a code hash will do: `db verify` prints twelve.
MIN_PREFIX = 8
# What belongs to a kernel, and goes with it.
_OF_KERNELS = (trials, portfolios, compile_facts, predictions)


def stats(store: Store) -> dict[str, Any]:
    """How much is there: rows a table, trials by status and by target, code hashes, first and last trial, bytes."""
    with store.reading() as connection:

        def counts(column: sa.Column[Any], *joins: sa.Table) -> dict[str, int]:
            source: Any = trials
            for table in joins:
                source = source.join(table)
            statement = sa.select(column, sa.func.count()).select_from(source).group_by(column).order_by(column)
            return {str(value): int(count) for value, count in connection.execute(statement)}

        rows = {
            name: int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())
            for name, table in sorted(metadata.tables.items())
            if table not in (schema_info, revision)
        }
        dated = by_code_point(trials.c.created_at)
        first, last = connection.execute(sa.select(sa.func.min(dated), sa.func.max(dated))).one()
        return {
            "database": store.name,
            "schema_version": SCHEMA_VERSION,
            "read_only": store.read_only,
            "bytes": _bytes(store, connection),
            "rows": rows,
            "trials_by_status": counts(trials.c.status),
            "trials_by_target": counts(kernels.c.target, kernels),
            "trials_by_code_hash": counts(kernels.c.code_hash, kernels),
            "first_trial": first,
            "last_trial": last,
        }


def _bytes(store: Store, connection: sa.Connection) -> int:
    if store.path is not None:
        return store.path.stat().st_size
    return int(connection.execute(sa.select(sa.func.pg_database_size(sa.func.current_database()))).scalar_one())


def prune(store: Store, *, target: Target | str, keep: Collection[str], dry_run: bool = False) -> dict[str, int]:
    """Removes the target's trials, portfolios, compile facts and predictions of every code hash that is not in `keep`,
    and what only they used. A hash may be given by its first MIN_PREFIX characters or more.

    Returns how many rows of which table went; with `dry_run`, how many of these four and of kernels would. Profiles
    stay: they are what was asked, not what came of it. Raises TypeError or ValueError for a target that is none, and
    where a hash in `keep` is not held for the target, or none is given: more would go than was meant.
    """
    target = Target.parse(target)
    if isinstance(keep, str) or not isinstance(keep, Collection):
        raise TypeError(f"keep must be a list of code hashes, got {type(keep).__name__} {keep!r}")
    if not keep:
        raise ValueError(f"keep must name at least one code hash, got none: it would remove every trial of {target}")
    removed: dict[str, int] = {}
    with store.reading() if dry_run else store.writing() as connection:
        kept = _held(connection, target, keep)
        old = sa.select(kernels.c.id).where(kernels.c.target == str(target), kernels.c.code_hash.not_in(kept))
        for table in _OF_KERNELS:
            removed[table.name] = _remove(connection, table, table.c.kernel_id.in_(old), dry_run)
        removed[kernels.name] = _remove(connection, kernels, kernels.c.id.in_(old), dry_run)
        if not dry_run:
            for table in (variants, workloads, environments, devices):
                removed[table.name] = _remove(connection, table, _unused(table), dry_run)
            removed[extras.name] = _remove(connection, extras, _ownerless(), dry_run)
    return removed


def _held(connection: sa.Connection, target: Target, keep: Collection[str]) -> list[str]:
    """The code hashes that `keep` names, of those that there are for a target. Raises where one names none."""
    statement = sa.select(kernels.c.code_hash).distinct().where(kernels.c.target == str(target))
    held = sorted(connection.execute(statement).scalars())
    found: list[str] = []
    for name in keep:
        check.text("a code hash in keep", name, empty=False)
        named = [one for one in held if one == name or (len(name) >= MIN_PREFIX and one.startswith(name))]
        if held and len(named) != 1:
            some = ", ".join(one[:12] for one in held[:8])
            raise ValueError(
                f"keep must name code hashes that are held for {target} ({some}), got {name!r}, which is "
                f"{'none of them' if not named else 'more than one'}"
            )
        found += named
    return found


def _unused(table: sa.Table) -> sa.ColumnElement[bool]:
    """Rows of a table that no row of another refers to."""
    users = [key.parent for other in metadata.sorted_tables for key in other.foreign_keys if key.column.table is table]
    return sa.and_(*(table.c.id.not_in(sa.select(column)) for column in users))


def _ownerless() -> sa.ColumnElement[bool]:
    """What a newer pagegen wrote beside rows that are no more; whole records of its own have no owner and stay."""
    owners = [table for table in metadata.sorted_tables if "digest" in table.c and table is not extras]
    return sa.and_(extras.c.owner != "", *(extras.c.owner.not_in(sa.select(t.c.digest)) for t in owners))


def _remove(connection: sa.Connection, table: sa.Table, where: sa.ColumnElement[bool], dry_run: bool) -> int:
    if dry_run:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table).where(where)).scalar_one())
    return int(connection.execute(table.delete().where(where)).rowcount)
