"""Samples of one question put together, each with where it came from."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagegen.db import codec
from pagegen.db.conflicts import APART
from pagegen.spec import Measurement, Status
from pagegen.spec.result import PURPOSE, SESSION

if TYPE_CHECKING:
    from pagegen.db.database import Database


@dataclass(frozen=True, kw_only=True)
class Source:
    """One trial's part of a pool: how many samples, their median (None for a failure), how it ended, and when, in which
    session and for what it was made."""

    samples: int
    median_us: float | None
    status: str
    created_at: str
    session: str
    purpose: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The trials of one question: the same kernel, variant, batch, device, toolchain and regime.

    `trial` is the first of them and stands for what they share. `samples_us` is all samples in the order of `sources`,
    the oldest trial first. `conflict` says where the sources contradict one another; it removes nothing.
    """

    key: str
    trial: Measurement
    samples_us: tuple[float, ...]
    sources: tuple[Source, ...]
    conflict: str | None

    @property
    def median_us(self) -> float | None:
        """The median of all samples; None where every trial failed."""
        return statistics.median(self.samples_us) if self.samples_us else None


def pooled(db: Database, **wanted: Any) -> list[Pool]:
    """The trials that match (see `Database.trials`), pooled by question, in the order of their first trials."""
    return pools_of(db.trials(**wanted))


def pools_of(found: Iterable[Measurement]) -> list[Pool]:
    """Trials pooled by question."""
    groups: dict[str, list[Measurement]] = {}
    for trial in found:
        groups.setdefault(codec.trial_key(trial), []).append(trial)
    return [
        Pool(
            key=key,
            trial=trials[0],
            samples_us=tuple(us for trial in trials for us in trial.samples_us),
            sources=tuple(map(_source, trials)),
            conflict=_conflict(trials),
        )
        for key, trials in groups.items()
    ]


def _source(trial: Measurement) -> Source:
    return Source(
        samples=len(trial.samples_us),
        median_us=trial.median_us,
        status=trial.status.value,
        created_at=trial.created_at,
        session=trial.environment.get(SESSION, ""),
        purpose=trial.environment.get(PURPOSE, ""),
        detail=trial.detail,
    )


def _conflict(trials: list[Measurement]) -> str | None:
    ended = sorted({trial.status.value for trial in trials})
    if Status.OK.value in ended and len(ended) > 1:
        return f"trials ended {' and '.join(ended)}"
    medians = [trial.median_us for trial in trials if trial.median_us is not None]
    if medians and max(medians) > APART * min(medians):
        return f"medians from {min(medians):.4g} to {max(medians):.4g} us"
    return None
