"""What a choice loses against choosing the best variant for every batch, and how sure that is.

The best of many noisy times is too good: by its luck it would make any choice look bad. So the best is found on every
other round and judged on the rest, and the other way about. The confidence comes from drawing the rounds anew (with
replacement) and doing all of it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagegen.spec import Variant, Workload
from pagegen_autotune.evidence import Evidence
from pagegen_autotune.objective import Loads

CONFIDENCE = 0.95
DRAWS = 200
# Further from the best than this nobody is the best by the luck of a draw; it saves drawing them.
NEAR = 1.15

_Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Regret:
    """The excess of a choice over the best variant of every workload, as a share: `expected`, what it is at most at
    CONFIDENCE (`at_most`), and by workload."""

    expected: float
    at_most: float
    by_workload: Mapping[Workload, float]


def regret(evidence: Evidence, loads: Loads, chosen: Mapping[Workload, Variant], *, draws: int = DRAWS) -> Regret:
    """The regret of serving each workload by its variant of `chosen`, by the evidence's objective. Without `draws` it
    is at most what is expected."""
    rng = np.random.default_rng(0)
    taken = {w: _drawn(evidence, w, chosen[w], rng, draws) for w, _ in loads}
    base = {w: evidence.cost_us(w) for w, _ in loads}

    def of(draw: int) -> float:
        ours = evidence.objective({w: base[w] * own[draw] for w, (own, _) in taken.items()}, loads)
        best = evidence.objective({w: base[w] * ideal[draw] for w, (_, ideal) in taken.items()}, loads)
        return float(ours / best - 1)

    expected, *drawn = (of(draw) for draw in range(draws + 1))
    return Regret(
        expected=max(0.0, expected),
        at_most=max(0.0, expected, *([float(np.quantile(drawn, CONFIDENCE))] if drawn else [])),
        by_workload={w: max(0.0, float(own[0] / ideal[0]) - 1) for w, (own, ideal) in taken.items()},
    )


def _drawn(
    evidence: Evidence, workload: Workload, own: Variant, rng: np.random.Generator, draws: int
) -> tuple[_Values, _Values]:
    """Ratios to the default of `own` and of the best variant, [draws + 1] each, the first as measured."""
    rounds = {v: evidence.pairs(v, workload, fresh=False) for v in evidence.variants}
    ratios = {v: np.array([a / b for a, b in pairs]) for v, pairs in rounds.items() if pairs}
    fresh = np.array([a / b for a, b in evidence.pairs(own, workload, fresh=True)])
    mine = np.ones(1) if own == evidence.default else fresh if len(fresh) else ratios[own]
    limit = NEAR * min([1.0, *(float(np.median(found)) for found in ratios.values())])
    near = [found for found in ratios.values() if np.median(found) <= limit]
    near.append(np.ones(2))  # the default
    first = np.stack([_medians(found[::2], rng, draws) for found in near])
    second = np.stack([_medians(found[1::2] if len(found) > 1 else found, rng, draws) for found in near])
    picked, judged = first.argmin(axis=0), second.argmin(axis=0)
    every = np.arange(draws + 1)
    return _medians(mine, rng, draws), (second[picked, every] + first[judged, every]) / 2


def _medians(found: _Values, rng: np.random.Generator, draws: int) -> _Values:
    """The median, then those of `draws` samples of the same size."""
    drawn = found[rng.integers(0, len(found), size=(draws, len(found)))]
    result: _Values = np.concatenate([[np.median(found)], np.median(drawn, axis=1)])
    return result
