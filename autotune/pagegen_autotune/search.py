"""Search strategies: which variants to try next, given how the ones tried compare with the start.

A strategy is a generator. It yields batches of variants, each to be measured side by side, and is sent the scores
of everything measured so far: time relative to the start's (1.0: as fast), lower is better. A variant that failed or
was not measured has no score.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

from pagegen.spec import Variant
from pagegen_autotune.space import Space, resources
from pagegen_autotune.surrogate import Surrogate, relative

Scores = Mapping[Variant, float]
Search = Generator[list[Variant], Scores, None]
Strategy = Callable[[Space], Search]

# A step below 1 % is not worth following: pairs of the very same kernel differ by more from round to round.
STEP_GAIN = 0.99
# The neighbourhood of the start, then twice around the best so far: bounds what following noise may cost.
MAX_STEPS = 3
# Guided: spaces up to so many variants are measured whole; of larger ones a share, and no more than MOST. Most leave
# after two rounds on one batch, so that their trials are a smaller share of all. With a share of 0.12 the replays of
# one recorded kernel reach the target in 79 %, with 0.2 in 92 % and more (bench/tuning.py).
SMALL, SHARE, MOST = 24, 0.2, 64
# Seeds and the model's favourites that join the start's neighbours in the first batch; the size of each batch after it.
SEEDS, FAVOURITES, BATCH = 4, 4, 6
STEPS = 4
# Batches in a row without a gain that end the search.
PATIENCE = 3
# Variants that the cost model is asked about beside the neighbours: it answers a thousand or two a second.
POOL = 160
# A variant is worth a trial for what it may be, not for what is expected of it.
DOUBT = 1.0


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


def guided(space: Space) -> Search:
    """The start's neighbourhood with what the cost model and similar devices' winners name; then, batch by batch, what
    a model of the trials so far holds for promising, until some in a row bring no gain or none is expected."""
    points = [v for v in space.points() if v != space.start]
    if len(points) <= SMALL:
        yield points
        return
    prior = None if space.prior is None else relative(space.prior, space.start)
    around = space.neighbours(space.start)
    pool = list(dict.fromkeys([*space.seeds, *around, *points[:: -(-len(points) // POOL)]]))
    favourites = [] if prior is None else sorted(pool, key=lambda v: (prior(v), resources(v), v.name))[:FAVOURITES]
    batch = list(dict.fromkeys([*space.seeds[:SEEDS], *around, *favourites]))
    limit = max(len(batch) + BATCH, min(MOST, round(SHARE * len(points))))
    scores: dict[Variant, float] = {space.start: 1.0}
    tried = {space.start}
    best, idle = 1.0, 0
    while batch and idle < PATIENCE:
        tried.update(batch)
        told = yield batch
        scores |= {v: told[v] for v in batch if v in told}  # and no others: a resumed run takes the same steps
        here = _ranked(list(scores), scores)[0]
        around = [*space.lines(here), *space.neighbours(here)]
        pool = list(dict.fromkeys([*pool, *around]))
        hoped = Surrogate(scores, prior).optimistic([v for v in pool if v not in tried], DOUBT)
        gained, best = scores[here] < best * STEP_GAIN, min(best, scores[here])
        idle = 0 if gained else idle + 1
        promising = [v for v in _ranked(list(hoped), hoped) if gained or hoped[v] < best * STEP_GAIN]
        # most of them a change of one field of the best so far: what three fields do together is not in the model
        steps = [v for v in promising if v in around][:STEPS]
        batch = list(dict.fromkeys([*steps, *promising]))[: min(BATCH, limit - len(tried) + 1)]


def given(variants: Sequence[Variant]) -> Search:
    """These variants, in one batch: nothing is searched."""
    if variants:
        yield list(variants)


def _ranked(variants: list[Variant], scores: Scores) -> list[Variant]:
    """Those that have a score, best first; equal ones by resources, then name, so that a rerun takes the same path."""
    return sorted((v for v in variants if v in scores), key=lambda v: (scores[v], resources(v), v.name))


STRATEGIES: dict[str, Strategy] = {"guided": guided, "coordinate": coordinate, "exhaustive": exhaustive}
