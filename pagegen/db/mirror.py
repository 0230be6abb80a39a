"""A local copy of what serving reads from a server: a file that answers while the server is down.

It holds the portfolios, what compilers said of their kernels, and the ok trials of the variants that the portfolios
choose, on the portfolios' devices: all that an answer about a device rests on, and a small part of all trials. A pull
reads what came since the last one: writers queue on the server, so that rows are committed in the order of their
numbers. The file appears whole or not at all, and is read only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from pagegen import settings
from pagegen.db import codec, dates, schema, sqlite, transfer
from pagegen.db.engine import Store
from pagegen.db.errors import DamagedDatabase, DatabaseError, MissingDatabase, NewerSchema, OlderSchema
from pagegen.db.places import place_of
from pagegen.db.queries import UNDECODABLE
from pagegen.spec import Status, Target

log = logging.getLogger(__name__)
_LOGGED: set[str] = set()
# (kernel, device's identity) -> the variants chosen there, by digest
Chosen = dict[tuple[int, str], set[str]]
_COUNTED = (schema.portfolios, schema.compile_facts, schema.trials)


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """What came of a pull: the file, how many records came, how many portfolios and trials it holds now, and whether it
    read only what was new."""

    path: str
    added: int
    portfolios: int
    trials: int
    incremental: bool


def place_for(url: str) -> Path:
    """Where the mirror of a server's database lies unless another place is named: in the user's data folder. Who logs
    in and how makes no other database."""
    place = place_of(url)
    if place.url is None:
        raise ValueError(f"url must be of a server, got {place.name}: a file needs no mirror")
    where = {name: place.url.query.get(name) for name in ("host", "port", "service", "dbname")}
    named = [place.url.host, place.url.port, place.url.database, where]
    name = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
    return Path(settings.own_database()).parent / "mirrors" / f"{name}.db"


def pull(url: str, path: Path | None = None, *, target: Target | None = None, anew: bool = False) -> Pulled:
    """Makes or renews the mirror of a server's database at `path` (see `place_for`), of one target or of all. It reads
    what came since; everything with `anew`, and where the mirror is of another database or target, or rows were removed
    since.

    Raises ValueError for a URL of no server and where a database that is no mirror lies at `path`, a DatabaseError for
    a server that does not answer, in which case the mirror stays as it was.
    """
    default = place_for(url)
    path = default if path is None else path.expanduser().resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = None if anew else _kept(path)
    if kept is None:
        _refuse_others(path)
    source = Store(url, read_only=True)
    try:
        return source.ask(lambda connection: _pulled(connection, source.name, path, target, kept))
    finally:
        source.close()


def instead_of(url: str | os.PathLike[str], error: DatabaseError) -> tuple[Store, str] | None:
    """The mirror of a server that does not answer, opened, and what to tell people, which is logged once; None where
    there is none that can be read."""
    path = place_for(str(url))
    about = _kept(path)
    if about is None:
        return None
    note = f"{error}; its mirror of {about.get('pulled_at', 'no date')} answers"
    if str(path) not in _LOGGED:
        _LOGGED.add(str(path))
        log.warning("%s", note)
    return Store(str(path), read_only=True), note


def _kept(path: Path) -> dict[str, str] | None:
    """What the mirror at `path` says of itself; None where there is none of this version."""
    if not path.exists():
        return None
    try:
        store = Store(str(path), read_only=True)
    except DatabaseError:
        return None
    with store.reading() as connection:
        return _told(connection)


def _told(connection: sa.Connection) -> dict[str, str] | None:
    if not sa.inspect(connection).has_table(schema.mirror.name):
        return None
    return {str(row.name): str(row.value) for row in connection.execute(sa.select(schema.mirror))}


def _refuse_others(path: Path) -> None:
    """Raises ValueError where a file lies that is no mirror and not empty."""
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        store = Store(str(path), read_only=True)
        with store.reading() as connection:
            held = any(connection.execute(sa.select(table.c.id).limit(1)).first() for table in _COUNTED)
            if not held or _told(connection) is not None:
                return
    except DamagedDatabase:
        if sqlite.is_ours(path):
            return
    except MissingDatabase:
        return
    except (OlderSchema, NewerSchema):
        with contextlib.closing(sqlite.connect(sqlite.uri(path, read_only=True))) as connection:
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (schema.mirror.name,)).fetchone():
                return
    except DatabaseError:
        pass
    raise ValueError(f"{path} is no mirror, and would be overwritten: name another file")


def _pulled(
    connection: sa.Connection, name: str, path: Path, target: Target | None, kept: dict[str, str] | None
) -> Pulled:
    portfolios = _of_target(schema.portfolios, target)
    count = int(connection.execute(sa.select(sa.func.count()).select_from(portfolios.subquery())).scalar_one())
    about = {"source": name, "target": str(target or ""), "pulled_at": dates.now()}
    since = _since(connection, kept, about)
    marks = {table.name: _mark(connection, table) for table in _COUNTED}
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:200]}.", suffix=".tmp")
    os.close(handle)
    try:
        if since is not None:
            shutil.copyfile(path, scratch)
        found = _filled(connection, scratch, {**about, **marks}, target, since or {})
        if since is not None and found[1] != count:  # rows were removed there
            return _pulled(connection, name, path, target, None)
        _settle(Path(scratch), path)
    finally:
        for left in (scratch, f"{scratch}-wal", f"{scratch}-shm", f"{scratch}-journal"):
            Path(left).unlink(missing_ok=True)
    return Pulled(path=str(path), added=found[0], portfolios=found[1], trials=found[2], incremental=since is not None)


def _mark(connection: sa.Connection, table: sa.Table) -> str:
    """The last row of a table, by number and digest."""
    row = connection.execute(sa.select(table.c.id, table.c.digest).order_by(table.c.id.desc()).limit(1)).first()
    return f"{row.id} {row.digest}" if row else "0 "


def _since(connection: sa.Connection, kept: dict[str, str] | None, about: dict[str, str]) -> dict[str, int] | None:
    """The number of the last row that the mirror has seen, by table; None where it is of another database or target, or
    the server's rows were numbered anew."""
    if kept is None or (kept.get("source"), kept.get("target")) != (about["source"], about["target"]):
        return None
    numbers = {}
    for table in _COUNTED:
        number, digest = kept.get(table.name, "0 ").split(" ")
        numbers[table.name] = int(number)
        there = sa.select(table.c.digest).where(table.c.id == int(number))
        if digest and connection.execute(there).scalar() != digest:
            return None
    return numbers


