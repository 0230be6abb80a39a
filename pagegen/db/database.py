"""`Database`: every trial kept, asked and shared."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pagegen import settings
from pagegen.db import dates, leases, mirror, plausible, soundness, sources, sqlite, transfer, upkeep
from pagegen.db import shipped as shipped_records
from pagegen.db.absent import Absent
from pagegen.db.absorbing import TransferReport
from pagegen.db.engine import Store
from pagegen.db.errors import DamagedDatabase, DatabaseError, MissingDatabase, Unreachable
from pagegen.db.places import place_of
from pagegen.db.queries import Portfolio
from pagegen.db.reader import Reader
from pagegen.db.rows import Writer
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CompileFacts,
    Device,
    DispatchRule,
    Measurement,
    Prediction,
    Profile,
    Selection,
    Target,
    Workload,
    check,
)

if TYPE_CHECKING:
    from pagegen.db.block_size import BlockSizeRow
    from pagegen.spec.choice import ChoiceDigest

log = logging.getLogger(__name__)
# One selection opens its database several times, and a model is to start soon without a server.
REST_S = 30.0
_GIVEN_UP: dict[str, tuple[float, Unreachable]] = {}


class Database(Reader):
    """A tuning database. Open one with `open_db`; it may be used from several threads and after a fork, and is a
    context manager.

    Every verb is one transaction of its own unless it runs inside `atomic()`. Verbs raise a `DatabaseError` that
    names the database and what to do; only `select` and `best_block_size`'s rules degrade instead.
    """

    note = ""  # where a mirror stands in for its server: what to tell people

    def __repr__(self) -> str:
        return f"Database({self.name!r}{', read_only=True' if self.read_only else ''})"

    @property
    def read_only(self) -> bool:
        """Whether writing raises: reading was asked for, or the file or its folder cannot be written."""
        return self.store.read_only

    @property
    def own(self) -> Reader:
        """The user's own records alone, without what ships."""
        return Reader(self.store)

    def close(self) -> None:
        """Releases what the database holds; using it again opens it again."""
        self.store.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def atomic(self) -> Iterator[sa.Connection]:
        """One transaction around several verbs: all of them happen, or none. Nested ones join the outermost. Where a
        server is lost in the middle, the verbs that record are done again once it is back; with statements of the
        caller's own through the connection it fails then."""
        with self.store.writing() as connection:
            yield connection

    # --- recording ------------------------------------------------------------------------------------------

    def record(self, measurement: Measurement) -> bool:
        """Stores a trial, durable when this returns; False when the identical one is there already."""
        check.instance("measurement", measurement, Measurement)
        plausible.refuse_absurd(measurement)
        return self.store.add(lambda connection: Writer(connection).add_trial(measurement))

    def save_profile(self, profile: Profile) -> bool:
        """Stores a profile; False when the identical one is there already."""
        check.instance("profile", profile, Profile)
        return self.store.add(lambda connection: Writer(connection).add_profile(profile))

    def record_facts(self, facts: CompileFacts) -> bool:
        """Stores what a compiler made of a kernel; False when the identical facts are there already."""
        check.instance("facts", facts, CompileFacts)
        return self.store.add(lambda connection: Writer(connection).add_facts(facts))

    def record_prediction(self, prediction: Prediction) -> bool:
        """Stores a time that a model expects, apart from all trials; False when the identical one is there already."""
        check.instance("prediction", prediction, Prediction)
        return self.store.add(lambda connection: Writer(connection).add_prediction(prediction))

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

        `created_at` is ISO 8601 in UTC, by default now, or a minute after the newest where that is dated ahead of the
        clock. False when the newest is this very rule already.
        """
        check.instance("device", device, Device)
        portfolio = Portfolio(
            spec=spec, layout=layout, target=device.target, code_hash=code_hash, device=device, profile=profile,
            rule=rule, created_at=dates.now() if created_at is None else created_at,
        )  # fmt: skip
        with self.atomic():
            if created_at is None:
                kept = self.own.portfolios(
                    spec=spec, layout=layout, target=device.target, code_hash=code_hash, device=device
                )
                if kept and (kept[0].rule, kept[0].profile) == (rule, profile):
                    return False
                if kept and dates.is_ahead(kept[0].created_at):
                    portfolio = replace(portfolio, created_at=dates.after(kept[0].created_at))
                    log.warning(
                        "the newest portfolio of %s is dated %s, ahead of the clock: this one is dated %s",
                        self.name, kept[0].created_at, portfolio.created_at,
                    )  # fmt: skip
            return self.store.add(lambda connection: Writer(connection).add_portfolio(portfolio))

    # --- asking ---------------------------------------------------------------------------------------------

    def select(
        self, spec: AttentionSpec, layout: CacheLayout, target: Target | str, workload: Workload,
        *, device: Device | str | None = None,
    ) -> Selection:  # fmt: skip
        """The variant for one batch, and why; see `pagegen.selection.select`. Never raises for a miss."""
        from pagegen import selection  # the one import upwards: asking is the database's verb, the ladder is above it

        return selection.select(spec, layout, target, workload, db=self, device=device)

    def best_block_size(
        self,
        spec: AttentionSpec,
        target: Target | str,
        profile: Profile,
        *,
        memory_bytes: int | None = None,
        objective: str = "throughput",
        num_layers: int = 1,
        device: Device | str | None = None,
    ) -> list[BlockSizeRow]:
        """Block sizes for a profile, best first; see `pagegen.selection.best_block_size`."""
        from pagegen import selection

        return selection.best_block_size(
            spec, target, profile, db=self, memory_bytes=memory_bytes, objective=objective, num_layers=num_layers,
            device=device,
        )  # fmt: skip

    def digest(self, spec: AttentionSpec, layout: CacheLayout, target: Target | str) -> ChoiceDigest:
        """What the choice for a kernel rests on, for comparing the ranks of a job; see `pagegen.selection.ranks`."""
        from pagegen import selection

        return selection.choice_digest(spec, layout, target, db=self)

    # --- leases -----------------------------------------------------------------------------------------------

    def lease(self, names: Sequence[str], *, holder: str, seconds: float, what: str) -> set[str] | None:
        """Leases all of `names` to a tuner, or none: see `pagegen.db.leases.take`."""
        return leases.take(self.store, names, holder=holder, seconds=seconds, what=what)

    def renew(self, *, holder: str, seconds: float) -> int:
        """Prolongs a tuner's leases: see `pagegen.db.leases.renew`."""
        return leases.renew(self.store, holder=holder, seconds=seconds)

    def holds(self, names: Sequence[str], *, holder: str) -> bool:
        """Whether a tuner's leases are still its own: see `pagegen.db.leases.holds`."""
        return leases.holds(self.store, names, holder=holder)

    def release(self, names: Sequence[str] | None = None, *, holder: str) -> int:
        """Gives a tuner's leases back: see `pagegen.db.leases.release`."""
        return leases.release(self.store, names, holder=holder)

    # --- sharing and upkeep ---------------------------------------------------------------------------------

    def merge(self, other: Database | str | Path) -> TransferReport:
        """Adds everything of another database (opened for reading where a path or URL is given). The result is the
        same whichever is merged into which, and merging again adds nothing."""
        if isinstance(other, Database):
            if other.store.path is not None and other.store.path == self.store.path:
                return TransferReport()
            return transfer.absorb(self.store, transfer.records(other.store))
        with open_db(other, read_only=True, shipped=False) as opened:
            return self.merge(opened)

    def export(self, path: str | Path) -> int:
        """Writes everything as JSONL that diffs well, and returns the number of lines. Raises ValueError where a
        database lies at `path`."""
        return transfer.export(self.store, Path(path))

    def import_(self, path: str | Path) -> TransferReport:
        """Adds the records of an exported file, or of T4 results (a file or a folder of them, see `pagegen.db.t4`).
        What is no record is named in the report and left out.

        Raises FileNotFoundError or another OSError where the file cannot be read, ValueError for T4 results of another
        tuner's kernels."""
        return transfer.absorb(self.store, sources.named_records(Path(path)))

    def verify(self) -> list[str]:
        """What is wrong with the database, a sentence each: damaged pages, rows that cannot be read or do not match
        their key, times that cannot be. Empty when nothing is."""
        return soundness.verify(self.store)

    def stats(self) -> dict[str, Any]:
        """How much is there, JSON-ready."""
        return upkeep.stats(self.store)

    def prune(self, *, target: Target | str, keep: Collection[str], dry_run: bool = False) -> dict[str, int]:
        """Removes the trials and portfolios of a target's old code hashes; see `pagegen.db.upkeep.prune`, which says
        what it refuses."""
        return upkeep.prune(self.store, target=target, keep=keep, dry_run=dry_run)


