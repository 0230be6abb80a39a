"""Search strategies: which variants to try next, given how the ones tried compare with the start.

A strategy is a generator. It yields batches of variants, each to be measured side by side, and is sent the scores
of everything measured so far: time relative to the start's (1.0: as fast), lower is better. A variant that failed or
was not measured has no score.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

from pagegen.spec import Variant
from pagegen_autotune.space import Space, resources

Scores = Mapping[Variant, float]
Search = Generator[list[Variant], Scores, None]
Strategy = Callable[[Space], Search]

# A step below 1 % is not worth following: pairs of the very same kernel differ by more from round to round.
STEP_GAIN = 0.99
# The neighbourhood of the start, then twice around the best so far: bounds what following noise may cost.
MAX_STEPS = 3


def exhaustive(space: Space) -> Search:
    """Every legal variant, in one batch."""
    yield [v for v in space.grid() if v != space.start]


def coordinate(space: Space) -> Search:
    """The neighbourhood of the start; then the combination of every axis's gain and the neighbourhood of the best
    so far, until nothing improves."""
    here, scores = space.start, {space.start: 1.0}
    tried = {here}
    for _ in range(MAX_STEPS):
        around = space.neighbours(here)
        fresh = [v for v in around if v not in tried]
        tried.update(fresh)
        scores = {**scores, **(yield fresh)}
        gains = [v for v in _ranked(around, scores) if scores[v] < scores[here] * STEP_GAIN]
        if not gains:
            return
        together = [v for v in space.combine(here, gains) if v not in tried]
        tried.update(together)
        if together:
            scores = {**scores, **(yield together)}
        here = _ranked([*gains, *together], scores)[0]


def given(variants: Sequence[Variant]) -> Search:
    """These variants, in one batch: nothing is searched."""
    if variants:
        yield list(variants)


def _ranked(variants: list[Variant], scores: Scores) -> list[Variant]:
    """Those that have a score, best first; equal ones by resources, then name, so that a rerun takes the same path."""
    return sorted((v for v in variants if v in scores), key=lambda v: (scores[v], resources(v), v.name))


STRATEGIES: dict[str, Strategy] = {"coordinate": coordinate, "exhaustive": exhaustive}
