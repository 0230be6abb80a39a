"""What is worth measuring on which batches: the search looks around on two, and only what is near the best on one of
them is measured on the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pagegen.spec import Variant, Workload
from pagegen_autotune.evidence import Evidence
from pagegen_autotune.objective import Loads

# Five rounds make a median; a trial with fewer is measured again by the next run, unless it was eliminated. While the
# search looks around it takes no more: its next step rests on all the trials so far, not on one.
ENOUGH_ROUNDS = 5
# The batches that the search looks around on: the heaviest, and the one that differs most from it among those with a
# twentieth of the time or more. A variant that takes over 5 % longer than the best on both is not measured on the
# class's others; one that takes over 25 % longer on the first not even on the second.
PROBES, PROBE_SHARE, REACH, FAR = 2, 0.05, 0.05, 0.25


def probes(evidence: Evidence, loads: Loads, reach: float) -> Loads:
    """The batches that the search looks around on; all of them where no variant is too far behind."""
    first = order(evidence, loads)[:PROBES] if math.isfinite(reach) else list(dict(loads))
    return [load for load in loads if load[0] in first]


def order(evidence: Evidence, loads: Loads) -> list[Workload]:
    """The batches, those that the objective gains most from first (for the mean: those that take the most time); but
    the second is the one that differs most from the first, so that a variant for other batches is not judged by the
    first alone."""
    base = {w: evidence.cost_us(w) for w, _ in loads}
    whole = evidence.objective(base, loads)
    cost = {w: whole - evidence.objective({**base, w: us / 2}, loads) for w, us in base.items()}
    found = sorted(cost, key=lambda w: -cost[w])
    least = PROBE_SHARE * sum(cost.values())
    size = {w: math.log(max(1, w.total_context + w.total_q)) for w in found}
    other = max(found, key=lambda w: (cost[w] >= least) * abs(size[w] - size[found[0]]))
    return list(dict.fromkeys([found[0], other, *found]))


def pending(
    evidence: Evidence, loads: Loads, variants: Sequence[Variant], wanted: Loads, reach: float
) -> dict[Variant, list[Workload]]:
    """Those of the `wanted` batches on which each of `variants` lacks rounds beside the default, for those that lack
    any: not where it failed, was eliminated, or is further than `reach` behind on all of `loads` so far, the probes
    included."""
    known = evidence.ratios(loads)
    least = {w: min([1.0, *(ratios[w] for ratios in known.values() if w in ratios)]) for w, _ in loads}
    first, *others = order(evidence, loads)
    found = {}
    for variant in variants:
        mine = known.get(variant, {})
        behind = {w: ratio / least[w] - 1 for w, ratio in mine.items()}
        probed = all(w in mine for w in (first, *others[:1])) or behind.get(first, 0.0) > FAR
        far = probed and min(behind.values(), default=0.0) > reach
        lacking = [
            w for w, _ in wanted
            if len(evidence.pairs(variant, w, fresh=False)) < ENOUGH_ROUNDS and not evidence.eliminated(variant, w)
        ]  # fmt: skip
        if lacking and not far and variant not in evidence.failed:
            found[variant] = lacking
    return found


def best_known(evidence: Evidence, workload: Workload) -> float | None:
    """The best ratio to the default that enough rounds showed on a batch, None before any did."""
    found = [
        statistics.median(v / d for v, d in pairs)
        for variant in evidence.variants
        if len(pairs := evidence.pairs(variant, workload, fresh=False)) >= ENOUGH_ROUNDS
    ]
    return min(found, default=None)
