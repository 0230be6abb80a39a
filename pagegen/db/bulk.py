"""Many trials at once: rows made straight from records, written in batches.

A measurement made of every record and three statements a row took 0.7 ms a trial; this takes a twentieth. What it
writes is what `rows.Writer` writes: `tests/db/test_bulk.py` compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

import sqlalchemy as sa

from pagegen.db import codec, keys, schema
from pagegen.db.plausible import Bounds, absurdities, bounds
from pagegen.spec import Status, Target, check
from pagegen.spec.result import REGIMES

# Rows a statement: larger ones gain nothing, and a look-up of as many keys stays under SQLite's 32,766 parameters.
BATCH = 4000
PARENTS = ("kernel", "device", "environment", "variant", "workload")
FIELDS = ("regime", "status", "samples_us", "max_error", "detail", "created_at")
STATUSES = frozenset(status.value for status in Status)
_OK = Status.OK.value
_NUMBERS = {float, int}
_FAR = 1e300  # what a float holds of integers, and far more than any time
_COLUMNS = ("digest", "key", "regime", "status", "median_us", "samples_us", "max_error", "detail", "created_at")


class Shared:
    """A thing that trials share, as a record defined it: its value and its row. `identity` is what enters a trial's
    key: a device and an environment by what they are, the others by their digest. `id` is the row's number in the
    database, once something that is stored names it."""

    __slots__ = ("digest", "id", "identity", "kind", "row", "value")

    def __init__(self, kind: str, value: Any, row: codec.Row) -> None:
        self.kind = kind
        self.value = value
        self.row = row
        self.digest: str = row["digest"]
        self.identity = str(row.get("identity", self.digest))
        self.id: int | None = None


@dataclass
class TrialBatch:
    """Trials on their way in. `added` and `present` count those that were new and those that were not; `shared_keys`
    are the keys under which there were trials before and new ones came."""

    connection: sa.Connection
    added: int = 0
    present: int = 0
    shared_keys: set[str] = field(default_factory=set)
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _parents: list[tuple[Shared, ...]] = field(default_factory=list)
    _bounds: dict[tuple[str, str, str], Bounds] = field(default_factory=dict)
    _was_empty: bool | None = None

    def add(self, record: Mapping[str, Any], parents: tuple[Shared, ...]) -> str:
        """Takes a trial's record, its parents in the order of PARENTS; returns its digest. Raises ValueError, TypeError
        or KeyError for what is no trial or cannot be true."""
        samples, error = _checked(record)
        regime, status, detail, created_at = record["regime"], record["status"], record["detail"], record["created_at"]
        detail = codec.storable(detail) if detail else ""
        kernel, device, environment, variant, workload = parents
        _check_parents(kernel, device, variant)
        median_us = None
        if samples:
            ordered = sorted(samples)
            half = len(ordered) // 2
            median_us = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
            limits = self._limits(kernel, device, workload)
            if not (limits.roofline_us < median_us and ordered[-1] < limits.most_us):  # seldom: says why, or nothing
                wrong = absurdities(median_us, ordered[-1], regime, limits, device.value.name)
                if wrong:
                    raise ValueError("; ".join(wrong))
        texts = f"[{','.join(map(repr, samples))}]"
        # canonical JSON, as `keys.canonical` writes it: sorted, without spaces
        digest = sha256(
            f'{{"created_at":{quoted(created_at)},"detail":{quoted(detail)},"device":"{device.digest}",'
            f'"environment":"{environment.digest}","kernel":"{kernel.digest}",'
            f'"max_error":{"null" if error is None else quoted(error)},"regime":{quoted(regime)},"samples_us":{texts},'
            f'"status":"{status}","v":{keys.VERSION},"variant":"{variant.digest}","workload":"{workload.digest}"}}'.encode()
        ).hexdigest()
        # as `keys.key_of`
        key = sha256(
            f'{{"device":"{device.identity}","environment":"{environment.identity}","kernel":"{kernel.identity}",'
            f'"regime":{quoted(regime)},"v":{keys.KEY_VERSION},"variant":"{variant.identity}",'
            f'"workload":"{workload.identity}"}}'.encode()
        ).hexdigest()
        self._rows.append((digest, key, regime, status, median_us, texts, error, detail, created_at))
        self._parents.append(parents)
        return digest

    @property
    def is_full(self) -> bool:
        """Whether a batch is waiting, which is for `flush`."""
        return len(self._rows) >= BATCH

    def flush(self) -> None:
        """Writes what is waiting."""
        rows, self._rows = self._rows, []
        parents, self._parents = self._parents, []
        if not rows:
            return
        number_all(self.connection, {id(one): one for group in parents for one in group}.values())
        connection, table = self.connection, schema.trials
        if self._was_empty is None:
            self._was_empty = connection.execute(sa.select(table.c.id).limit(1)).first() is None
        shared: set[str] = set()
        if not self._was_empty:
            known = sa.select(table.c.key).where(table.c.key.in_({row[1] for row in rows})).distinct()
            shared = set(connection.execute(known).scalars())
        columns = (*_COLUMNS, *(f"{kind}_id" for kind in PARENTS))
        values = [(*row, *[one.id for one in group]) for row, group in zip(rows, parents, strict=True)]
        added = insert_new(connection, table, columns, values)
        self.added += added
        self.present += len(rows) - added
        if added:
            self.shared_keys |= shared

    def _limits(self, kernel: Shared, device: Shared, workload: Shared) -> Bounds:
        digests = (kernel.digest, device.digest, workload.digest)
        found = self._bounds.get(digests)
        if found is None:
            spec, layout = kernel.value[:2]
            found = self._bounds[digests] = bounds(spec, layout, device.value, workload.value)
        return found


def number_all(connection: sa.Connection, things: Iterable[Shared]) -> None:
    """Gives shared things the numbers of their rows, which are added where they are new."""
    by_kind: dict[str, dict[str, list[Shared]]] = {}
    for one in things:
        if one.id is None:
            by_kind.setdefault(one.kind, {}).setdefault(one.digest, []).append(one)
    for kind, wanted in by_kind.items():
        table = schema.metadata.tables[f"{kind}s"]
        digests = sorted(wanted)
        for first in range(0, len(digests), BATCH):
            chunk = digests[first : first + BATCH]
            numbers = _numbers(connection, table, chunk)
            new = [wanted[digest][0].row for digest in chunk if digest not in numbers]
            if new:
                columns = tuple(name for name in new[0] if name in table.c)
                insert_new(connection, table, columns, [tuple(row[name] for name in columns) for row in new])
                numbers = _numbers(connection, table, chunk)
            for digest in chunk:
                for one in wanted[digest]:
                    one.id = numbers[digest]


def _numbers(connection: sa.Connection, table: sa.Table, digests: list[str]) -> dict[str, int]:
    statement = sa.select(table.c.digest, table.c.id).where(table.c.digest.in_(digests))
    return {digest: number for digest, number in connection.execute(statement)}


def insert_new(
    connection: sa.Connection, table: sa.Table, columns: tuple[str, ...], rows: list[tuple[Any, ...]]
) -> int:
    """Inserts rows, leaving existing ones of the same digest alone; returns how many were new. Straight to the driver:
    SQLAlchemy's own handling of parameters took as long as the insert."""
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    names = ", ".join(connection.dialect.identifier_preparer.quote(name) for name in columns)
    statement = (
        f"INSERT INTO {table.name} ({names}) VALUES ({', '.join([mark] * len(columns))}) "
        "ON CONFLICT (digest) DO NOTHING"
    )
    return int(connection.exec_driver_sql(statement, rows).rowcount)


