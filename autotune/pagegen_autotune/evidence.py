"""Trials compared: a variant against the default, round by round.

Only samples of the same round are compared with one another: the read bandwidth of one machine was seen to change
1.7-fold within a search, so medians of different minutes say nothing about each other.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pagegen.spec import Measurement, Status, Variant, Workload
from pagegen.spec.result import AFTER, BASELINE, COMPARE, CONFIRM, GAUGE, PURPOSE, SEARCH, SESSION
from pagegen_autotune.objective import Loads, Objective, mean

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
# The first words of what is said of a trial that a race left out before its last round: there is no more to measure.
ELIMINATED = "eliminated"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A variant against the default (or another) over the workloads of a class, round by round.

    `by_workload` holds each workload's median over rounds of (variant's time / default's time), `ratio` the objective
    of the times that they make over that of the default's: below 1 is faster. A round is won when the same ratio of
    its own times is below 1; `p` is the probability of winning so many by luck (one-sided sign test). `fresh`: on
    samples that the search had not seen.
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


def _shift(workload: Workload, others: Iterable[Workload], ratios: Iterable[Mapping[Workload, float]]) -> float:
    """How many times as high as on `others` the variants' ratios on a workload are, in the median of those that were
    measured on all; 1 where none were."""
    beside = [known for known in ratios if workload in known and all(w in known for w in others)]
    found = [known[workload] / statistics.geometric_mean(known[w] for w in others) for known in beside]
    return statistics.median(found) if found else 1.0


class Evidence:
    """The trials of one layout, indexed for comparisons with the default of a class by an objective."""

    def __init__(self, trials: Iterable[Measurement], default: Variant, objective: Objective = mean) -> None:
        self.default = default
        self.objective = objective
        self.failed: set[Variant] = set()
        self.count = 0
        self._by_key: dict[tuple[Variant, Workload], list[Measurement]] = defaultdict(list)
        self._ratio: dict[tuple[Variant, Workload], float | None] = {}
        for trial in trials:
            self.count += 1
            if trial.status is Status.OK:
                self._by_key[trial.variant, trial.workload].append(trial)
            else:
                self.failed.add(trial.variant)

    @functools.cached_property
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

    def pairs(
        self, variant: Variant, workload: Workload, *, fresh: bool, base: Variant | None = None
    ) -> list[tuple[float, float]]:
        """(variant, default) samples of the same rounds: those of the search, or the fresh ones of a confirmation.
        `base` takes the default's place."""
        purpose = CONFIRM if fresh else SEARCH
        bases = {t.environment.get(SESSION): t for t in self._by_key[base or self.default, workload]}
        found: list[tuple[float, float]] = []
        for trial in self._by_key[variant, workload]:
            other = bases.get(trial.environment.get(SESSION, ""))
            if other is not None and trial.environment.get(PURPOSE) == purpose:
                found += zip(trial.samples_us, other.samples_us, strict=False)  # an interrupted round is not complete
        return found

    def eliminated(self, variant: Variant, workload: Workload) -> bool:
        """Whether a race showed the variant to be slower than the best on this workload."""
        return any(t.detail.startswith(ELIMINATED) for t in self._by_key[variant, workload])

    def ratios(self, loads: Loads) -> dict[Variant, dict[Workload, float]]:
        """Each variant's median ratios to the default, by the search's samples, on those of `loads` it was measured
        on."""
        found: dict[Variant, dict[Workload, float]] = {}
        for variant in self.variants:
            known = {w: ratio for w, _ in loads if (ratio := self._searched(variant, w)) is not None}
            if known:
                found[variant] = known
        return found

    def _searched(self, variant: Variant, workload: Workload) -> float | None:
        key = variant, workload
        if key not in self._ratio:
            taken = self.pairs(variant, workload, fresh=False)
            self._ratio[key] = statistics.median(v / d for v, d in taken) if taken else None
        return self._ratio[key]

    @property
    def gauge_gb_s(self) -> list[float]:
        """What the gauge said beside all samples, in no order."""
        told = (trial.environment.get(GAUGE, "") for found in self._by_key.values() for trial in found)
        return [float(reading) for text in told for reading in text.split()]

    def scores(self, loads: Loads, *, among: Iterable[Variant] | None = None) -> dict[Variant, float]:
        """The objective of each variant (of those `among`) over the default's: what a search goes by. A decision rests
        on more. On a batch that a variant was not measured on it is taken to be what the others that were are, from
        its other batches on: scores over different batches do not compare."""
        ratios = self.ratios(loads)
        known = ratios if among is None else {v: ratios[v] for v in among if v in ratios}
        base = {w: self.cost_us(w) for w, _ in loads if any(w in mine for mine in known.values())}
        part = [(w, weight) for w, weight in loads if w in base]

        @functools.cache
        def shift(workload: Workload, others: tuple[Workload, ...]) -> float:
            return _shift(workload, others, known.values())

        def us(workload: Workload, mine: Mapping[Workload, float]) -> float:
            if workload in mine:
                return base[workload] * mine[workload]
            return base[workload] * statistics.geometric_mean(mine.values()) * shift(workload, tuple(mine))

        return {
            v: self.objective({w: us(w, mine) for w in base}, part) / self.objective(base, part)
            for v, mine in known.items()
        }

    def drift(self, loads: Loads) -> float | None:
        """The default's time at the end of the run over that at its beginning, the median over the workloads that were
        measured both times; None before."""
        found = []
        for workload, _ in loads:
            before, after = self._median(workload, BASELINE), self._median(workload, AFTER)
            found += [after / before] if before and after else []
        return statistics.median(found) if found else None

    def sessions(self, variant: Variant, workload: Workload, purpose: str) -> set[str]:
        """The sessions of some purpose in which the variant was measured for enough rounds."""
        found = [t for t in self._by_key[variant, workload] if t.environment.get(PURPOSE) == purpose]
        return {t.environment.get(SESSION, "") for t in found if len(t.samples_us) >= MIN_FRESH_ROUNDS}

    def compare(self, variant: Variant, loads: Loads, *, fresh: bool, base: Variant | None = None) -> Comparison | None:
        """`variant` against the default (or `base`) over all of `loads`; None where one was not measured."""
        pairs = {w: self.pairs(variant, w, fresh=fresh, base=base) for w, _ in loads}
        if not all(pairs.values()) or not pairs:
            return None
        return self._compare(variant, {w: [v / d for v, d in found] for w, found in pairs.items()}, loads, fresh)

    def comparisons(self, loads: Loads, *, fresh: bool) -> list[Comparison]:
        """All variants measured on all of `loads`."""
        found = (self.compare(v, loads, fresh=fresh) for v in self.variants)
        return [c for c in found if c is not None]

    def _compare(
        self, variant: Variant, ratios: Mapping[Workload, list[float]], loads: Loads, fresh: bool
    ) -> Comparison:
        rounds = min(map(len, ratios.values()))
        base = {w: self.cost_us(w) for w, _ in loads}
        single = {w: statistics.median(found) for w, found in ratios.items()}

        def over_base(by_workload: Mapping[Workload, float]) -> float:
            times = {w: base[w] * by_workload[w] for w in base}
            return self.objective(times, loads) / self.objective(base, loads)

        def of_round(number: int) -> float:
            return over_base({w: min(max(r[number], 1 / MAX_RATIO), MAX_RATIO) for w, r in ratios.items()})

        won = sum(of_round(number) < 1 for number in range(rounds))
        return Comparison(
            variant=variant,
            ratio=over_base(single),
            rounds=rounds,
            won=won,
            p=sum(math.comb(rounds, k) for k in range(won, rounds + 1)) / 2**rounds,
            fresh=fresh,
            by_workload=single,
        )
