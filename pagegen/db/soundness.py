"""Is everything in the database what it should be: pages, references, keys, rows that read, times that can be."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

from pagegen import costs
from pagegen.db import codec, dates, facts, figures, keys, queries
from pagegen.db.engine import Store
from pagegen.db.errors import DatabaseError
from pagegen.db.plausible import impossible_times
from pagegen.db.queries import Decoder, Portfolio, Undecodable
from pagegen.db.schema import compile_facts, devices, metadata, parents, portfolios, predictions, trials
from pagegen.spec import CompileFacts, Measurement, Prediction


def verify(store: Store) -> list[str]:
    """What is wrong with the database, a sentence each; empty when nothing is."""
    problems: list[str] = []
    decoder = Decoder()
    try:
        with store.reading() as connection:
            problems += _broken_pages(connection)
            for kind, how in codec.SHARED.items():
                problems += _broken_things(connection, kind, how)
            problems += _twice_named(connection)
            for kind, (statement, judge) in _JUDGED.items():
                for found in queries.decoded(connection, statement, kind, functools.partial(judge, decoder)):
                    if isinstance(found, Undecodable):
                        problems.append(f"{found.what} cannot be read: {found.why}")
                    else:
                        problems += found
            problems += _illegal_rules(store, connection, decoder)
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


def _broken_things(connection: sa.Connection, kind: str, how: codec.Kind) -> Iterator[str]:
    """Rows whose data does not decode, or whose key or columns differ from what their data says."""
    table = metadata.tables[f"{kind}s"]

    def differing(row: Any) -> str | None:
        names = _differing(row, how.row(how.decode(row.data)))
        return f"{kind} {row.id}: {names} differ from its data" if names else None

    for found in queries.decoded(connection, sa.select(table).order_by(table.c.id), kind, differing):
        if isinstance(found, Undecodable):
            yield f"{found.what} cannot be read: {found.why}"
        elif found is not None:
            yield found


def _twice_named(connection: sa.Connection) -> Iterator[str]:
    """GPUs that are alike in every feature and rate, yet have names that differ: trials of one device that do not meet.

    CPUs are left out: models that differ in nothing that is told here may differ in speed.
    """
    names: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for found in queries.decoded(
        connection, sa.select(devices.c.id, devices.c.data), "device", lambda row: codec.device_from(row.data)
    ):
        if not isinstance(found, Undecodable) and found.target.is_gpu and found.units:
            plain = {**found.to_dict(), "name": "", "memory_gib": keys.memory_class(found.memory_gib)}
            names[keys.canonical(plain)].add((repr(found.name), keys.device_identity(found)[:8]))
    for alike in names.values():
        if len({identity for _, identity in alike}) > 1:
            told = " and ".join(f"{name} ({identity})" for name, identity in sorted(alike))
            yield f"{told} are alike in every feature: if they are one device, name it alike"


def _differing(row: Any, wanted: codec.Row) -> str:
    """The names of the columns that are not as wanted; "" where all are."""
    stored = row._mapping
    return ", ".join(sorted(name for name, value in wanted.items() if name in stored and stored[name] != value))


def _parents(value: Measurement | Portfolio | CompileFacts | Prediction, table: sa.Table) -> dict[str, str]:
    """The digests of what the value's row should refer to, by kind."""
    return {kind: row["digest"] for kind, row in codec.parent_rows(value, parents(table)).items()}


def _differs(row: Any, wanted: codec.Row, what: str) -> list[str]:
    names = _differing(row, wanted)
    return [f"{what} {row.id}: its {names} differ from its data"] if names else []


def _judged_trial(decoder: Decoder, row: Any) -> list[str]:
    trial = decoder.trial(row)
    problems = [f"trial {row.id}: {problem}" for problem in impossible_times(trial)]
    return problems + _differs(row, codec.trial_row(trial, _parents(trial, trials)), "trial")


def _judged_portfolio(decoder: Decoder, row: Any) -> list[str]:
    portfolio = decoder.portfolio(row)
    problems = []
    if dates.is_ahead(portfolio.created_at):
        problems.append(
            f"portfolio {row.id} of {portfolio.created_at}: it is dated ahead of the clock, and goes before all "
            "that is tuned until then"
        )
    return problems + _differs(row, codec.portfolio_row(portfolio, _parents(portfolio, portfolios)), "portfolio")


def _illegal_rules(store: Store, connection: sa.Connection, decoder: Decoder) -> Iterator[str]:
    """Portfolios with variants that the rules of legality refuse for their own device, and that no trial shows to run:
    a selection passes them over."""
    for found in queries.decoded(
        connection, queries.PORTFOLIOS, "portfolio", lambda row: (row, decoder.portfolio(row))
    ):
        if isinstance(found, Undecodable):
            continue  # named already
        row, p = found
        broken = {v: why for v in p.rule.variants if (why := costs.legal(p.spec, p.layout, v, p.device))}
        ran = figures.proven((store,), p.spec, p.layout, p.device, p.code_hash, broken) if broken else set()
        for variant, reasons in broken.items():
            if variant not in ran:
                what = f"{variant.name} cannot run on {p.device.name}: {reasons[0]}"
                yield f"portfolio {row.id} of {p.created_at}: {what}"


def _judged_facts(decoder: Decoder, row: Any) -> list[str]:
    found = facts.facts_of(row, decoder)
    return _differs(row, codec.facts_row(found, _parents(found, compile_facts)), "compile facts")


def _judged_prediction(decoder: Decoder, row: Any) -> list[str]:
    found = facts.prediction_of(row, decoder)
    return _differs(row, codec.prediction_row(found, _parents(found, predictions)), "prediction")


_JUDGED: dict[str, tuple[sa.Select[Any], Callable[[Decoder, Any], list[str]]]] = {
    "trial": (queries.TRIALS, _judged_trial),
    "portfolio": (queries.PORTFOLIOS, _judged_portfolio),
    "compile facts": (facts.FACTS, _judged_facts),
    "prediction": (facts.PREDICTIONS, _judged_prediction),
}
