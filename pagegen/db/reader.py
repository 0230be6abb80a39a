"""`Reader`: what a tuning database answers, over all the stores that it is made of."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import sqlalchemy as sa

from pagegen.db import codec, facts, queries, statements
from pagegen.db.absent import Absent
from pagegen.db.engine import Store
from pagegen.db.queries import UNDECODABLE, Decoder, Portfolio, Undecodable
from pagegen.db.schema import devices, kernels, trials
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CompileFacts,
    Device,
    DispatchRule,
    Measurement,
    Prediction,
    Profile,
    Status,
    Target,
    Variant,
    Workload,
)

log = logging.getLogger(__name__)
T = TypeVar("T")


class Reader:
    """The questions to a database: its own store, and what lies under it."""

    def __init__(self, store: Store, under: Callable[[], Store | None] | None = None) -> None:
        self.store = store
        self._under = under
        self._layer = None if under is None else under()

    @property
    def name(self) -> str:
        """The file's path, or the URL without its password."""
        return self.store.name

    @property
    def stores(self) -> tuple[Store, ...]:
        """What questions read: the user's own where it is there, then the records that ship with pagegen, where there
        are any."""
        if self._under is None or self._layer is None:
            return (self.store,)
        if self._layer.path is not None and not self._layer.path.exists():  # somebody emptied the cache
            self._layer = self._under()
        own = () if isinstance(self.store, Absent) else (self.store,)
        return own if self._layer is None else (*own, self._layer)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """What this thread asks inside it is answered from one moment of each file, read over one connection."""
        with contextlib.ExitStack() as stack:
            for store in self.stores:
                stack.enter_context(store.snapshot())
            yield

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
        statement = queries.narrowed(
            queries.TRIALS, spec=spec, layout=layout, target=target, code_hash=code_hash, device=device,
            variant=variant, workload=workload, status=status, regime=regime,
        )  # fmt: skip
        return sorted(self._rows(statement, "trial", Decoder().trial), key=lambda trial: trial.created_at)

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
        statement = queries.narrowed(
            queries.PORTFOLIOS, spec=spec, layout=layout, target=target, code_hash=code_hash, device=device
        )
        found = self._rows(statement, "portfolio", Decoder().portfolio)
        return sorted(found, key=lambda portfolio: portfolio.created_at, reverse=True)

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
        found = self._rows(queries.PROFILES, "profile", lambda row: codec.profile_from(row.data))
        return sorted(found, key=lambda profile: profile.name)

    def compile_facts(
        self,
        *,
        spec: AttentionSpec | None = None,
        layout: CacheLayout | None = None,
        target: Target | None = None,
        code_hash: str | None = None,
        variant: Variant | None = None,
    ) -> list[CompileFacts]:
        """What compilers made of the kernels that match everything given, oldest first."""
        statement = queries.narrowed(
            facts.FACTS, spec=spec, layout=layout, target=target, code_hash=code_hash, variant=variant
        )
        decoder = Decoder()
        found = self._rows(statement, "compile facts", lambda row: facts.facts_of(row, decoder))
        return sorted(found, key=lambda known: known.created_at)

    def predictions(
        self,
        *,
        spec: AttentionSpec | None = None,
        layout: CacheLayout | None = None,
        target: Target | None = None,
        code_hash: str | None = None,
        device: Device | None = None,
        variant: Variant | None = None,
        workload: Workload | None = None,
    ) -> list[Prediction]:
        """The stored predictions that match everything given, oldest first."""
        statement = queries.narrowed(
            facts.PREDICTIONS, spec=spec, layout=layout, target=target, code_hash=code_hash, device=device,
            variant=variant, workload=workload,
        )  # fmt: skip
        decoder = Decoder()
        found = self._rows(statement, "prediction", lambda row: facts.prediction_of(row, decoder))
        return sorted(found, key=lambda prediction: prediction.created_at)

    def measured_layouts(self, spec: AttentionSpec, target: Target, code_hash: str) -> list[CacheLayout]:
        """The layouts that have ok trials for this spec, target and code, smallest block first."""
        statement = statements.layouts(spec, target, code_hash)
        found: set[tuple[int, str]] = set()
        for store in self.stores:
            with store.reading() as connection:
                found |= {(row.block_size, row.block_order) for row in connection.execute(statement)}
        layouts = []
        for size, order in found:
            with contextlib.suppress(*UNDECODABLE):  # `verify` names it
                layouts.append(CacheLayout(block_size=size, order=order))
        return sorted(layouts, key=lambda layout: (layout.block_size, layout.order))

    def measured_devices(self, spec: AttentionSpec, target: Target, code_hash: str) -> list[Device]:
        """The devices with ok trials for this spec, target and code, each once by identity (as most of its trials have
        it), most trials first; a trial that several stores have counts once. Depends on the content alone."""
        statement = (
            sa.select(
                devices.c.id, devices.c.identity, devices.c.digest, devices.c.data, sa.func.count().label("count")
            )
            .join_from(trials, devices)
            .join(kernels, trials.c.kernel_id == kernels.c.id)
            .where(trials.c.status == Status.OK.value)
            .group_by(devices.c.id, devices.c.identity, devices.c.digest, devices.c.data)
        )
        statement = queries.narrowed(statement, spec=spec, target=target, code_hash=code_hash)
        found = self._rows(
            statement, "device", lambda row: (row.identity, (row.count, row.digest), codec.device_from(row.data)),
            once=False,
        )  # fmt: skip
        counts: dict[str, int] = {}
        for identity, (count, _), _ in found:
            counts[identity] = counts.get(identity, 0) + count
        for identity in self._counted_twice(spec, target, code_hash):
            counts[identity] -= 1
        best = {identity: device for identity, _, device in sorted(found, key=lambda f: f[1])}
        return [best[identity] for identity in sorted(counts, key=lambda i: (-counts[i], i))]

    def _counted_twice(self, spec: AttentionSpec, target: Target, code_hash: str) -> list[str]:
        """The identity of its device for every ok trial of what ships that the user has, too."""
        own, *under = self.stores
        statement = sa.select(trials.c.digest, devices.c.identity).join_from(trials, devices)
        statement = statement.join(kernels, trials.c.kernel_id == kernels.c.id)
        statement = queries.narrowed(statement, spec=spec, target=target, code_hash=code_hash, status=Status.OK)
        found: dict[str, str] = {}
        for store in under:
            with store.reading() as connection:
                found |= {row.digest: row.identity for row in connection.execute(statement)}
        return [found[digest] for digest in statements.held(own, sorted(found))] if found else []

    def _rows(self, statement: sa.Select[Any], kind: str, decode: Callable[[Any], T], *, once: bool = True) -> list[T]:
        """The rows of all stores as values, those that cannot be read left out and logged. With `once`, a row that
        several stores have counts in the first."""
        values: list[T] = []
        seen: set[str] = set()
        for store in self.stores:
            lost: list[Undecodable] = []
            for found in store.ask(lambda connection: list(queries.decoded(
                connection, statement, kind, lambda row: (row.digest if once else "", decode(row))
            ))):  # fmt: skip
                if isinstance(found, Undecodable):
                    lost.append(found)
                elif not once or found[0] not in seen:
                    values.append(found[1])
                    seen.add(found[0])
            if lost:
                log.warning(
                    "%d rows of %s cannot be read and are left out (first: %s, %s); run pagegen db verify",
                    len(lost), store.name, lost[0].what, lost[0].why,
                )  # fmt: skip
        return values
