"""Export, import and merge: one stream of records, so that all three agree.

A record is one JSON object: what trials share comes first, each under an `id`, and trials and portfolios name the ids.
A file has one record a line in an order that depends on the content alone, so two files of the same database are the
same bytes and a new trial is one new line. Adding records is a union by content: it commutes and may be repeated.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from pagegen.db import codec, queries
from pagegen.db.engine import Store
from pagegen.db.queries import UNDECODABLE
from pagegen.db.rows import Writer
from pagegen.db.schema import devices, environments, kernels, portfolios, profiles, trials, variants, workloads

Record = dict[str, Any]
_ID_LENGTH = 16  # hex digits of a digest: 64 bits, readable and unique within a file

# kind -> (table, its fields beside record, v and id)
_SHARED: dict[str, tuple[sa.Table, tuple[str, ...]]] = {
    "kernel": (kernels, ("spec", "layout", "target", "code_hash")),
    "device": (devices, ("device",)),
    "environment": (environments, ("environment",)),
    "variant": (variants, ("variant",)),
    "workload": (workloads, ("workload",)),
    "profile": (profiles, ("profile",)),
}
_TRIAL_PARENTS = ("kernel", "device", "environment", "variant", "workload")
_PORTFOLIO_PARENTS = ("kernel", "device", "profile")
_TRIAL_FIELDS = ("regime", "status", "samples_us", "max_error", "detail", "created_at")
_DECODE: dict[str, Callable[[str], Any]] = {
    "kernel": codec.kernel_from,
    "device": codec.device_from,
    "environment": codec.environment_from,
    "variant": codec.variant_from,
    "workload": codec.workload_from,
    "profile": codec.profile_from,
}


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """What came of an import or merge. `malformed` names every record that could not be read, by its line;
    `ignored` names what a newer pagegen wrote beside what this one knows."""

    added: int = 0
    present: int = 0
    malformed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


# --- out --------------------------------------------------------------------------------------------------


def records(store: Store) -> Iterator[tuple[str, Record]]:
    """(name, record) of everything in the database, shared things before what names them."""
    with store.reading() as connection:
        for kind, (table, _) in _SHARED.items():
            yield from _shared_records(connection, kind, table)
        yield from _trial_records(connection)
        yield from _portfolio_records(connection)


def _shared_records(connection: sa.Connection, kind: str, table: sa.Table) -> Iterator[tuple[str, Record]]:
    for row in connection.execute(sa.select(table.c.id, table.c.digest, table.c.data).order_by(table.c.digest)):
        body = _loads(row.data)
        known = body if isinstance(body, dict) else {"damaged": body}
        yield f"{kind} {row.id}", {"record": kind, "v": codec.VERSION, "id": row.digest[:_ID_LENGTH], **known}


def _trial_records(connection: sa.Connection) -> Iterator[tuple[str, Record]]:
    parents = [_SHARED[kind][0].c.digest.label(kind) for kind in _TRIAL_PARENTS]
    columns = (trials.c.id, *(trials.c[name] for name in _TRIAL_FIELDS), *parents)
    order = (kernels.c.digest, variants.c.name, workloads.c.digest, trials.c.created_at, trials.c.digest)
    # order_by(None) drops the statement's own order, by time
    for row in connection.execute(queries.TRIALS.with_only_columns(*columns).order_by(None).order_by(*order)):
        fields = {name: getattr(row, name) for name in _TRIAL_FIELDS}
        record = {"record": "trial", "v": codec.VERSION, **_ids(row, _TRIAL_PARENTS), **fields}
        yield f"trial {row.id}", {**record, "samples_us": _loads(row.samples_us)}


def _portfolio_records(connection: sa.Connection) -> Iterator[tuple[str, Record]]:
    parents = [_SHARED[kind][0].c.digest.label(kind) for kind in _PORTFOLIO_PARENTS]
    columns = (portfolios.c.id, portfolios.c.rule, portfolios.c.created_at, *parents)
    order = (kernels.c.digest, portfolios.c.created_at, portfolios.c.digest)
    for row in connection.execute(queries.PORTFOLIOS.with_only_columns(*columns).order_by(None).order_by(*order)):
        fields = {"rule": _loads(row.rule), "created_at": row.created_at}
        yield (
            f"portfolio {row.id}",
            {"record": "portfolio", "v": codec.VERSION, **_ids(row, _PORTFOLIO_PARENTS), **fields},
        )


def _ids(row: Any, kinds: Iterable[str]) -> dict[str, str]:
    return {kind: getattr(row, kind)[:_ID_LENGTH] for kind in kinds}


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # damaged: carried as it is, so that whoever reads it can say so


def export(store: Store, path: Path) -> int:
    """Writes every record to `path`, one a line, and returns how many. The file appears whole or not at all."""
    handle, scratch = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        count = 0
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            for _, record in records(store):
                file.write(json.dumps(record) + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)  # mkstemp makes it private, and this is a file to share
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    return count


# --- in ---------------------------------------------------------------------------------------------------


@dataclass
class _Absorber:
    """Reads records in order and adds them through one writer."""

    writer: Writer
    known: dict[tuple[str, str], Any] = field(default_factory=dict)
    added: int = 0
    present: int = 0
    malformed: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def take(self, name: str, record: Any) -> None:
        try:
            self._take(name, record)
        except UNDECODABLE as error:
            what = f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            self.malformed.append(f"{name}: {what}")

    def _take(self, name: str, record: Any) -> None:
        if not isinstance(record, dict) or "record" not in record:
            raise ValueError('a record must be a JSON object with a field "record"')
        if record.get("v") != codec.VERSION:
            raise ValueError(f"a record must have version {codec.VERSION}, got {record.get('v')!r}")
        kind = record["record"]
        if kind in _SHARED:
            self._note_unknown(name, record, ("id", *_SHARED[kind][1]))
            self._define(kind, record)
        elif kind == "trial":
            self._note_unknown(name, record, _TRIAL_PARENTS + _TRIAL_FIELDS)
            parents = [self._named(parent, record) for parent in _TRIAL_PARENTS]
            kernel, device, environment, variant, workload = parents
            trial = codec.trial_from(record, kernel, device, environment, variant, workload)
            self._count(self.writer.add_trial(trial))
        elif kind == "portfolio":
            self._note_unknown(name, record, (*_PORTFOLIO_PARENTS, "rule", "created_at"))
            kernel, device, profile = (self._named(parent, record) for parent in _PORTFOLIO_PARENTS)
            rule = codec.rule_from(json.dumps(record["rule"]))
            row = codec.kernel_row(*kernel)
            self._count(self.writer.add_portfolio(row, device, profile, rule, record["created_at"]))
        else:
            self.ignored.append(f"{name}: unknown record {kind!r}")

    def _note_unknown(self, name: str, record: Record, fields: tuple[str, ...]) -> None:
        unknown = sorted(set(record) - {"record", "v", *fields})
        if unknown:
            self.ignored.append(f"{name}: unknown field {', '.join(unknown)}")

    def _define(self, kind: str, record: Record) -> None:
        value = _DECODE[kind](json.dumps({"v": record["v"], **{f: record[f] for f in _SHARED[kind][1]}}))
        known = self.known.setdefault((kind, record["id"]), value)
        if known != value:
            raise ValueError(f"{kind} {record['id']} is defined twice, differently")
        if kind == "profile":  # a profile stands for itself; the others come with what names them
            self._count(self.writer.add_profile(value))

    def _named(self, kind: str, record: Record) -> Any:
        if (kind, record[kind]) not in self.known:
            raise ValueError(f"it names {kind} {record[kind]}, which no record before it defines")
        return self.known[kind, record[kind]]

    def _count(self, added: bool) -> None:
        self.added += added
        self.present += not added


def absorb(store: Store, named_records: Iterable[tuple[str, Any]]) -> TransferReport:
    """Adds records in one transaction; what cannot be read is named and left out."""
    with store.writing() as connection:
        absorber = _Absorber(Writer(connection))
        for name, record in named_records:
            absorber.take(name, record)
    return TransferReport(
        added=absorber.added,
        present=absorber.present,
        malformed=tuple(absorber.malformed),
        ignored=tuple(absorber.ignored),
    )


def lines(path: Path) -> Iterator[tuple[str, Any]]:
    """("line 7", the JSON value of that line or the text that is none) of every line of a file that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _loads(line.decode("utf-8", "replace"))
