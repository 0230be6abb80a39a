"""`Database`: every trial kept, asked and shared."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from pagegen import settings
from pagegen.db import codec, queries, transfer, upkeep
from pagegen.db.engine import Store
from pagegen.db.queries import Decoder, Portfolio, Undecodable
from pagegen.db.rows import Writer
from pagegen.db.schema import devices, kernels, trials
from pagegen.db.transfer import TransferReport
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    Device,
    DispatchRule,
    Measurement,
    Profile,
    Selection,
    Status,
    Target,
    Variant,
    Workload,
    check,
)

if TYPE_CHECKING:
    from pagegen.db.block_size import BlockSizeRow

log = logging.getLogger(__name__)
T = TypeVar("T")


class Database:
    """A tuning database. Open one with `open_db`; it may be used from several threads and after a fork, and is a
    context manager.

    Every verb is one transaction of its own unless it runs inside `atomic()`. Verbs raise a `DatabaseError` that
    names the database and what to do; only `select` and `best_block_size`'s rules degrade instead.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def __repr__(self) -> str:
        return f"Database({self.name!r}{', read_only=True' if self.read_only else ''})"

    @property
    def name(self) -> str:
        """The file's path, or the URL without its password."""
        return self.store.name

    @property
    def read_only(self) -> bool:
        """Whether writing raises: reading was asked for, or the file or its folder cannot be written."""
        return self.store.read_only

    def close(self) -> None:
        """Releases what the database holds; using it again opens it again."""
        self.store.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def atomic(self) -> Iterator[sa.Connection]:
        """One transaction around several verbs: all of them happen, or none. Nested ones join the outermost."""
        with self.store.writing() as connection:
            yield connection

    # --- recording ------------------------------------------------------------------------------------------

    def record(self, measurement: Measurement) -> bool:
        """Stores a trial, durable when this returns; False when the identical one is there already."""
        check.instance("measurement", measurement, Measurement)
        with self.atomic() as connection:
            return Writer(connection).add_trial(measurement)

    def save_profile(self, profile: Profile) -> bool:
        """Stores a profile; False when the identical one is there already."""
        with self.atomic() as connection:
            return Writer(connection).add_profile(profile)

    def save_portfolio(
        self,
        *,
        spec: AttentionSpec,
        layout: CacheLayout,
        device: Device,
        profile: Profile,
        rule: DispatchRule,
        code_hash: str,
        created_at: str | None = None,
    ) -> bool:
        """Stores the rule that tuning left for a kernel on a device. The newest one is used; older ones stay.

        `created_at` is ISO 8601 in UTC, by default now. False when the newest is this very rule already.
        """
        with self.atomic() as connection:
            kept = self.portfolios(spec=spec, layout=layout, target=device.target, code_hash=code_hash, device=device)
            if created_at is None and kept and (kept[0].rule, kept[0].profile) == (rule, profile):
                return False
            now = created_at or datetime.now(timezone.utc).isoformat(timespec="microseconds")
            kernel = codec.kernel_row(spec, layout, device.target, code_hash)
            return Writer(connection).add_portfolio(kernel, device, profile, rule, now)

    # --- asking ---------------------------------------------------------------------------------------------

    def trials(
        self,
        *,
        spec: AttentionSpec | None = None,
        layout: CacheLayout | None = None,
        target: Target | None = None,
        device: Device | None = None,
        variant: Variant | None = None,
        workload: Workload | None = None,
        status: Status | None = None,
        code_hash: str | None = None,
        regime: str | None = None,
    ) -> list[Measurement]:
        """The trials that match everything given, oldest first, exactly as recorded.

        `device` matches by identity: its measured or nominal rates do not count. Rows that cannot be read are left
        out and logged; `verify` names them.
        """
        statement = queries.of_kernel(queries.TRIALS, spec=spec, layout=layout, target=target, code_hash=code_hash)
        statement = queries.of_trial(
            statement, device=device, variant=variant, workload=workload, status=status, regime=regime
        )
        with self.store.reading() as connection:
            return self._readable(queries.decoded(connection, statement, "trial", Decoder().trial))

    def has_trial(
        self,
        spec: AttentionSpec,
        layout: CacheLayout,
        target: Target,
        device: Device,
        variant: Variant,
        workload: Workload,
        *,
        code_hash: str,
        regime: str = "cold",
    ) -> bool:
        """Whether this was tried, whatever came of it: one look-up by key."""
        key = codec.question_key(spec, layout, target, device, variant, workload, code_hash=code_hash, regime=regime)
        with self.store.reading() as connection:
            return connection.execute(sa.select(trials.c.id).where(trials.c.key == key).limit(1)).first() is not None

    def find(
        self,
        spec: AttentionSpec,
        layout: CacheLayout,
        target: Target,
        device: Device,
        variant: Variant,
        workload: Workload,
        *,
        code_hash: str,
        regime: str = "cold",
    ) -> list[Measurement]:
        """The trials that `has_trial` asks about, oldest first."""
        key = codec.question_key(spec, layout, target, device, variant, workload, code_hash=code_hash, regime=regime)
        with self.store.reading() as connection:
            statement = queries.TRIALS.where(trials.c.key == key)
            return self._readable(queries.decoded(connection, statement, "trial", Decoder().trial))

    def portfolios(
        self,
        *,
        spec: AttentionSpec | None = None,
        layout: CacheLayout | None = None,
        target: Target | None = None,
        code_hash: str | None = None,
        device: Device | None = None,
    ) -> list[Portfolio]:
        """The portfolios that match everything given, newest first; `device` matches by identity."""
        statement = queries.of_kernel(queries.PORTFOLIOS, spec=spec, layout=layout, target=target, code_hash=code_hash)
        statement = queries.of_trial(statement, device=device)
        with self.store.reading() as connection:
            return self._readable(queries.decoded(connection, statement, "portfolio", Decoder().portfolio))

    def portfolio(
        self,
        spec: AttentionSpec,
        layout: CacheLayout,
        target: Target,
        code_hash: str,
        device: Device | None = None,
    ) -> DispatchRule | None:
        """The rule for exactly this kernel, on `device` where given: the newest measured one, else the newest
        predicted one; None when there is none."""
        found = self.portfolios(spec=spec, layout=layout, target=target, code_hash=code_hash, device=device)
        found.sort(key=lambda portfolio: portfolio.rule.evidence.get("kind") != "measured")  # stable: newest first
        return found[0].rule if found else None

    def profiles(self) -> list[Profile]:
        """The stored profiles, by name."""
        statement = queries.PROFILES
        with self.store.reading() as connection:
            return self._readable(
                queries.decoded(connection, statement, "profile", lambda row: codec.profile_from(row.data))
            )

    def measured_layouts(self, spec: AttentionSpec, target: Target, code_hash: str) -> list[CacheLayout]:
        """The layouts that have ok trials for this spec, target and code, smallest block first."""
        columns = (kernels.c.block_size, kernels.c.block_order)
        statement = sa.select(*columns).distinct().join(trials).where(trials.c.status == Status.OK.value)
        statement = queries.of_kernel(statement, spec=spec, target=target, code_hash=code_hash).order_by(*columns)
        with self.store.reading() as connection:
            rows = connection.execute(statement).all()
        return [CacheLayout(block_size=row.block_size, order=row.block_order) for row in rows]

    def measured_devices(self, spec: AttentionSpec, target: Target, code_hash: str) -> list[Device]:
        """The devices with ok trials for this spec, target and code, each once by identity, most trials first."""
        statement = (
            sa.select(devices.c.id, devices.c.identity, devices.c.data, sa.func.count().label("count"))
            .join_from(trials, devices)
            .join(kernels, trials.c.kernel_id == kernels.c.id)
            .where(trials.c.status == Status.OK.value)
            .group_by(devices.c.id, devices.c.identity, devices.c.data)
        )
        statement = queries.of_kernel(statement, spec=spec, target=target, code_hash=code_hash)
        with self.store.reading() as connection:
            found = self._readable(
                queries.decoded(
                    connection, statement, "device", lambda row: (row.identity, row.count, codec.device_from(row.data))
                )
            )
        counts: dict[str, int] = {}
        for identity, count, _ in found:
            counts[identity] = counts.get(identity, 0) + count
        best = {identity: device for identity, _, device in sorted(found, key=lambda f: f[1])}
        return [best[identity] for identity in sorted(counts, key=lambda i: (-counts[i], i))]

    def select(self, spec: AttentionSpec, layout: CacheLayout, target: Target | str, workload: Workload) -> Selection:
        """The variant for one batch, and why; see `pagegen.selection.select`. Never raises for a miss."""
        from pagegen import selection  # the one import upwards: asking is the database's verb, the ladder is above it

        return selection.select(spec, layout, target, workload, db=self)

    def best_block_size(
        self,
        spec: AttentionSpec,
        target: Target | str,
        profile: Profile,
        *,
        memory_bytes: int | None = None,
        objective: str = "throughput",
        num_layers: int = 1,
    ) -> list[BlockSizeRow]:
        """Block sizes for a profile, best first; see `pagegen.selection.best_block_size`."""
        from pagegen import selection

        return selection.best_block_size(
            spec, target, profile, db=self, memory_bytes=memory_bytes, objective=objective, num_layers=num_layers
        )

    # --- sharing and upkeep ---------------------------------------------------------------------------------

    def merge(self, other: Database | str | Path) -> TransferReport:
        """Adds everything of another database (opened for reading where a path or URL is given). The result is the
        same whichever is merged into which, and merging again adds nothing."""
        if isinstance(other, Database):
            if other.store.path is not None and other.store.path == self.store.path:
                return TransferReport()
            return transfer.absorb(self.store, transfer.records(other.store))
        with open_db(str(other), read_only=True) as opened:
            return self.merge(opened)

    def export(self, path: str | Path) -> int:
        """Writes everything as JSONL that diffs well, and returns the number of lines."""
        return transfer.export(self.store, Path(path))

    def import_(self, path: str | Path) -> TransferReport:
        """Adds the records of an exported file. Lines that are no records are named in the report and left out.

        Raises FileNotFoundError or another OSError where the file cannot be read."""
        return transfer.absorb(self.store, transfer.lines(Path(path)))

    def verify(self) -> list[str]:
        """What is wrong with the database, a sentence each: damaged pages, rows that cannot be read or do not match
        their key, times that cannot be. Empty when nothing is."""
        return upkeep.verify(self.store)

    def stats(self) -> dict[str, Any]:
        """How much is there, JSON-ready."""
        return upkeep.stats(self.store)

    def prune(self, *, target: Target, keep: Collection[str], dry_run: bool = False) -> dict[str, int]:
        """Removes the trials and portfolios of a target's old code hashes; see `pagegen.db.upkeep.prune`."""
        return upkeep.prune(self.store, target=target, keep=keep, dry_run=dry_run)

    def _readable(self, found: Iterable[T | Undecodable]) -> list[T]:
        values: list[T] = []
        lost: list[Undecodable] = []
        for value in found:
            if isinstance(value, Undecodable):
                lost.append(value)
            else:
                values.append(value)
        if lost:
            log.warning(
                "%d rows of %s cannot be read and are left out (first: %s, %s); run pagegen db verify",
                len(lost), self.name, lost[0].what, lost[0].why,
            )  # fmt: skip
        return values


def open_db(url: str | Path | None = None, *, read_only: bool = False) -> Database:
    """Opens a tuning database, making it where there is none.

    `url` is a path, a sqlite:// or a postgresql:// URL, by default `PAGEGEN_DB` or a file in the user's data folder.
    With `read_only`, and where the file or its folder cannot be written, it is opened for reading.

    Raises ValueError for a URL that names no database, MissingDatabase (when reading), ForeignDatabase for garbage or
    another program's file, NewerSchema, or another DatabaseError; each names the place and what to do.
    """
    return Database(Store(str(settings.database_url() if url is None else url), read_only=read_only))
