"""The grades of an answer, how far a batch may be from what was measured, and how much to trust the answer.

A grade is a rung of the ladder, the best first:

    exact      tuned for this kernel (spec, layout, code) on this device, and on this very batch where one is asked for
    near       tuned on this device: the nearest batch within `RADIUS`, or another layout whose variants are legal here
    arch       tuned on another product of this architecture
    other_arch tuned on another architecture, where the variants are feasible here
    predicted  the cost model's choice
    default    the default variant

and "reference" where no generated kernel serves the spec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagegen.spec import Workload

EXACT, NEAR, ARCH, OTHER_ARCH, PREDICTED, DEFAULT = "exact", "near", "arch", "other_arch", "predicted", "default"
GRADES = (EXACT, NEAR, ARCH, OTHER_ARCH, PREDICTED, DEFAULT)
REFERENCE = "reference"

HIGH, MEDIUM, LOW, NONE = "high", "medium", "low", "none"

# A tuned choice holds for batches up to so far away: a factor of 8 in one of the axes, or of 4 in two of them.
# Assumption: what decides between variants (programs a multiprocessor, keys a program) moves with these factors, and
# profiles hold batches that are a factor of 2 to 4 apart.
RADIUS = 3.0
"""How far away, in doublings, a batch may be that a tuned choice still holds for."""
# Distance of two batches that are alike in every figure compared, yet not the same.
UNLIKE_IN_DETAIL = 0.01
# Where a batch's context lengths are compared: how short, how long, and in between.
QUANTILES = (0.1, 0.5, 0.9, 1.0)


def axes(a: Workload, b: Workload) -> dict[str, float]:
    """How far two batches are apart in doublings, by axis: sequences; context lengths (the root mean square over their
    quantiles); query lengths (of the longest and of the mean)."""
    contexts = [_doublings(x, y) for x, y in zip(_quantiles(a.context_lens), _quantiles(b.context_lens), strict=True)]
    queries = [
        _doublings(a.max_query_len, b.max_query_len), _doublings(a.total_q / a.num_seqs, b.total_q / b.num_seqs)
    ]  # fmt: skip
    return {
        "batch": _doublings(a.num_seqs, b.num_seqs),
        "context": math.sqrt(sum(d * d for d in contexts) / len(contexts)),
        "query": math.sqrt(sum(d * d for d in queries) / len(queries)),
    }


def workload_distance(a: Workload, b: Workload) -> float:
    """How unlike two batches are: the Euclidean length of `axes`. 0 for the same batch only; infinite between decode
    and batches with longer queries, which other kernels serve."""
    if a == b:
        return 0.0
    if a.is_decode != b.is_decode:
        return math.inf
    return max(math.hypot(*axes(a, b).values()), UNLIKE_IN_DETAIL)


def _quantiles(lengths: Sequence[int]) -> list[float]:
    ordered = sorted(lengths)
    found = []
    for share in QUANTILES:
        at = share * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (at - low) * (ordered[high] - ordered[low]))
    return found


def _doublings(a: float, b: float) -> float:
    return abs(math.log2(1 + a) - math.log2(1 + b))


def confidence(grade: str, measured: bool, distance: float) -> str:
    """How much to trust an answer: "high" for times taken on this device for this kernel at most one doubling away,
    "medium" for others of this device, "low" for another device's and for predictions, "none" for the default."""
    if grade == DEFAULT:
        return NONE
    if not measured or grade not in (EXACT, NEAR):
        return LOW
    return HIGH if distance <= 1.0 else MEDIUM
