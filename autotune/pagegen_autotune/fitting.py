"""Coefficients of the cost model, fitted to the trials of one device (`pagegen.costs.Fit`).

A ridge on the logarithm of measured over predicted time: with few trials it stays near the unfitted model. How strong
it is, and how far the result is off, are told by cross-validation over batches: none is judged by coefficients that saw
a trial of the same batch. scikit-learn does both; it is an extra, and nothing else here needs it.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagegen import costs
from pagegen.costs.fitted import COST_MODEL as COST_MODEL
from pagegen.costs.fitted import features, logarithm
from pagegen.spec import AttentionSpec, CacheLayout, CompileFacts, Device, Measurement, Status, Variant, Workload

log = logging.getLogger(__name__)

# Fewer say more about these batches than about the device.
MIN_CASES, MIN_BATCHES = 24, 4
FOLDS = 5
# Strengths to choose from: nearly none, to nearly no effect of any coefficient.
STRENGTHS = tuple(10.0**k for k in range(-2, 5))
# No coefficient at all: one factor on everything.
LEVEL = math.inf

Floats = npt.NDArray[np.float64]
Range = tuple[float, float, float]


class MissingExtra(RuntimeError):
    """scikit-learn is not installed; the message says how to get it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to fit to: what the model says of a variant on a batch, and the time that was measured. Cases of one
    `group` are judged together by coefficients that saw none of them; those of one `question` are alternatives."""

    parts: costs.Parts
    variant: Variant
    measured_us: float
    group: Any
    question: Any = None

    @property
    def logarithm(self) -> float:
        """Of measured over predicted."""
        return math.log(self.measured_us / self.parts.total_us)


def is_available() -> bool:
    """Whether scikit-learn is installed."""
    return importlib.util.find_spec("sklearn") is not None


def cases_of(
    trials: Iterable[Measurement], device: Device, facts: Mapping[tuple[Any, ...], CompileFacts] | None = None
) -> list[Case]:
    """A case a (spec, layout, variant, batch) of the ok trials, by the median of their samples. `facts`, by (spec,
    layout, variant, form), are what a compiler told of GPU kernels."""
    samples: dict[tuple[AttentionSpec, CacheLayout, Variant, Workload], list[float]] = defaultdict(list)
    for trial in trials:
        if trial.status is Status.OK:
            samples[trial.spec, trial.layout, trial.variant, trial.workload] += trial.samples_us
    found = []
    for (spec, layout, variant, workload), us in samples.items():
        form = "decode" if workload.is_decode else "ragged"
        known = None if facts is None else facts.get((spec, layout, variant, form))
        made_of = costs.parts(spec, layout, variant, device, workload, facts=known)
        found.append(
            Case(
                parts=made_of,
                variant=variant,
                measured_us=statistics.median(us),
                group=(spec, workload),
                question=(spec, layout, workload),
            )  # fmt: skip
        )
    return found


def fit(cases: Sequence[Case], device: Device, code_hash: str) -> costs.Fit | None:
    """Coefficients for a device, or None where there are too few cases or batches to tell how far they are off.

    Raises MissingExtra without scikit-learn, and ValueError for cases of several kernel families.
    """
    _require()
    families = {case.variant.family for case in cases}
    if len(families) > 1:
        raise ValueError(f"cases must be of one kernel family, got {', '.join(sorted(families))}")
    groups = {case.group for case in cases}
    if len(cases) < MIN_CASES or len(groups) < MIN_BATCHES:
        return None
    # coefficients that predict better may choose worse: then the level alone, which changes no order
    for strength in (_strength(cases), LEVEL):
        made = _judged(cases, strength, device, code_hash)
        if made.is_better:
            break
    return made


def _judged(cases: Sequence[Case], strength: float, device: Device, code_hash: str) -> costs.Fit:
    intercept, weights, ranges = _solved(cases, strength)
    left = residuals(cases, strength)
    fitted_us = [case.measured_us / math.exp(value) for case, value in zip(cases, left, strict=True)]
    return costs.Fit(
        device=device.name,
        family=cases[0].variant.family,
        code_hash=code_hash,
        intercept=intercept,
        coefficients=weights,
        ranges=ranges,
        trials=len(cases),
        batches=len({case.group for case in cases}),
        error=median_error(left),
        unfitted_error=median_error([case.logarithm for case in cases]),
        regret=choice_regret(cases, fitted_us),
        unfitted_regret=choice_regret(cases, [case.parts.total_us for case in cases]),
    )


def residuals(cases: Sequence[Case], strength: float | None = None) -> list[float]:
    """The logarithm of measured over fitted time of every case, by coefficients that saw none of its group. Without a
    strength each fold chooses its own, from what it was given."""
    from sklearn.model_selection import GroupKFold

    numbers = _numbered(cases)
    left: list[float] = [math.nan] * len(cases)
    for seen, unseen in GroupKFold(min(FOLDS, max(numbers) + 1)).split(cases, groups=numbers):
        known = [cases[i] for i in seen]
        corrected = correction(known, _strength(known) if strength is None else strength)
        for i in unseen:
            left[i] = cases[i].logarithm - corrected(cases[i])
    return left


def correction(cases: Sequence[Case], strength: float | None = None) -> Callable[[Case], float]:
    """What coefficients fitted to `cases` add to the logarithm of a predicted time."""
    _require()
    solved = _solved(cases, _strength(cases) if strength is None else strength)
    return lambda case: logarithm(features(case.parts, case.variant), *solved)


def median_error(logarithms: Iterable[float]) -> float:
    """The median of |ratio - 1| over logarithms of ratios."""
    return statistics.median(abs(math.expm1(value)) for value in logarithms)


def choice_regret(cases: Sequence[Case], predicted_us: Sequence[float]) -> float:
    """The mean over questions of what is lost by the alternative with the least predicted time; 0 without any."""
    questions: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for case, us in zip(cases, predicted_us, strict=True):
        if case.question is not None:
            questions[case.question].append((us, case.measured_us))
    lost = [min(found)[1] / min(us for _, us in found) - 1 for found in questions.values() if len(found) > 1]
    return math.fsum(lost) / len(lost) if lost else 0.0


def _require() -> None:
    if not is_available():
        raise MissingExtra("fitting the cost model needs scikit-learn: pip install pagegen-attention[fit]")


def _strength(cases: Sequence[Case]) -> float:
    """The strength that errs least on left-out groups, the strongest of equals."""
    numbers = _numbered(cases)
    if max(numbers) < 1:
        return STRENGTHS[-1]
    errors = {strength: _mean_square(residuals(cases, strength)) for strength in STRENGTHS}
    return min(reversed(STRENGTHS), key=errors.__getitem__)


def _mean_square(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values) / len(values)


def _numbered(cases: Sequence[Case]) -> list[int]:
    """The groups by number, in the order in which they come."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(case.group, len(numbers)) for case in cases]


