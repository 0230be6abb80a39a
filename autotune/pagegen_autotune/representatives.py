"""Thousands of step snapshots reduced to a few that stand for them, each with the share of steps it stands for.

Distances are in doublings: every feature is a base-2 logarithm, so two batches that differ by a factor of two in
nothing but one feature of weight 1 are 1 apart, whatever the trace. Decode-only and mixed steps use different kernels
and never stand for one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagegen.spec import Workload
from pagegen_autotune.snapshots import Snapshot, Snapshots

# of the contexts in a batch; 1.0 is the longest, which decides how a decode is split
QUANTILES = (0.1, 0.5, 0.9, 1.0)
# of squared distance a quarter a quantile: the 4 of them, the balance of a step, count as much as its total
QUANTILE_WEIGHT = 0.5
# of the queries in a batch: decode rows beside one chunk of a prompt, or many short prompts; 1.0 is the longest
QUERY_QUANTILES = (0.5, 0.9, 1.0)
# a kind of step that occurs gets at least so many representatives, so that one kernel is not tuned on one batch
LEAST_A_KIND = 2

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Representatives:
    """The chosen batches with their weights (summing to 1) and shared tokens, and how far they are from what they stand
    for.

    `mean_distance`, `p95_distance`: doublings from a step to its representative, over steps; `mean_context_error`: the
    relative error of the total context tokens, averaged over steps; `context_bias`: (weighted total context of the
    representatives / that of all steps) - 1.
    """

    workloads: tuple[Workload, ...]
    weights: tuple[float, ...]
    shared_tokens: tuple[int, ...]
    mean_distance: float
    p95_distance: float
    mean_context_error: float
    context_bias: float


def represent(snapshots: Snapshots, count: int) -> Representatives:
    """At most `count` representatives, at least 1 (and LEAST_A_KIND where `count` allows) a kind of step.

    Weighted k-medoids, started greedily and improved by swaps (Kaufman & Rousseeuw's PAM): deterministic.
    Raises ValueError where `count` is below the number of kinds.
    """
    groups = snapshots.groups()
    chosen: list[tuple[Snapshot, float]] = []
    distance = error = 0.0
    all_distances, all_weights = [], []
    for (kind, share), size in zip(groups, _sizes([share for _, share in groups], count), strict=True):
        distances = _distances(features(kind))
        medoids = k_medoids(distances, min(size, len(kind)))
        nearest = np.argmin(distances[:, medoids], axis=1)
        own = distances[np.arange(len(kind)), medoids[nearest]]
        totals = np.array([one.load.total_context for one in kind], dtype=np.float64)
        distance += share * float(own.mean())
        error += share * float((np.abs(totals[medoids][nearest] - totals) / totals).mean())
        all_distances.append(own)
        all_weights.append(np.full(len(kind), share / len(kind)))
        for position, medoid in enumerate(medoids):
            followers = float((nearest == position).mean())
            if followers > 0:  # equal snapshots can leave a medoid without any
                chosen.append((kind[medoid], share * followers))
    mean = sum(share * one.load.total_context for one, share in snapshots.weighted())
    return Representatives(
        workloads=tuple(one.load for one, _ in chosen),
        weights=tuple(weight for _, weight in chosen),
        shared_tokens=tuple(one.shared_tokens for one, _ in chosen),
        mean_distance=distance,
        p95_distance=_quantile(np.concatenate(all_distances), np.concatenate(all_weights), 0.95),
        mean_context_error=error,
        context_bias=sum(weight * one.load.total_context for one, weight in chosen) / mean - 1.0,
    )


def features(snapshots: Sequence[Snapshot]) -> Floats:
    """[n, 11] of log2: sequences, total context, queries; what sharing saves; quantiles of contexts and of queries."""
    rows = []
    for load, shared_tokens in snapshots:
        spread = np.quantile(np.array(load.context_lens), QUANTILES)
        queries = np.quantile(np.array(load.query_lens), QUERY_QUANTILES)
        main = np.log2([load.num_seqs, load.total_context, load.total_q])
        rest = np.log2([*spread, *np.maximum(queries, 1.0)])
        rows.append(np.concatenate([main, [_sharing(load, shared_tokens)], QUANTILE_WEIGHT * rest]))
    return np.array(rows)


def _sharing(load: Workload, shared_tokens: int) -> float:
    """Doublings of the tokens that a step would read if each shared one were read once. A sequence that waits in the
    cache may share as well, so that there can be more shared tokens than a batch has."""
    total = load.total_context
    return float(np.log2(total / max(total - shared_tokens, load.max_context_len)))


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    """The smallest value that the share of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, share * reached[-1] * (1 - 1e-12))])


def k_medoids(distances: Floats, count: int) -> npt.NDArray[np.intp]:
    """Indices of `count` points that make the sum of distances to the nearest of them small.

    Greedy start, then the best swap of a medoid for another point until none helps. `distances` [n, n].
    """
    medoids = [int(np.argmin(distances.sum(axis=0)))]
    while len(medoids) < count:
        nearest = distances[:, medoids].min(axis=1)
        gains = np.maximum(nearest[:, None] - distances, 0.0).sum(axis=0)
        gains[medoids] = -1.0
        medoids.append(int(np.argmax(gains)))
    while True:
        position, point, gain = _best_swap(distances, medoids)
        # the tolerance keeps rounding from swapping equals for ever
        if gain <= 1e-9 * max(1.0, float(distances[:, medoids].min(axis=1).sum())):
            return np.array(sorted(medoids), dtype=np.intp)
        medoids[position] = point


def _best_swap(distances: Floats, medoids: list[int]) -> tuple[int, int, float]:
    """Which medoid to give up for which point, and by how much the sum of distances falls."""
    to_medoids = distances[:, medoids]
    cost = to_medoids.min(axis=1).sum()
    best = (0, medoids[0], 0.0)
    for position in range(len(medoids)):
        others = np.delete(to_medoids, position, axis=1)
        without = others.min(axis=1) if others.shape[1] else np.full(len(distances), np.inf)
        costs = np.minimum(without[:, None], distances).sum(axis=0)
        point = int(np.argmin(costs))
        if cost - costs[point] > best[2]:
            best = (position, point, float(cost - costs[point]))
    return best


def _distances(points: Floats) -> Floats:
    """Euclidean, [n, n]; feature by feature, so that equal points are exactly 0 apart on every machine."""
    squares = np.zeros((len(points), len(points)))
    for feature in points.T:
        squares += (feature[:, None] - feature[None, :]) ** 2
    return np.sqrt(squares)


def _sizes(shares: Sequence[float], count: int) -> list[int]:
    """How many of `count` representatives each kind gets: by its share, but no kind none."""
    if count < len(shares):
        raise ValueError(f"count must be at least {len(shares)}, one a kind of step, got {count}")
    if len(shares) == 1:
        return [count]
    least = min(LEAST_A_KIND, count // 2)
    first = min(max(round(count * shares[0]), least), count - least)
    return [first, count - first]
