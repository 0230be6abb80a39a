"""Sequential elimination: who is out of a race after some rounds, and how sure that is.

Contenders are compared by the paired differences of the same rounds, as logarithms: what slows a whole round cancels.
The noise of a difference is one for all contenders of a race, pooled over them and robust against rounds in which a
thread lost its core, so that two rounds are enough to see that something takes a third longer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

Contender = TypeVar("Contender")

# Of all eliminations of one race together: the chance that none of them removes a variant that ties with the leader.
# Simulated: of 150 races of 4 to 17 equal variants one goes wrong, and two with one sample in thirty 50 times as long.
CONFIDENCE = 0.95
# Variants within 1 % of the best are as good.
TIE = 0.01
# The first look; then one after every round, LOOKS in all.
FIRST_LOOK, LOOKS = 2, 6
# Degrees of freedom below which the pooled noise says too little.
MIN_FREEDOM = 8
# Deviations beyond three standard deviations count as three; with that, and medians in place of means, the estimate of
# the noise is as good as a plain one from half as many times.
USUAL, KEPT_FREEDOM = 3.0, 0.5
# A median is noisier than a mean by sqrt(pi / 2) where noise is normal; deviations to a standard deviation.
MEDIAN_LOSS, MAD_SCALE = 1.2533, 1.4826
# The smallest noise believed: timers and clocks are no better.
LEAST_NOISE = 0.002


def losers(samples: Mapping[Contender, Sequence[float]], *, best_known: float | None = None) -> dict[Contender, float]:
    """Those that are slower than the leader by more than a tie, and the least factor by which each is slower, all at
    CONFIDENCE together. `samples` hold the times of the rounds that all took part in, the default's first.

    `best_known` is a ratio to the default that was measured before: what does not reach it is out, too.
    """
    rounds = min(map(len, samples.values()), default=0)
    if rounds < FIRST_LOOK or (rounds - 1) * (len(samples) - 1) < MIN_FREEDOM:
        return {}
    default = next(iter(samples))
    logs = {c: [math.log(us) for us in taken[:rounds]] for c, taken in samples.items()}
    doubt = _doubt(list(logs.values()))
    leader = min(
        logs, key=lambda c: statistics.median(own - base for own, base in zip(logs[c], logs[default], strict=True))
    )
    found = {c: _gap(logs[c], logs[leader]) - doubt for c in samples if c != default}
    if best_known is not None:
        known = math.log(best_known)
        found = {c: max(least, _gap(logs[c], logs[default]) - known - doubt) for c, least in found.items()}
    return {c: math.exp(least) for c, least in found.items() if least > math.log1p(TIE)}


def _gap(own: Sequence[float], other: Sequence[float]) -> float:
    """How much longer it takes, as a logarithm: the lower third of the rounds, so that of two or three rounds all must
    be spoilt to count."""
    gaps = sorted(a - b for a, b in zip(own, other, strict=True))
    return gaps[(len(gaps) - 1) // 3]


def _doubt(logs: Sequence[Sequence[float]]) -> float:
    """What a gap may be off by, for all pairs of contenders (anyone may look like the leader) and all looks together.

    The noise of one time is pooled over all: what is left of its logarithm without the round's and the contender's
    median, spoilt times pulled in to the border of what is usual.
    """
    rounds = len(logs[0])
    by_round = [statistics.median(own[i] for own in logs) for i in range(rounds)]
    rest = [[own[i] - by_round[i] for i in range(rounds)] for own in logs]
    away = [abs(value - statistics.median(own)) for own in rest for value in own]
    border = USUAL * MAD_SCALE * statistics.median(away)
    freedom = (rounds - 1) * (len(logs) - 1)
    squares = math.fsum(min(value, border) ** 2 for value in away)
    noise = max(LEAST_NOISE, math.sqrt(squares / freedom))
    pairs = len(logs) * (len(logs) - 1)
    tail = (1 - CONFIDENCE) / (pairs * LOOKS)
    return student(tail, KEPT_FREEDOM * freedom) * MEDIAN_LOSS * noise * math.sqrt(2 / rounds)


def student(tail: float, freedom: float) -> float:
    """What a t variable of so many degrees of freedom exceeds with probability `tail`: the normal quantile and the
    first three terms of its expansion (Abramowitz and Stegun 26.7.5), within 4 % from 4 degrees and tails of 1e-3."""
    z = float(statistics.NormalDist().inv_cdf(1 - tail))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