def _solved(cases: Sequence[Case], strength: float) -> tuple[float, dict[str, float], dict[str, Range]]:
    """(intercept, coefficients, ranges) of a ridge over standardised features; those that do not vary are left out.
    Every group weighs alike, however many variants were tried on it."""
    from sklearn.linear_model import Ridge

    rows = [features(case.parts, case.variant) for case in cases]
    names = list(rows[0])
    table: Floats = np.array([[row[name] for name in names] for row in rows])
    centre, spread = table.mean(axis=0), table.std(axis=0)
    varies = spread > 1e-9
    numbers = np.array(_numbered(cases))
    weight = 1.0 / np.bincount(numbers)[numbers]
    wanted: Floats = np.array([case.logarithm for case in cases])
    if strength == LEVEL:
        return float(np.average(wanted, weights=weight)), {}, {}
    ridge = Ridge(alpha=strength / len(cases))
    ridge.fit((table[:, varies] - centre[varies]) / spread[varies], wanted, sample_weight=weight / weight.sum())
    used = [name for name, keep in zip(names, varies, strict=True) if keep]
    weights = dict(zip(used, (ridge.coef_ / spread[varies]).tolist(), strict=True))
    bounds = np.stack([table.min(axis=0), centre, table.max(axis=0)], axis=1)[varies].tolist()
    # a mean is rounded, and may lie outside by the last digit
    ranges = {name: (min(low, at), at, max(high, at)) for name, (low, at, high) in zip(used, bounds, strict=True)}
    return float(ridge.intercept_), weights, ranges


def of_store(store: Any, device: Device, code_hash: str) -> costs.Fit | None:
    """Coefficients from what a database holds of a device, whatever was tuned there; None where that is too little,
    where they do not beat the unfitted model on batches that they did not see, or without scikit-learn."""
    from pagegen.db import Database
    from pagegen.db.fits import recent_trials

    if not isinstance(store, Database) or not device.bandwidth_gb_s > 0:
        return None
    trials = recent_trials(store, device, code_hash)
    if not trials:
        return None
    if not is_available():
        log.info("the cost model is not fitted to %s: pip install pagegen-attention[fit]", device.name)
        return None
    facts = {}
    if device.target.is_gpu:
        known = store.compile_facts(target=device.target, code_hash=code_hash)
        facts = {(f.spec, f.layout, f.variant, f.form): f for f in known}
    made = fit(cases_of(trials, device, facts), device, code_hash)
    return made if made is not None and made.is_better else None
