"""What measured variants say of the ones that were not: a Gaussian process over the fields of a variant.

The logarithm of a variant's time, over the start's, is taken as a sum of effects of single fields, of pairs of fields,
and of a factor on what the cost model expects; values of a field that are near one another by factors have much of
their effect in common. After a handful of trials that is enough to name what is worth the next ones, and it says how
unsure it is where it knows little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from pagegen.spec import Variant

# Standard deviations before any trial, as logarithms: an effect of one field, of a pair; how much of the cost model's
# difference is believed; how far off a score is.
EFFECT, PAIR, PRIOR_FACTOR, NOISE = 0.15, 0.08, 0.5, 0.02
# Values a factor of two apart have so much of their effect in common; others none.
NEAR = 0.5

_Values = npt.NDArray[np.float64]


class Surrogate:
    """Fitted to `scores` (a variant's time over the start's). `prior` is the logarithm of what a model expects of a
    variant, over the start's."""

    def __init__(self, scores: Mapping[Variant, float], prior: Callable[[Variant], float] | None) -> None:
        self._known = list(scores)
        self._prior = prior
        covariance = self._covariance(self._known) + NOISE**2 * np.eye(len(scores))
        self._factor = np.linalg.cholesky(covariance)
        values = np.log(np.array(list(scores.values())))
        self._weights = np.linalg.solve(covariance, values)

    def optimistic(self, variants: Sequence[Variant], doubt: float) -> dict[Variant, float]:
        """The score that each of `variants` may have: the expected one less `doubt` standard deviations."""
        if not variants:
            return {}
        cross = self._covariance(variants)
        expected = cross @ self._weights
        explained = np.square(np.linalg.solve(self._factor, cross.T)).sum(axis=0)
        spread = np.sqrt(np.maximum(self._variance(variants) - explained, 0.0))
        return dict(zip(variants, np.exp(expected - doubt * spread).tolist(), strict=True))

    def _covariance(self, variants: Sequence[Variant]) -> _Values:
        """[variants, known]"""
        alike = [_alike([getattr(v, f.name) for v in variants], [getattr(v, f.name) for v in self._known])
                 for f in fields(self._known[0])]  # fmt: skip
        single: _Values = np.sum(alike, axis=0)
        pairs = (single**2 - np.sum(np.square(alike), axis=0)) / 2
        told = np.outer(self._told(variants), self._told(self._known))
        found: _Values = EFFECT**2 * single + PAIR**2 * pairs + PRIOR_FACTOR**2 * told
        return found

    def _variance(self, variants: Sequence[Variant]) -> _Values:
        count = len(fields(self._known[0]))
        fixed = EFFECT**2 * count + PAIR**2 * count * (count - 1) / 2
        return fixed + PRIOR_FACTOR**2 * np.square(self._told(variants))

    def _told(self, variants: Sequence[Variant]) -> _Values:
        return np.array([0.0 if self._prior is None else self._prior(v) for v in variants])


def _alike(ours: Sequence[Any], theirs: Sequence[Any]) -> _Values:
    """[ours, theirs]: 1 for equal values, less for numbers that differ by factors, 0 for others."""
    known: dict[tuple[Any, Any], float] = {}
    for a in dict.fromkeys(ours):
        for b in dict.fromkeys(theirs):
            apart = isinstance(a, int) and isinstance(b, int) and min(a, b) > 0
            known[a, b] = 1.0 if a == b else NEAR ** abs(math.log2(a / b)) if apart else 0.0
    return np.array([[known[a, b] for b in theirs] for a in ours])


def relative(prior: Callable[[Variant], float], start: Variant) -> Callable[[Variant], float]:
    """The logarithm of a prior over the start's; each variant is asked for once."""
    known: dict[Variant, float] = {}

    def of(variant: Variant) -> float:
        if variant not in known:
            known[variant] = math.log(max(prior(variant), 1e-9))
        return known[variant]

    base = of(start)
    return lambda variant: of(variant) - base
