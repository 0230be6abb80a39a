"""Upkeep: is everything in the database what it should be, how much is there, and throwing old things away."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import sqlalchemy as sa

from pagegen import costs
from pagegen.db import codec, queries
from pagegen.db.engine import Store
from pagegen.db.errors import DatabaseError
from pagegen.db.queries import Decoder, Portfolio, Undecodable
from pagegen.db.schema import (
    SCHEMA_VERSION,
    devices,
    environments,
    kernels,
    metadata,
    portfolios,
    profiles,
    schema_info,
    trials,
    variants,
    workloads,
)
from pagegen.spec import Measurement, Target

# A cold read cannot beat the device's bandwidth; 10x covers a working set that a last-level cache holds (5-6x device
# memory on CPUs, about 3x on GPUs). An hour for one call of one layer is a unit gone wrong.
IMPOSSIBLY_FAST = 0.1
LONGEST_US = 3.6e9

_SHARED: dict[str, tuple[sa.Table, Callable[[Any], codec.Row]]] = {
    "kernel": (kernels, lambda data: codec.kernel_row(*codec.kernel_from(data))),
    "device": (devices, lambda data: codec.device_row(codec.device_from(data))),
    "environment": (environments, lambda data: codec.environment_row(codec.environment_from(data))),
    "variant": (variants, lambda data: codec.variant_row(codec.variant_from(data))),
    "workload": (workloads, lambda data: codec.workload_row(codec.workload_from(data))),
    "profile": (profiles, lambda data: codec.profile_row(codec.profile_from(data))),
}


def verify(store: Store) -> list[str]:
    """What is wrong with the database, a sentence each; empty when nothing is."""
    problems: list[str] = []
    try:
        with store.reading() as connection:
            problems += _broken_pages(connection)
            for kind, (table, encode) in _SHARED.items():
                problems += _broken_things(connection, kind, table, encode)
            problems += _broken_trials(connection)
            problems += _broken_portfolios(connection)
    except DatabaseError as error:  # damage that stops the reading is a finding, not a failure to look
        problems.append(str(error))
    return problems


def _broken_pages(connection: sa.Connection) -> list[str]:
    if connection.dialect.name != "sqlite":
        return []
    found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check")]
    problems = [f"the file is damaged: {line}" for line in found if line != "ok"]
    for row in connection.exec_driver_sql("PRAGMA foreign_key_check"):
        problems.append(f"{row[0]} row {row[1]} refers to a row of {row[2]} that is not there")
    return problems


def _broken_things(
    connection: sa.Connection, kind: str, table: sa.Table, encode: Callable[[Any], codec.Row]
) -> Iterator[str]:
    """Rows whose data does not decode, or whose key or columns differ from what their data says."""

    def differing(row: Any) -> str | None:
        wanted = encode(row.data)
        names = [name for name, value in wanted.items() if name in table.c and row._mapping[name] != value]
        return f"{kind} {row.id}: {', '.join(sorted(names))} differ from its data" if names else None

    for found in queries.decoded(connection, sa.select(table).order_by(table.c.id), kind, differing):
        if isinstance(found, Undecodable):
            yield f"{found.what} cannot be read: {found.why}"
        elif found is not None:
            yield found


def _broken_trials(connection: sa.Connection) -> Iterator[str]:
    decoder = Decoder()

    def judged(row: Any) -> list[str]:
        measurement = decoder.trial(row)
        problems = impossible_times(measurement)
        if row.key != codec.trial_key(measurement) or row.median_us != measurement.median_us:
            problems.append("its key or median differs from its data")
        return [f"trial {row.id}: {problem}" for problem in problems]

    for found in queries.decoded(connection, queries.TRIALS, "trial", judged):
        yield from [f"{found.what} cannot be read: {found.why}"] if isinstance(found, Undecodable) else found


def _broken_portfolios(connection: sa.Connection) -> Iterator[str]:
    for found in queries.decoded(connection, queries.PORTFOLIOS, "portfolio", Decoder().portfolio):
        if isinstance(found, Undecodable):
            yield f"{found.what} cannot be read: {found.why}"
        else:
            yield from _foreign_variants(found)


def _foreign_variants(portfolio: Portfolio) -> Iterator[str]:
    for variant in portfolio.rule.variants:
        if variant.family != portfolio.target.family:
            yield f"portfolio of {portfolio.created_at}: {variant.name} does not run on {portfolio.target}"


def impossible_times(measurement: Measurement) -> list[str]:
    """Why a trial's times cannot be true; empty where they can, or where nothing was timed."""
    median, device = measurement.median_us, measurement.device
    if median is None:
        return []
    problems = []
    if max(measurement.samples_us) > LONGEST_US:
        problems.append(f"a sample of {max(measurement.samples_us):.3g} us is over an hour: are these microseconds?")
    if measurement.regime == "cold" and device.bandwidth_gb_s > 0:
        floor = costs.roofline_us(measurement.spec, measurement.layout, device, measurement.workload)
        if median < IMPOSSIBLY_FAST * floor:
            problems.append(
                f"a median of {median:.3g} us is under a tenth of the {floor:.3g} us that {device.name} takes to read "
                "the keys and values: are these microseconds?"
            )
    return problems


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
            if table is not schema_info
        }
        first, last = connection.execute(
            sa.select(sa.func.min(trials.c.created_at), sa.func.max(trials.c.created_at))
        ).one()
        return {
            "database": store.name,
            "schema_version": SCHEMA_VERSION,
            "read_only": store.read_only,
            "bytes": store.path.stat().st_size if store.path is not None else None,
            "rows": rows,
            "trials_by_status": counts(trials.c.status),
            "trials_by_target": counts(kernels.c.target, kernels),
            "trials_by_code_hash": counts(kernels.c.code_hash, kernels),
            "first_trial": first,
            "last_trial": last,
        }


def prune(store: Store, *, target: Target, keep: Collection[str], dry_run: bool = False) -> dict[str, int]:
    """Removes the target's trials and portfolios of every code hash that is not in `keep`, and what only they used.

    Returns how many rows of which table went; with `dry_run`, how many trials, portfolios and kernels would. Profiles
    stay: they are what was asked, not what came of it. Raises ValueError for an empty `keep`, which would remove
    everything.
    """
    if not keep:
        raise ValueError(f"keep must name at least one code hash, got none: it would remove every trial of {target}")
    old = sa.select(kernels.c.id).where(kernels.c.target == str(target), kernels.c.code_hash.not_in(list(keep)))
    removed: dict[str, int] = {}
    with store.reading() if dry_run else store.writing() as connection:
        for table in (trials, portfolios):
            removed[table.name] = _remove(connection, table, table.c.kernel_id.in_(old), dry_run)
        removed[kernels.name] = _remove(connection, kernels, kernels.c.id.in_(old), dry_run)
        if not dry_run:
            for table, users in (
                (variants, (trials.c.variant_id,)),
                (workloads, (trials.c.workload_id,)),
                (environments, (trials.c.environment_id,)),
                (devices, (trials.c.device_id, portfolios.c.device_id)),
            ):
                unused = sa.and_(*(table.c.id.not_in(sa.select(column)) for column in users))
                removed[table.name] = _remove(connection, table, unused, dry_run)
    return removed


def _remove(connection: sa.Connection, table: sa.Table, where: sa.ColumnElement[bool], dry_run: bool) -> int:
    if dry_run:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table).where(where)).scalar_one())
    return int(connection.execute(table.delete().where(where)).rowcount)
