"""What attention costs a step, from the times of a profile's batches: for a simulation of many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagegen.spec import Profile, Workload

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """Attention of one layer: `base_us` a step, `context_us` a token of the contexts, `pair_us` a pair of a prefill
    token and a token of its context; none is negative. `mean_error` is the relative error on the batches that it was
    fitted to, by their weights."""

    base_us: float
    context_us: float
    pair_us: float
    mean_error: float

    def us(self, workload: Workload) -> float:
        """The time of one layer on a batch."""
        base, context, pairs = _features(workload)
        return self.base_us * base + self.context_us * context + self.pair_us * pairs


def fit(profile: Profile, us: tuple[float, ...]) -> AttentionCost:
    """The cost that comes nearest to `us`, the times of the profile's workloads in order: least squares of the relative
    errors, weighted as the workloads are. Raises ValueError for times that are not one a workload, positive."""
    if len(us) != len(profile.workloads) or not all(np.isfinite(us)) or min(us) <= 0:
        raise ValueError(f"us must be a positive time for each of {len(profile.workloads)} workloads, got {us}")
    times, weights = np.array(us), np.sqrt(np.array(profile.weights))
    rows = np.array([_features(workload) for workload in profile.workloads]) / times[:, None]
    found = _not_negative(rows * weights[:, None], weights)
    error = float((np.array(profile.weights) * np.abs(rows @ found - 1.0)).sum())
    return AttentionCost(base_us=found[0], context_us=found[1], pair_us=found[2], mean_error=error)


def _features(workload: Workload) -> tuple[float, float, float]:
    pairs = sum(q * c for q, c in zip(workload.query_lens, workload.context_lens, strict=True) if q > 1)
    return 1.0, float(workload.total_context), float(pairs)


def _not_negative(rows: Floats, wanted: Floats) -> list[float]:
    """Least squares without negative coefficients: of all choices of those that may differ from 0 (three: eight
    choices), the best that has none."""
    best, least = [0.0] * rows.shape[1], float("inf")
    # columns of like size, for the solver's sake
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    for chosen in range(1, 2 ** rows.shape[1]):
        columns = [i for i in range(rows.shape[1]) if chosen >> i & 1]
        found, *_ = np.linalg.lstsq(rows[:, columns] / scale[columns], wanted, rcond=None)
        if (found < 0).any():
            continue
        residual = float((((rows[:, columns] / scale[columns]) @ found - wanted) ** 2).sum())
        if residual < least * (1 - 1e-9):
            least = residual
            best = [0.0] * rows.shape[1]
            for column, value in zip(columns, found / scale[columns], strict=True):
                best[column] = float(value)
    return best
