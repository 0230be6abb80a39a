"""Trials compared: a variant against the default, round by round.

Only samples of the same round are compared with one another: the read bandwidth of one machine was seen to change
1.7-fold within a search, so medians of different minutes say nothing about each other.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pagegen.spec import Measurement, Status, Variant, Workload
from pagegen.spec.result import BASELINE, COMPARE, CONFIRM, PURPOSE, SEARCH, SESSION

# A gain below 2 % is no reason to leave the default.
MARGIN = 0.02
# One-sided sign test over the rounds: 4 of 4, 6 of 7, 8 of 9 or 8 of 10 won rounds pass, 3 of 3 do not.
MAX_P = 0.0625
# The best of many noisy numbers flatters itself: winners measured again scored 0.94 of what their search had shown.
# So a variant replaces the default only on samples that played no part in finding it, at least so many rounds.
MIN_FRESH_ROUNDS = 4
# A thread that loses its core in the middle of a call makes it up to 50 times as long. Within a round a ratio counts
# between 0.8 and 1.25: with one sample in ten hit so and 3 % noise, a true gain of 10 % over eight workloads was found
# in 95 of 100 simulated confirmations, against 9 with whole times summed, and equal variants passed in fewer than 1.
MAX_RATIO = 1.25

Loads = Sequence[tuple[Workload, float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A variant against the default over the workloads of a class, round by round.

    `by_workload` holds each workload's median over rounds of (variant's time / default's time), `ratio` their mean by
    the workloads' shares of the default's time: below 1 is faster. A round is won when the same mean of its own ratios
    is below 1; `p` is the probability of winning so many by luck (one-sided sign test). `fresh`: on samples that the
    search had not seen.
    """

    variant: Variant
    ratio: float
    rounds: int
    won: int
    p: float
    fresh: bool
    by_workload: Mapping[Workload, float] = field(repr=False)

    @property
    def improves(self) -> bool:
        """Whether the variant is faster than the default beyond noise, on fresh samples."""
        return self.fresh and self.rounds >= MIN_FRESH_ROUNDS and self.ratio <= 1 - MARGIN and self.p <= MAX_P

    @property
    def statement(self) -> str:
        """How sure it is, in words."""
        return f"won {self.won} of {self.rounds} {'fresh ' if self.fresh else ''}rounds, p = {self.p:.2g}"


class Evidence:
    """The trials of one layout, indexed for comparisons with the default of a class."""

    def __init__(self, trials: Iterable[Measurement], default: Variant) -> None:
        self.default = default
        self.failed: set[Variant] = set()
        self.count = 0
        self._by_key: dict[tuple[Variant, Workload], list[Measurement]] = defaultdict(list)
        for trial in trials:
            self.count += 1
            if trial.status is Status.OK:
                self._by_key[trial.variant, trial.workload].append(trial)
            else:
                self.failed.add(trial.variant)

    @property
    def variants(self) -> list[Variant]:
        """Those with a successful trial and no failed one, the default left out, by name."""
        found = {variant for variant, _ in self._by_key} - self.failed - {self.default}
        return sorted(found, key=lambda v: v.name)

    def default_us(self, workload: Workload) -> float | None:
        """The default's median: of the rounds over all layouts where there were any, so that layouts compare, or else
        of everything; None before its first trial."""
        return self._median(workload, COMPARE) or self._median(workload, None)

    def cost_us(self, workload: Workload) -> float:
        """The default's median when the run began, 0 before. It weighs workloads, and later trials do not move it: a
        repeated run sees the same ratios and takes the same steps."""
        return self._median(workload, BASELINE) or self._median(workload, None) or 0.0

    def _median(self, workload: Workload, purpose: str | None) -> float | None:
        found = self._by_key[self.default, workload]
        samples = [s for t in found if purpose in (None, t.environment.get(PURPOSE)) for s in t.samples_us]
        return statistics.median(samples) if samples else None

    def pairs(self, variant: Variant, workload: Workload, *, fresh: bool) -> list[tuple[float, float]]:
        """(variant, default) samples of the same rounds: those of the search, or the fresh ones of a confirmation."""
        purpose = CONFIRM if fresh else SEARCH
        bases = {t.environment.get(SESSION): t for t in self._by_key[self.default, workload]}
        found: list[tuple[float, float]] = []
        for trial in self._by_key[variant, workload]:
            base = bases.get(trial.environment.get(SESSION, ""))
            if base is not None and trial.environment.get(PURPOSE) == purpose:
                found += zip(trial.samples_us, base.samples_us, strict=False)  # an interrupted round is not complete
        return found

    def sessions(self, variant: Variant, workload: Workload, purpose: str) -> set[str]:
        """The sessions of some purpose in which the variant was measured for enough rounds."""
        found = [t for t in self._by_key[variant, workload] if t.environment.get(PURPOSE) == purpose]
        return {t.environment.get(SESSION, "") for t in found if len(t.samples_us) >= MIN_FRESH_ROUNDS}

    def compare(self, variant: Variant, loads: Loads, *, fresh: bool) -> Comparison | None:
        """`variant` against the default over all of `loads`; None where one was not measured."""
        pairs = {w: self.pairs(variant, w, fresh=fresh) for w, _ in loads}
        if not all(pairs.values()) or not pairs:
            return None
        costs = {w: weight * self.cost_us(w) for w, weight in loads}
        return _compare(variant, pairs, costs, fresh)

    def comparisons(self, loads: Loads, *, fresh: bool) -> list[Comparison]:
        """All variants measured on all of `loads`."""
        found = (self.compare(v, loads, fresh=fresh) for v in self.variants)
        return [c for c in found if c is not None]


def _compare(
    variant: Variant,
    pairs: Mapping[Workload, list[tuple[float, float]]],
    costs: Mapping[Workload, float],
    fresh: bool,
) -> Comparison:
    rounds = min(map(len, pairs.values()))
    total = sum(costs.values())
    ratios = {w: [v / d for v, d in found] for w, found in pairs.items()}
    single = {w: statistics.median(found) for w, found in ratios.items()}

    def of_round(number: int) -> float:
        return sum(costs[w] * min(max(r[number], 1 / MAX_RATIO), MAX_RATIO) for w, r in ratios.items()) / total

    won = sum(of_round(number) < 1 for number in range(rounds))
    return Comparison(
        variant=variant,
        ratio=sum(costs[w] * single[w] for w in ratios) / total,
        rounds=rounds,
        won=won,
        p=sum(math.comb(rounds, k) for k in range(won, rounds + 1)) / 2**rounds,
        fresh=fresh,
        by_workload=single,
    )