def open_db(url: str | Path | None = None, *, read_only: bool = False, shipped: bool = True) -> Database:
    """Opens a tuning database, making it where there is none, and leading one of an older version up.

    `url` is a path, a sqlite:// or a postgresql:// URL, by default `PAGEGEN_DB` or a file in the user's data folder.
    With `read_only`, and where the file or its folder cannot be written, it is opened for reading. The records that
    ship with pagegen lie under it: questions see both, all else is about the user's own, and raises MissingDatabase
    where that is not there. `shipped=False` leaves them. Where a server does not answer that is only to be read, its
    mirror (`pagegen db pull`) is opened, which is logged.

    A damaged file that pagegen made, or in the user's data folder under pagegen's own name, is set aside when it is
    opened for writing, which is logged, and a new one begins. Raises TypeError for what is no path or URL, BadPlace (a
    ValueError) for one that names no database, MissingDatabase (when reading),
    DamagedDatabase or ForeignDatabase for garbage or another program's file, OlderSchema (when reading), NewerSchema,
    or another DatabaseError; each names the place and what to do.
    """
    place = settings.database_url() if url is None else url
    under = shipped_records.store if shipped else None
    try:
        return (
            _of_server(place, under)
            if read_only and place_of(place).url
            else Database(Store(place, read_only=read_only), under)
        )
    except MissingDatabase as error:
        if not read_only or under is None or under() is None:
            raise
        return Database(Absent(place, error), under)
    except DamagedDatabase as error:
        path = place_of(place).path
        if read_only or path is None:
            raise
        with sqlite.alone(path):
            aside = _set_aside(path, error, expected=place == settings.own_database())
        if aside is not None:
            log.warning("%s; it is now %s, and a new database begins", error, aside)
        return Database(Store(place), under)