def _checked(record: Mapping[str, Any]) -> tuple[list[float], str | None]:
    """A trial's samples and largest error as they are stored, when all of its own fields are as they must be."""
    status, samples, error = record["status"], record["samples_us"], record["max_error"]
    if not isinstance(status, str) or status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(sorted(STATUSES))}, got {status!r}")
    if not isinstance(samples, list):
        raise TypeError(f"samples_us must be a list, got {type(samples).__name__}")
    if samples and not ({*map(type, samples)} <= _NUMBERS and min(samples) > 0 and sum(samples) < _FAR):
        _refuse_samples(samples)
    if bool(samples) != (status == _OK):
        expected = "at least one sample" if status == _OK else "no samples"
        raise ValueError(f"samples_us must have {expected} for a trial that ended {status}, got {len(samples)}")
    if record["regime"] not in REGIMES:
        check.one_of("regime", record["regime"], REGIMES)
    check.instance("detail", record["detail"], str)
    check.timestamp("created_at", record["created_at"])
    if error is not None:
        if not isinstance(error, str):
            raise TypeError(f"max_error must be text, got {type(error).__name__} {error!r}")
        error = repr(float(error))
    return list(map(float, samples)), error


def _check_parents(kernel: Shared, device: Shared, variant: Shared) -> None:
    """As a `Measurement` judges them."""
    target: Target = kernel.value[2]
    if device.value.target != target:
        raise ValueError(f"device must be of the target {target}, got one of {device.value.target}")
    if variant.value.family != target.family:
        raise ValueError(f"variant must be of the family {target.family} for {target}, got {variant.value.name}")


def _refuse_samples(samples: list[Any]) -> None:
    """Raises for the first sample that is none; a NaN is not below infinity, nor is its sum."""
    for us in samples:
        if isinstance(us, bool) or not isinstance(us, (int, float)):
            raise TypeError(f"samples_us must be a number, got {type(us).__name__} {us!r}")
        if not 0 < us < _FAR:
            raise ValueError(f"samples_us must be positive and finite for an ok trial, got {us!r}")
