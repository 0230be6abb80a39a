"""The trials of one tuning run: those already in the database under the same key, and those it adds."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
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
from pagegen_autotune.measure import Bench, Verdict

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


class Ledger:
    """Every trial that may be compared here: same spec, target, device, code, regime, threads and compiler."""

    def __init__(self, store: Store, spec: AttentionSpec, device: Device, code_hash: str, bench: Bench) -> None:
        self.store = store
        self.spec = spec
        self.device = device
        self.code_hash = code_hash
        self.added: Counter[Status] = Counter()
        self.resumed = 0
        self._bench = bench
        self._trials: dict[CacheLayout, list[Measurement]] = {}

    def trials(self, layout: CacheLayout) -> list[Measurement]:
        """All comparable trials of a layout, the stored ones read once."""
        if layout not in self._trials:
            stored = self.store.trials(
                spec=self.spec, layout=layout, target=self.device.target, code_hash=self.code_hash
            )
            self._trials[layout] = [t for t in stored if self._comparable(t)]
            self.resumed += len(self._trials[layout])
        return self._trials[layout]

    def failed(self, layout: CacheLayout) -> set[Variant]:
        """The variants that failed at this layout, now or in an earlier run: the same code fails again."""
        return {t.variant for t in self.trials(layout) if t.status is not Status.OK}

    def succeed(
        self, layout: CacheLayout, variant: Variant, workload: Workload, samples: Sequence[float],
        *, session: str, purpose: str, max_error: float | None, gauge_gb_s: Sequence[float] = (), detail: str = "",
    ) -> None:  # fmt: skip
        """Stores a successful trial. `gauge_gb_s` are the readings beside its samples, none or one for each."""
        tags = {SESSION: session, PURPOSE: purpose}
        if gauge_gb_s:
            tags[GAUGE] = " ".join(f"{reading:.4g}" for reading in gauge_gb_s)
        verdict = Verdict(status=Status.OK, detail=detail, max_error=max_error)
        self._record(layout, variant, workload, verdict, samples, tags)

    def fail(self, layout: CacheLayout, variant: Variant, workload: Workload, verdict: Verdict) -> None:
        """Stores a failed trial: a result like any other."""
        self._record(layout, variant, workload, verdict, (), {})

    def _record(
        self, layout: CacheLayout, variant: Variant, workload: Workload, verdict: Verdict,
        samples: Sequence[float], tags: dict[str, str],
    ) -> None:  # fmt: skip
        trial = Measurement(
            spec=self.spec,
            layout=layout,
            target=self.device.target,
            device=self.device,
            variant=variant,
            workload=workload,
            status=verdict.status,
            samples_us=tuple(samples),
            regime=self._bench.regime,
            max_error=verdict.max_error,
            detail=verdict.detail,
            code_hash=self.code_hash,
            environment={**self._bench.environment, **tags},
            created_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        )
        trial = _believable(trial)
        known = self.trials(layout)  # before the store holds the new one, lest it be read back beside it
        self.store.record(trial)
        known.append(trial)
        self.added[trial.status] += 1

    def _comparable(self, trial: Measurement) -> bool:
        here, there = self.device, trial.device
        return (
            (there.name, there.units, there.features) == (here.name, here.units, here.features)
            and trial.regime == self._bench.regime
            and same_environment(trial.environment, self._bench.environment)
        )


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