def _of_server(place: str | Path, under: Callable[[], Store | None] | None) -> Database:
    """A server's database to read, or its mirror. A server that was just given up is not waited for again."""
    name = place_of(place).name
    at, known = _GIVEN_UP.get(name, (0.0, None))
    try:
        if known is not None and time.monotonic() - at < REST_S:
            raise known
        return Database(Store(place, read_only=True), under)
    except Unreachable as error:
        if error is not known:
            _GIVEN_UP[name] = (time.monotonic(), error.with_traceback(None))
        found = mirror.instead_of(place, error)
        if found is None:
            raise
        opened = Database(found[0], under)
        opened.note = found[1]
        return opened


def _set_aside(path: Path, error: DamagedDatabase, *, expected: bool) -> Path | None:
    """Sets a damaged file aside; None where another process was quicker. Raises `error` for a file that is neither
    `expected` there nor one that pagegen made."""
    try:
        Store(str(path), read_only=True).close()
    except DamagedDatabase:
        if not (expected or sqlite.is_ours(path)):
            raise error from None
        try:
            return sqlite.set_aside(path)
        except OSError as obstacle:
            raise DamagedDatabase(f"{error} (it cannot be set aside: {obstacle})") from obstacle
    except DatabaseError:
        pass  # gone, or being made anew
    return None
