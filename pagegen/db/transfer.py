"""Export, import and merge: one stream of records, so that all three agree.

A record is one JSON object: what trials share comes first, each under an `id`, and the others name the ids. A file has
one record a line in an order that depends on the content alone, so two files of the same database are the same bytes
and a new trial is one new line. Adding records is a union by content: it commutes, associates and may be repeated.
Fields and records that this version does not know are kept beside what it does, and come out again; where several
values of one came, the record comes out once for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from pagegen.db import codec, keys, queries, schema
from pagegen.db.absorbing import ID_LENGTH, Absorber, Record, TransferReport
from pagegen.db.bulk import FIELDS
from pagegen.db.engine import Store
from pagegen.db.files import whole_file
from pagegen.db.order import by_code_point
from pagegen.spec.result import COMPILE_COUNTS

# What refers to them, and its own fields in the order of a record.
_REFERRING = {
    "trial": (schema.trials, FIELDS),
    "portfolio": (schema.portfolios, ("rule", "created_at")),
    "compile_facts": (schema.compile_facts, ("form", *COMPILE_COUNTS, "loop", "created_at")),
    "prediction": (schema.predictions, ("predicted_us", "model", "created_at")),
}
# They come by these and then by time, so that a new trial is a line among its like.
_ORDER = {
    "kernel": schema.kernels.c.digest,
    "variant": by_code_point(schema.variants.c.name),
    "workload": schema.workloads.c.digest,
}
_JSON_FIELDS = ("samples_us", "rule", "loop")
Extras = dict[str, list[dict[str, Any]]]
_NO_EXTRAS: list[dict[str, Any]] = [{}]
# The indexes of a million trials are 190 MiB, and rows come in no order of theirs; taken only as far as it is needed,
# and given back with the connection. At 300,000 trials 5 % faster than with the usual cache.
BULK_CACHE_KIB = 262144
_ENCODER = json.JSONEncoder()
_SCAN: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # typeshed leaves it out


def records(store: Store) -> Iterator[tuple[str, Record]]:
    """(name, record) of everything in the database, shared things before what names them."""
    with store.reading() as connection:
        extras = _extras(connection)
        for kind in codec.SHARED:
            yield from _shared_records(connection, kind, extras)
        for kind, (table, fields) in _REFERRING.items():
            yield from _referring_records(connection, kind, table, fields, extras)
        for record in sorted(extras.get("", []), key=_of_newer):
            yield f"record {record.get('record')!r} of a newer pagegen", record


def _of_newer(record: Record) -> tuple[int, str]:
    """The order of records of a newer pagegen: what others name comes first."""
    kind = record.get("record")
    shared = list(codec.SHARED)
    return shared.index(kind) if kind in shared else len(shared), json.dumps(record, sort_keys=True)


def _extras(connection: sa.Connection) -> Extras:
    """What a newer pagegen wrote, by the digest of the row it belongs to: fields beside it, and further sets of fields
    where several wrote one differently. Whole records stand under ""."""
    found: Extras = {}
    for row in connection.execute(sa.select(schema.extras).order_by(schema.extras.c.digest)):
        sets = found.setdefault(row.owner, [])
        value = _loads(row.value)
        if not row.owner:
            sets.append(value if isinstance(value, dict) else {"record": row.record, "damaged": value})
            continue
        free = next((fields for fields in sets if row.field not in fields), None)
        if free is None:
            sets.append({row.field: value})
        else:
            free[row.field] = value
    return found


def _streamed(connection: sa.Connection, statement: sa.Select[Any]) -> sa.CursorResult[Any]:
    return connection.execute(statement.execution_options(yield_per=2000))


def _shared_records(connection: sa.Connection, kind: str, extras: Extras) -> Iterator[tuple[str, Record]]:
    table = schema.metadata.tables[f"{kind}s"]
    for row in _streamed(connection, sa.select(table.c.id, table.c.digest, table.c.data).order_by(table.c.digest)):
        body = _loads(row.data)
        known = body if isinstance(body, dict) else {"damaged": body}
        record = {"record": kind, "v": keys.VERSION, "id": row.digest[:ID_LENGTH], **known}
        for more in extras.get(row.digest, _NO_EXTRAS):
            yield f"{kind} {row.id}", {**more, **record}


def _referring_records(
    connection: sa.Connection, kind: str, table: sa.Table, fields: tuple[str, ...], extras: Extras
) -> Iterator[tuple[str, Record]]:
    kinds = schema.parents(table)
    statement = sa.select(
        table.c.id, table.c.digest, *(table.c[field] for field in fields), *queries.of_parents(table, "digest")
    ).select_from(queries.joined(table))
    order = [column for parent, column in _ORDER.items() if parent in kinds]
    for row in _streamed(connection, statement.order_by(*order, by_code_point(table.c.created_at), table.c.digest)):
        named = {kind: getattr(row, kind)[:ID_LENGTH] for kind in kinds}
        own = {
            field: _loads(getattr(row, field)) if field in _JSON_FIELDS else _plain(getattr(row, field))
            for field in fields
        }
        record = {"record": kind, "v": keys.VERSION, **named, **own}
        for more in extras.get(row.digest, _NO_EXTRAS):
            yield f"{kind.replace('_', ' ')} {row.id}", {**more, **record}


def with_parents(
    connection: sa.Connection, kind: str, where: sa.ColumnElement[bool], seen: dict[str, str]
) -> Iterator[tuple[str, Record]]:
    """The rows of a kind that match, in the order of their numbers, each with what it names before it. `seen` maps what
    was told already to its id."""
    table, fields = _REFERRING[kind]
    kinds = schema.parents(table)
    statement = sa.select(
        table.c.id, *(table.c[field] for field in fields), *queries.of_parents(table, "data")
    ).select_from(queries.joined(table))
    for row in _streamed(connection, statement.where(where).order_by(table.c.id)):
        for parent in kinds:
            text = getattr(row, parent)
            body = _loads(text)
            if text not in seen and isinstance(body, dict):
                seen[text] = keys.digest(text)[:ID_LENGTH]
                yield parent, {"record": parent, **body, "id": seen[text]}
        named = {parent: seen.get(getattr(row, parent), "") for parent in kinds}
        own = {field: _loads(getattr(row, field)) if field in _JSON_FIELDS else getattr(row, field) for field in fields}
        yield f"{kind} {row.id}", {"record": kind, "v": keys.VERSION, **named, **own}


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return _plain(text)  # damaged: carried as it is, so that whoever reads it can say so


def _plain(value: Any) -> Any:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def export(store: Store, path: Path) -> int:
    """Writes every record to `path`, one a line, and returns how many. The file appears whole or not at all."""
    count = 0
    with whole_file(path) as file:
        for _, record in records(store):
            file.write(_ENCODER.encode(record) + "\n")
            count += 1
    return count


def absorb(store: Store, named_records: Iterable[tuple[str, Any]]) -> TransferReport:
    """Adds records in one transaction; what cannot be read or cannot be true is named and left out."""
    with store.writing() as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql(f"PRAGMA cache_size=-{BULK_CACHE_KIB}")
        absorber = Absorber(connection)
        for name, record in named_records:
            absorber.take(name, record)
        return absorber.report()


def lines(file: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """("line 7", the JSON value of that line, the text that is none, or what is wrong with its bytes) of every line
    that is not blank."""
    for number, line in enumerate(file, 1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            yield f"line {number}", error
            continue
        if text:
            yield f"line {number}", _value(text)


def _value(text: str) -> Any:
    """`_loads` of a stripped text: the scanner alone, without what the decoder does about blanks around it."""
    try:
        value, end = _SCAN(text, 0)
    except (StopIteration, ValueError, RecursionError):
        return text
    return value if end == len(text) else text
