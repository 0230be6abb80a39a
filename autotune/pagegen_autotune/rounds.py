"""Rounds: contenders timed one after the other, in another order each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pagegen.spec import Status
from pagegen_autotune.measure import classify

Contender = TypeVar("Contender")


@dataclass
class Rounds(Generic[Contender]):
    """Samples by contender, the i-th of each taken in the i-th round, with the gauge's reading before each (GB/s; none
    where there is no gauge), those that failed on the way, and those that were eliminated: how many times as slow as
    the leader they are at least."""

    samples: dict[Contender, list[float]] = field(default_factory=dict)
    gauge: dict[Contender, list[float]] = field(default_factory=dict)
    failures: dict[Contender, tuple[Status, str]] = field(default_factory=dict)
    out: dict[Contender, float] = field(default_factory=dict)


def interleave(
    contenders: Sequence[Contender],
    sample: Callable[[Contender], float],
    into: Rounds[Contender],
    *,
    rounds: int,
    rng: random.Random,
    more: Callable[[], bool],
    gauge: Callable[[], float | None] = lambda: None,
    judge: Callable[[Mapping[Contender, Sequence[float]]], Mapping[Contender, float]] | None = None,
) -> None:
    """Up to `rounds` rounds over `contenders`, in an order shuffled anew each round, so that neither drift nor what a
    neighbour leaves in the caches favours one. The first round is always finished; `more` is asked before each
    other. After each round `judge` may name those to leave out from then on; a race ends when only the first is left.
    Whatever happens, `into` holds what was measured until then."""
    into.samples.update({c: [] for c in contenders})
    into.gauge.update({c: [] for c in contenders})
    for number in range(rounds):
        alive = [c for c in contenders if c not in into.failures and c not in into.out]
        if number and (not more() or (into.out and len(alive) < 2)):
            return
        rng.shuffle(order := list(alive))
        for contender in order:
            try:
                reading = gauge()
                into.samples[contender].append(sample(contender))
                into.gauge[contender] += [] if reading is None else [reading]
            except Exception as error:  # a candidate may fail in any way: its failure is its result
                into.failures[contender] = classify(error)
                into.samples[contender].clear()
                into.gauge[contender].clear()
        if judge is not None:
            into.out.update(judge({c: into.samples[c] for c in alive if c not in into.failures}))
