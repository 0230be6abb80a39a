"""The trials of one tuning run: those already in the database under the same key, and those it adds."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

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
from pagegen.spec.result import GAUGE, PURPOSE, SESSION
from pagegen_autotune.claims import Lease
from pagegen_autotune.measure import Verdict
from pagegen_autotune.patience import Asking, at_once

# What else makes times of one device incomparable.
SAME_ENVIRONMENT = ("threads", "compiler", "driver", "runtime", "omp_wait_policy")


class Store(Protocol):
    """The part of `pagegen.db.Database` that tuning uses."""

    def atomic(self) -> AbstractContextManager[Any]: ...

    def record(self, measurement: Measurement) -> bool: ...

    def trials(
        self, *, spec: AttentionSpec | None = None, layout: CacheLayout | None = None, target: Target | None = None,
        code_hash: str | None = None,
    ) -> list[Measurement]: ...  # fmt: skip

    def save_portfolio(
        self, *, spec: AttentionSpec, layout: CacheLayout, device: Device, profile: Profile, rule: DispatchRule,
        code_hash: str,
    ) -> Any: ...  # fmt: skip

    def portfolio(
        self, spec: AttentionSpec, layout: CacheLayout, target: Target, code_hash: str, device: Device | None = None
    ) -> DispatchRule | None: ...

    def save_profile(self, profile: Profile) -> Any: ...

    def record_facts(self, facts: CompileFacts) -> Any: ...

    def record_prediction(self, prediction: Prediction) -> Any: ...


class Conditions(Protocol):
    """What times depend on beside the device: see `measure.Bench`."""

    @property
    def regime(self) -> str: ...

    @property
    def environment(self) -> dict[str, str]: ...


class Ledger:
    """Every trial that may be compared here: same spec, target, device, code, regime, threads and compiler. `arrivals`
    counts those that other tuners stored since the first look."""

    def __init__(
        self, store: Store, spec: AttentionSpec, device: Device, code_hash: str, conditions: Conditions, *,
        asking: Asking = at_once,
    ) -> None:  # fmt: skip
        self.store = store
        self.spec = spec
        self.device = device
        self.code_hash = code_hash
        self.added: Counter[Status] = Counter()
        self.resumed = 0
        self._conditions = conditions
        self._asking = asking
        self._trials: dict[CacheLayout, list[Measurement]] = {}
        self._arrived: list[Measurement] = []

    def trials(self, layout: CacheLayout) -> list[Measurement]:
        """All comparable trials of a layout, the stored ones read once."""
        if layout not in self._trials:
            self._trials[layout] = self._stored(layout)
            self.resumed += len(self._trials[layout])
        return self._trials[layout]

    def _stored(self, layout: CacheLayout) -> list[Measurement]:
        return self._asking(lambda: self._comparable_in_store(layout))

    def _comparable_in_store(self, layout: CacheLayout) -> list[Measurement]:
        stored = self.store.trials(
            spec=self.spec, layout=layout, target=self.device.target, code_hash=self.code_hash
        )  # fmt: skip
        return [trial for trial in stored if self._comparable(trial)]

    def refresh(self, layouts: Iterable[CacheLayout]) -> None:
        """Reads what others stored since."""
        for layout in layouts:
            known = {_identity(trial) for trial in self.trials(layout)}
            new = [trial for trial in self._stored(layout) if _identity(trial) not in known]
            self._trials[layout] += new
            self._arrived += new
            self.resumed += len(new)

    @property
    def arrivals(self) -> int:
        return len(self._arrived)

    def arrived(self, since: int, workload: Workload, purpose: str) -> set[tuple[CacheLayout, Variant]]:
        """What others measured on a workload for some purpose, or found to fail, of the arrivals after the first
        `since`."""
        return {
            (t.layout, t.variant)
            for t in self._arrived[since:]
            if t.status is not Status.OK or (t.workload == workload and t.environment.get(PURPOSE) == purpose)
        }

    def question(self, layout: CacheLayout, workload: Workload) -> str:
        """The name of what is measured here on a workload with any variants, the same in every process: what one tuner
        leases, so that no other measures it at the same time."""
        from pagegen.db import keys

        environment = {name: self._conditions.environment.get(name, "") for name in SAME_ENVIRONMENT}
        return keys.digest(
            keys.canonical(
                {
                    "spec": keys.spec_digest(self.spec),
                    "layout": layout.to_dict(),
                    "code_hash": self.code_hash,
                    "device": keys.device_identity(self.device),
                    "regime": self._conditions.regime,
                    "environment": environment,
                    "workload": workload.to_dict(),
                }
            )
        )

    def success(
        self, layout: CacheLayout, variant: Variant, workload: Workload, samples: Sequence[float],
        *, session: str, purpose: str, max_error: float | None, gauge_gb_s: Sequence[float] = (), detail: str = "",
    ) -> Measurement:  # fmt: skip
        """A successful trial, not yet stored. `gauge_gb_s` are the readings beside its samples, none or one for each.
        A failure in its place where its times cannot be true."""
        tags = {SESSION: session, PURPOSE: purpose}
        if gauge_gb_s:
            tags[GAUGE] = " ".join(f"{reading:.4g}" for reading in gauge_gb_s)
        verdict = Verdict(status=Status.OK, detail=detail, max_error=max_error)
        return _believable(self._trial(layout, variant, workload, verdict, samples, tags))

    def failure(self, layout: CacheLayout, variant: Variant, workload: Workload, verdict: Verdict) -> Measurement:
        """A failed trial, not yet stored: a result like any other."""
        return self._trial(layout, variant, workload, verdict, (), {})

    def add(self, trials: Iterable[Measurement], lease: Lease | None = None) -> None:
        """Stores trials in one transaction, and gives the lease on them back in it. Where another tuner took the lease
        over, they are that one's: nothing is stored, and the database is read again."""
        made = list(trials)
        layouts = {trial.layout for trial in made}
        for layout in layouts:
            self.trials(layout)  # before the store holds the new ones, lest they be read back beside them
        if not self._asking(lambda: self._written(made, lease)):
            self.refresh(layouts)
            return
        for trial in made:
            self._trials[trial.layout].append(trial)
            self.added[trial.status] += 1

    def add_once(self, failures: Iterable[Measurement]) -> None:
        """Stores failures that no other tuner has stored: of a check, which is not leased."""
        made = list(failures)
        for layout in {trial.layout for trial in made}:
            mine = [trial for trial in made if trial.layout == layout]
            self.trials(layout)
            kept = self._asking(lambda layout=layout, mine=mine: self._new_ones(layout, mine))  # type: ignore[misc]
            self._trials[layout] += kept
            self.added.update(trial.status for trial in kept)
            if len(kept) < len(mine):
                self.refresh([layout])

    def _new_ones(self, layout: CacheLayout, failures: Sequence[Measurement]) -> list[Measurement]:
        with self.store.atomic():  # one writer at a time: between looking and storing nobody stores
            there = {t.variant: t for t in self._comparable_in_store(layout) if t.status is not Status.OK}
            kept = [t for t in failures if t.variant not in there or _identity(there[t.variant]) == _identity(t)]
            for trial in kept:
                self.store.record(trial)
        return kept

    def _written(self, trials: Sequence[Measurement], lease: Lease | None) -> bool:
        if not trials and lease is None:
            return True
        with self.store.atomic():
            if lease is not None and not lease.holds():
                return False
            for trial in trials:
                self.store.record(trial)
            if lease is not None:
                lease.give_back()
        return True

    def _trial(
        self, layout: CacheLayout, variant: Variant, workload: Workload, verdict: Verdict,
        samples: Sequence[float], tags: dict[str, str],
    ) -> Measurement:  # fmt: skip
        return Measurement(
            spec=self.spec,
            layout=layout,
            target=self.device.target,
            device=self.device,
            variant=variant,
            workload=workload,
            status=verdict.status,
            samples_us=tuple(samples),
            regime=self._conditions.regime,
            max_error=verdict.max_error,
            detail=verdict.detail,
            code_hash=self.code_hash,
            environment={**self._conditions.environment, **tags},
            created_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        )

    def _comparable(self, trial: Measurement) -> bool:
        here, there = self.device, trial.device
        return (
            (there.name, there.units, there.features) == (here.name, here.units, here.features)
            and trial.regime == self._conditions.regime
            and same_environment(trial.environment, self._conditions.environment)
        )


def _identity(trial: Measurement) -> tuple[Any, ...]:
    """What tells stored trials of one layout apart: a race has a session of its own."""
    session = trial.environment.get(SESSION, "")
    return trial.variant, trial.workload, trial.status, trial.created_at, session, trial.samples_us


def same_environment(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether times that were taken in two environments compare, on one device."""
    return all(one.get(name) == other.get(name) for name in SAME_ENVIRONMENT)


def _believable(trial: Measurement) -> Measurement:
    """The trial, or a failure in its place where its times cannot be true: a process that was stopped for minutes, a
    clock that jumped. A run must not end for it, and nobody may take such times for a kernel's."""
    from pagegen.db.plausible import impossible_times

    problems = impossible_times(trial)
    if not problems:
        return trial
    return replace(trial, status=Status.RUNTIME_ERROR, samples_us=(), detail=f"refused: {problems[0]}")
