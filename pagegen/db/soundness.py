"""Is everything in the database what it should be: pages, references, keys, rows that read, times that can be."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

from pagegen.db import codec, facts, queries
from pagegen.db.engine import Store
from pagegen.db.errors import DatabaseError
from pagegen.db.plausible import impossible_times
from pagegen.db.queries import Decoder, Portfolio, Undecodable
from pagegen.db.schema import devices, environments, kernels, metadata, profiles, variants, workloads
from pagegen.spec import CompileFacts, Measurement, Prediction

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
    decoder = Decoder()
    try:
        with store.reading() as connection:
            problems += _broken_pages(connection)
            for kind, (table, encode) in _SHARED.items():
                problems += _broken_things(connection, kind, table, encode)
            problems += _twice_named(connection)
            for kind, (statement, judge) in _JUDGED.items():
                for found in queries.decoded(connection, statement, kind, functools.partial(judge, decoder)):
                    if isinstance(found, Undecodable):
                        problems.append(f"{found.what} cannot be read: {found.why}")
                    else:
                        problems += found
    except DatabaseError as error:  # damage that stops the reading is a finding, not a failure to look
        problems.append(str(error))
    return problems


def _broken_pages(connection: sa.Connection) -> list[str]:
    if connection.dialect.name != "sqlite":
        return _lost_parents(connection)
    found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check")]
    problems = [f"the file is damaged: {line}" for line in found if line != "ok"]
    for row in connection.exec_driver_sql("PRAGMA foreign_key_check"):
        problems.append(f"{row[0]} row {row[1]} refers to a row of {row[2]} that is not there")
    return problems


def _lost_parents(connection: sa.Connection) -> list[str]:
    """Rows that refer to none: a server checks as they come, yet a restored dump or a replica may have skipped it."""
    problems = []
    for table in metadata.sorted_tables:
        for key in table.foreign_keys:
            lost = sa.select(table.c.id).where(key.parent.not_in(sa.select(key.column)))
            problems += [
                f"{table.name} row {row.id} refers to a row of {key.column.table.name} that is not there"
                for row in connection.execute(lost)
            ]
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


def _twice_named(connection: sa.Connection) -> Iterator[str]:
    """GPUs that are alike in every feature and rate, yet have names that differ: trials of one device that do not meet.

    CPUs are left out: models that differ in nothing that is told here may differ in speed.
    """
    names: dict[str, set[str]] = defaultdict(set)
    for found in queries.decoded(
        connection, sa.select(devices.c.id, devices.c.data), "device", lambda row: codec.device_from(row.data)
    ):
        if not isinstance(found, Undecodable) and found.target.is_gpu and found.units:
            identity = codec.device_identity(found)
            plain = {**found.to_dict(), "name": "", "memory_gib": round(found.memory_gib)}
            names[codec.canonical(plain)].add(f"{found.name!r} ({identity[:8]})")
    for alike in names.values():
        if len({name[-9:] for name in alike}) > 1:
            yield f"{' and '.join(sorted(alike))} are alike in every feature: if they are one device, name it alike"


def _differs(row: Any, wanted: codec.Row, what: str) -> list[str]:
    names = [name for name, value in wanted.items() if name in row._mapping and row._mapping[name] != value]
    return [f"{what} {row.id}: its {', '.join(sorted(names))} differ from its data"] if names else []


def _kernel(of: Measurement | Portfolio | CompileFacts) -> str:
    return str(codec.kernel_row(of.spec, of.layout, of.target, of.code_hash)["digest"])


def _judged_trial(decoder: Decoder, row: Any) -> list[str]:
    trial = decoder.trial(row)
    parents = {
        "kernel": _kernel(trial),
        "device": codec.device_row(trial.device)["digest"],
        "environment": codec.environment_row(trial.environment)["digest"],
        "variant": codec.variant_row(trial.variant)["digest"],
        "workload": codec.workload_row(trial.workload)["digest"],
    }
    problems = [f"trial {row.id}: {problem}" for problem in impossible_times(trial)]
    return problems + _differs(row, codec.trial_row(trial, parents), "trial")


def _judged_portfolio(decoder: Decoder, row: Any) -> list[str]:
    portfolio = decoder.portfolio(row)
    parents = {
        "kernel": _kernel(portfolio),
        "device": codec.device_row(portfolio.device)["digest"],
        "profile": codec.profile_row(portfolio.profile)["digest"],
    }
    problems = [
        f"portfolio {row.id} of {portfolio.created_at}: {variant.name} does not run on {portfolio.target}"
        for variant in portfolio.rule.variants
        if variant.family != portfolio.target.family
    ]
    return problems + _differs(row, codec.portfolio_row(portfolio.rule, portfolio.created_at, parents), "portfolio")


def _judged_facts(decoder: Decoder, row: Any) -> list[str]:
    found = facts.facts_of(row, decoder)
    parents = {
        "kernel": _kernel(found),
        "variant": codec.variant_row(found.variant)["digest"],
        "environment": codec.environment_row(found.environment)["digest"],
    }
    return _differs(row, codec.facts_row(found, parents), "compile facts")


def _judged_prediction(decoder: Decoder, row: Any) -> list[str]:
    found: Prediction = facts.prediction_of(row, decoder)
    parents = {
        "kernel": str(codec.kernel_row(found.spec, found.layout, found.device.target, found.code_hash)["digest"]),
        "device": codec.device_row(found.device)["digest"],
        "variant": codec.variant_row(found.variant)["digest"],
        "workload": codec.workload_row(found.workload)["digest"],
    }
    return _differs(row, codec.prediction_row(found, parents), "prediction")


_JUDGED: dict[str, tuple[sa.Select[Any], Callable[[Decoder, Any], list[str]]]] = {
    "trial": (queries.TRIALS, _judged_trial),
    "portfolio": (queries.PORTFOLIOS, _judged_portfolio),
    "compile facts": (facts.FACTS, _judged_facts),
    "prediction": (facts.PREDICTIONS, _judged_prediction),
}
