"""Export, import and merge: one stream of records, so that all three agree.

A record is one JSON object: what trials share comes first, each under an `id`, and the others name the ids. A file has
one record a line in an order that depends on the content alone, so two files of the same database are the same bytes
and a new trial is one new line. Adding records is a union by content: it commutes, associates and may be repeated.
Fields and records that this version does not know are kept beside what it does, and come out again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import sqlalchemy as sa

from pagegen.db import codec, schema
from pagegen.db.absorbing import Absorber, Record, TransferReport
from pagegen.db.bulk import FIELDS, PARENTS
from pagegen.db.engine import Store
from pagegen.spec.result import COMPILE_COUNTS

_ID_LENGTH = 16  # hex digits of a digest: 64 bits, readable and unique within a file
_SHARED = ("kernel", "device", "environment", "variant", "workload", "profile")
_PORTFOLIO_PARENTS = ("kernel", "device", "profile")
_FACTS_PARENTS = ("kernel", "variant", "environment")
_PREDICTION_PARENTS = ("kernel", "device", "variant", "workload")
# The indexes of a million trials are 190 MiB, and rows come in no order of theirs; taken only as far as it is needed,
# and given back with the connection. At 300,000 trials 5 % faster than with the usual cache.
BULK_CACHE_KIB = 262144
_ENCODER = json.JSONEncoder()
_SCAN: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # typeshed leaves it out


def records(store: Store) -> Iterator[tuple[str, Record]]:
    """(name, record) of everything in the database, shared things before what names them."""
    with store.reading() as connection:
        extras = _extras(connection)
        for kind in _SHARED:
            yield from _shared_records(connection, kind, extras)
        yield from _trial_records(connection, extras)
        yield from _portfolio_records(connection, extras)
        yield from _facts_records(connection, extras)
        yield from _prediction_records(connection, extras)
        for record in sorted(extras.get("", {}).values(), key=lambda r: json.dumps(r, sort_keys=True)):
            yield f"record {record.get('record')!r} of a newer pagegen", record


def _extras(connection: sa.Connection) -> dict[str, dict[str, Any]]:
    """What a newer pagegen wrote, by the digest of the row it belongs to and the field; whole records under ""."""
    found: dict[str, dict[str, Any]] = {}
    for row in connection.execute(sa.select(schema.extras).order_by(schema.extras.c.digest)):
        name = row.field if row.owner else row.digest
        found.setdefault(row.owner, {})[name] = _loads(row.value)
    return found


def _streamed(connection: sa.Connection, statement: sa.Select[Any]) -> sa.CursorResult[Any]:
    return connection.execute(statement.execution_options(yield_per=2000))


def _shared_records(
    connection: sa.Connection, kind: str, extras: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Record]]:
    table = schema.metadata.tables[f"{kind}s"]
    for row in _streamed(connection, sa.select(table.c.id, table.c.digest, table.c.data).order_by(table.c.digest)):
        body = _loads(row.data)
        known = body if isinstance(body, dict) else {"damaged": body}
        record = {"record": kind, "v": codec.VERSION, "id": row.digest[:_ID_LENGTH], **known}
        yield f"{kind} {row.id}", {**extras.get(row.digest, {}), **record}


def _named(table: sa.Table, kinds: Iterable[str], *columns: Any) -> sa.Select[Any]:
    """Rows of a table with the digests of what they name; kernel, then the rest of the digest, decide the order."""
    parents = {kind: schema.metadata.tables[f"{kind}s"] for kind in kinds}
    source: Any = table
    for kind, parent in parents.items():
        source = source.join(parent, table.c[f"{kind}_id"] == parent.c.id)
    digests = [parent.c.digest.label(kind) for kind, parent in parents.items()]
    return sa.select(table.c.id, table.c.digest, *columns, *digests).select_from(source)


def _trial_records(connection: sa.Connection, extras: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Record]]:
    trials = schema.trials
    order = (
        schema.kernels.c.digest, schema.variants.c.name, schema.workloads.c.digest, trials.c.created_at, trials.c.digest
    )  # fmt: skip
    statement = _named(trials, PARENTS, *(trials.c[name] for name in FIELDS)).order_by(*order)
    for row in _streamed(connection, statement):
        fields = {name: getattr(row, name) for name in FIELDS}
        record = {"record": "trial", "v": codec.VERSION, **_ids(row, PARENTS), **fields}
        yield f"trial {row.id}", {**extras.get(row.digest, {}), **record, "samples_us": _loads(row.samples_us)}


def _portfolio_records(connection: sa.Connection, extras: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Record]]:
    table = schema.portfolios
    order = (schema.kernels.c.digest, table.c.created_at, table.c.digest)
    statement = _named(table, _PORTFOLIO_PARENTS, table.c.rule, table.c.created_at).order_by(*order)
    for row in _streamed(connection, statement):
        record = {"record": "portfolio", "v": codec.VERSION, **_ids(row, _PORTFOLIO_PARENTS)}
        fields = {"rule": _loads(row.rule), "created_at": row.created_at}
        yield f"portfolio {row.id}", {**extras.get(row.digest, {}), **record, **fields}


def _facts_records(connection: sa.Connection, extras: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Record]]:
    table = schema.compile_facts
    columns = [table.c[name] for name in ("form", *COMPILE_COUNTS, "loop", "created_at")]
    order = (schema.kernels.c.digest, schema.variants.c.name, table.c.created_at, table.c.digest)
    for row in _streamed(connection, _named(table, _FACTS_PARENTS, *columns).order_by(*order)):
        record = {"record": "compile_facts", "v": codec.VERSION, **_ids(row, _FACTS_PARENTS), "form": row.form}
        counts = {name: getattr(row, name) for name in COMPILE_COUNTS}
        rest = {"loop": _loads(row.loop), "created_at": row.created_at}
        yield f"compile facts {row.id}", {**extras.get(row.digest, {}), **record, **counts, **rest}


def _prediction_records(connection: sa.Connection, extras: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Record]]:
    table = schema.predictions
    columns = (table.c.predicted_us, table.c.model, table.c.created_at)
    order = (
        schema.kernels.c.digest, schema.variants.c.name, schema.workloads.c.digest, table.c.created_at, table.c.digest
    )  # fmt: skip
    for row in _streamed(connection, _named(table, _PREDICTION_PARENTS, *columns).order_by(*order)):
        record = {"record": "prediction", "v": codec.VERSION, **_ids(row, _PREDICTION_PARENTS)}
        fields = {"predicted_us": row.predicted_us, "model": row.model, "created_at": row.created_at}
        yield f"prediction {row.id}", {**extras.get(row.digest, {}), **record, **fields}


def _ids(row: Any, kinds: Iterable[str]) -> dict[str, str]:
    return {kind: getattr(row, kind)[:_ID_LENGTH] for kind in kinds}


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # damaged: carried as it is, so that whoever reads it can say so


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file to write that appears at `path` whole or not at all."""
    handle, scratch = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)  # mkstemp makes it private, and this is a file to share
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


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


def lines(path: Path) -> Iterator[tuple[str, Any]]:
    """("line 7", the JSON value of that line or the text that is none) of every line of a file that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.decode("utf-8", "replace").strip()
            if text:
                yield f"line {number}", _value(text)


def _value(text: str) -> Any:
    """`_loads` of a stripped text: the scanner alone, without what the decoder does about blanks around it."""
    try:
        value, end = _SCAN(text, 0)
    except (StopIteration, ValueError, RecursionError):
        return text
    return value if end == len(text) else text
