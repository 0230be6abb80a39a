"""Medians, ratios and percentiles of samples."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank). Raises ValueError
    for no values or a percentage outside 0..100."""
    ordered = sorted(values)
    if not ordered or not 0 <= percent <= 100:
        raise ValueError(f"percentile needs values and a percentage in 0..100, got {len(ordered)} and {percent}")
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def spread(samples: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median, least and most of the samples, and the samples themselves."""
    return {
        "median": round(statistics.median(samples), digits),
        "range": [round(min(samples), digits), round(max(samples), digits)],
        "samples": [round(sample, digits) for sample in samples],
    }


def ratio(samples: Sequence[float], over: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """How many times `over` the samples are, round by round: median, least and most."""
    found = [a / b for a, b in zip(samples, over, strict=True)]
    return {"median": round(statistics.median(found), digits), "range": [round(f(found), digits) for f in (min, max)]}


def interleaved(runs: dict[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[Any]]:
    """`rounds` results of each run, which take turns in an order that is drawn anew (seeded) each round. A first
    round is thrown away."""
    order, taken = list(runs), {key: list[Any]() for key in runs}
    shuffled = random.Random(0)
    for i in range(rounds + 1):
        shuffled.shuffle(order)
        for key in order:
            result = runs[key]()
            if i:
                taken[key].append(result)
    return taken
