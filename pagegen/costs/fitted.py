"""Coefficients of the cost model for one device, fitted to its own trials (see `pagegen_autotune.fitting`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pagegen.costs.parts import Parts
from pagegen.spec import CppVariant, TritonVariant, Variant, check

VERSION = 1
# The name of the coefficients in the evidence of a rule.
COST_MODEL = "cost_model"
# Beyond a factor of 8 a fit says that it does not know the case, not that the model is that wrong.
MAX_FACTOR = 8.0
# Fields of a variant whose effect the parts do not hold: each as doublings, or 0 and 1.
TRAITS: dict[type[Variant], tuple[str, ...]] = {
    CppVariant: ("tile_kv", "streams", "heads_together", "prefetch_ahead", "split_tokens"),
    TritonVariant: ("tile_rows", "tile_kv", "num_warps", "num_stages"),
}


def features(made_of: Parts, variant: Variant) -> dict[str, float]:
    """What a fit's coefficients multiply: the share of every part in the total (so that a coefficient is, to first
    order, the logarithm of a factor on that part), and the variant's traits."""
    found = {f"share of {name}": share for name, share in made_of.shares.items()}
    for name in TRAITS[type(variant)]:
        found[name] = math.log2(1 + getattr(variant, name))
    if isinstance(variant, CppVariant):
        found["reads by token"] = float(variant.read_order == "token")
    if isinstance(variant, TritonVariant):
        found["looks up every key"] = float(variant.page_walk == "any")
    return found


def logarithm(
    found: Mapping[str, float],
    intercept: float,
    coefficients: Mapping[str, float],
    ranges: Mapping[str, tuple[float, float, float]],
) -> float:
    """What coefficients say of the features `found`. See `Fit`."""
    total = intercept
    for name, value in coefficients.items():
        low, centre, high = ranges[name]
        total += value * (min(high, max(low, found[name])) - centre)
    limit = math.log(MAX_FACTOR)
    return min(limit, max(-limit, total))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """log(measured / predicted) as `intercept` + the sum of `coefficients` times `features`, each less its centre and
    held within `ranges` (lowest, centre, highest), which is what the trials say something about.

    Errors are the median of |measured / predicted - 1|, regrets the mean of what is lost by taking the variant with the
    least predicted time of those tried on a batch; both over batches that were not fitted to (cross-validation by
    batch), with the coefficients and without. `trials` and `batches` are what was fitted to.
    """

    device: str
    family: str
    code_hash: str
    intercept: float
    coefficients: Mapping[str, float]
    ranges: Mapping[str, tuple[float, float, float]]
    trials: int
    batches: int
    error: float
    unfitted_error: float
    regret: float
    unfitted_regret: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", {name: tuple(bounds) for name, bounds in self.ranges.items()})
        if set(self.coefficients) != set(self.ranges):
            raise ValueError(f"a fit needs a range for each coefficient, got {self.coefficients} and {self.ranges}")
        if not all(low <= centre <= high for low, centre, high in self.ranges.values()):
            raise ValueError(f"a fit's ranges must be lowest, centre, highest, got {self.ranges}")
        numbers = [self.intercept, *self.coefficients.values(), *(n for r in self.ranges.values() for n in r)]
        judged = (self.error, self.unfitted_error, self.regret, self.unfitted_regret)
        if not all(map(math.isfinite, [*numbers, *judged])):
            raise ValueError(f"a fit's numbers must be finite, got {self}")

    def __hash__(self) -> int:
        return hash((self.device, self.family, self.code_hash, self.intercept, *sorted(self.coefficients.items())))

    @property
    def is_better(self) -> bool:
        """Whether it errs less than the unfitted model on batches that it was not fitted to, and chooses no worse: the
        only fits to use."""
        return self.error < self.unfitted_error and self.regret <= self.unfitted_regret

    def factor(self, made_of: Parts, variant: Variant) -> float:
        """What the predicted time is multiplied by."""
        found = features(made_of, variant)
        unknown = set(self.coefficients) - set(found)
        if unknown:
            raise ValueError(
                f"the fit for {self.device} has coefficients of another model: {', '.join(sorted(unknown))}"
            )
        return math.exp(logarithm(found, self.intercept, self.coefficients, self.ranges))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields, with the version."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"version": VERSION, **plain, "coefficients": dict(self.coefficients), "ranges": dict(self.ranges)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fit:
        """The inverse of `to_dict`. Raises ValueError for another version, KeyError or TypeError for what is no fit."""
        check.one_of("version", data["version"], (VERSION,))
        return cls(**{f.name: data[f.name] for f in fields(cls)})

    def __str__(self) -> str:
        return (
            f"fitted to {self.trials} trials of {self.device} (error on other batches {self.error:.0%}, "
            f"unfitted {self.unfitted_error:.0%})"
        )
