"""What a choice of variants is judged by: the times of a class's batches, by weight, as one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pagegen.spec import Workload

Loads = Sequence[tuple[Workload, float]]
Times = Mapping[Workload, float]
# The share of steps, the slowest ones, whose mean "cvar" is.
TAIL = 0.05


def mean(times: Times, loads: Loads) -> float:
    """The expected time of a step."""
    return sum(weight * times[w] for w, weight in loads) / sum(weight for _, weight in loads)


def p99(times: Times, loads: Loads) -> float:
    """The time that 99 % of the steps do not exceed."""
    return _quantile(times, loads, 0.99)


def cvar(times: Times, loads: Loads) -> float:
    """The mean of the slowest 5 % of the steps (conditional value at risk): a batch counts in part where the border
    lies inside it."""
    left = TAIL * sum(weight for _, weight in loads)
    whole, total = left, 0.0
    for workload, weight in sorted(loads, key=lambda load: -times[load[0]]):
        taken = min(weight, left)
        total, left = total + taken * times[workload], left - taken
    return total / whole


def _quantile(times: Times, loads: Loads, share: float) -> float:
    by_time = sorted(loads, key=lambda load: times[load[0]])
    wanted = share * sum(weight for _, weight in loads) * (1 - 1e-12)
    passed = 0.0
    for workload, weight in by_time:
        passed += weight
        if passed >= wanted:
            return times[workload]
    return times[by_time[-1][0]]


Objective = Callable[[Times, Loads], float]
OBJECTIVES: dict[str, Objective] = {"mean": mean, "p99": p99, "cvar": cvar}