def _filled(
    connection: sa.Connection, scratch: str, about: dict[str, str], target: Target | None, since: dict[str, int]
) -> tuple[int, int, int]:
    """Writes what is new into the file: (records added, portfolios there, trials there)."""
    made = Store(scratch, keeps_mirror=True)
    try:
        report = transfer.absorb(made, _new_records(connection, target, since))
        with made.writing() as own:
            schema.mirror.create(own, checkfirst=True)
            own.execute(schema.mirror.delete())
            own.execute(schema.mirror.insert(), [{"name": name, "value": value} for name, value in about.items()])
            counts = [
                int(own.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())
                for table in (schema.portfolios, schema.trials)
            ]
    finally:
        made.close()
    return report.added, counts[0], counts[1]


def _settle(scratch: Path, path: Path) -> None:
    """Puts the file in place: one file that needs no other, on the disk before it is seen."""
    connection = sqlite.connect(sqlite.uri(scratch, read_only=False))
    connection.execute("PRAGMA journal_mode=delete")
    connection.close()
    with scratch.open("rb") as file:
        os.fsync(file.fileno())
    scratch.chmod(0o644)
    scratch.replace(path)


def _of_target(table: sa.Table, target: Target | None) -> sa.Select[Any]:
    """The numbers of a table's rows, of one target or of all."""
    statement = sa.select(table.c.id)
    if target is None:
        return statement
    return statement.join(schema.kernels, table.c.kernel_id == schema.kernels.c.id).where(
        schema.kernels.c.target == str(target)
    )


def _new_records(
    connection: sa.Connection, target: Target | None, since: dict[str, int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    seen: dict[str, str] = {}
    for kind, table in (("portfolio", schema.portfolios), ("compile_facts", schema.compile_facts)):
        new = table.c.id.in_(_of_target(table, target).where(table.c.id > since.get(table.name, 0)))
        yield from transfer.with_parents(connection, kind, new, seen)
    last = since.get(schema.portfolios.name, 0)
    known, new_ones = _chosen(connection, target, last)
    for (kernel, identity), variants in new_ones.items():
        yield from transfer.with_parents(connection, "trial", _trials_of(kernel, identity, variants), seen)
    if known:  # what came since of what was chosen before
        newer = schema.trials.c.id > since[schema.trials.name]
        for (kernel, identity), variants in _touched(connection, known, newer).items():
            yield from transfer.with_parents(connection, "trial", _trials_of(kernel, identity, variants) & newer, seen)


def _chosen(connection: sa.Connection, target: Target | None, last: int) -> tuple[Chosen, Chosen]:
    """What portfolios choose: those up to number `last`, and the newer ones, less what those before chose already."""
    statement = sa.select(
        schema.portfolios.c.id, schema.portfolios.c.kernel_id, schema.portfolios.c.rule, schema.devices.c.identity
    ).join(schema.devices, schema.portfolios.c.device_id == schema.devices.c.id)
    statement = statement.where(schema.portfolios.c.id.in_(_of_target(schema.portfolios, target)))
    known: Chosen = defaultdict(set)
    new: Chosen = defaultdict(set)
    for row in connection.execute(statement.order_by(schema.portfolios.c.id)):
        try:
            variants = {codec.variant_row(variant)["digest"] for variant in codec.rule_from(row.rule).variants}
        except UNDECODABLE:
            continue
        at = (row.kernel_id, row.identity)
        (known if row.id <= last else new)[at] |= variants - known[at]
    return {at: v for at, v in known.items() if v}, {at: v for at, v in new.items() if v}


def _trials_of(kernel: int, identity: str, variants: set[str]) -> sa.ColumnElement[bool]:
    trials, devices, of = schema.trials, schema.devices, schema.variants
    return sa.and_(
        trials.c.kernel_id == kernel,
        trials.c.device_id.in_(sa.select(devices.c.id).where(devices.c.identity == identity)),
        trials.c.variant_id.in_(sa.select(of.c.id).where(of.c.digest.in_(sorted(variants)))),
        trials.c.status == Status.OK.value,
    )


def _touched(connection: sa.Connection, known: Chosen, newer: sa.ColumnElement[bool]) -> Chosen:
    """Those of the kernels and devices that have newer trials."""
    statement = sa.select(schema.trials.c.kernel_id, schema.devices.c.identity).distinct()
    statement = statement.join(schema.devices, schema.trials.c.device_id == schema.devices.c.id).where(newer)
    found = {(row.kernel_id, row.identity) for row in connection.execute(statement)}
    return {at: variants for at, variants in known.items() if at in found}
