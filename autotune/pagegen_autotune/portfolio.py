"""From trials to a decision: which variant serves a class of batches, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pagegen.spec import Clause, DispatchRule, Variant, Workload
from pagegen_autotune.evidence import MARGIN, MIN_FRESH_ROUNDS, Comparison, Evidence, Loads
from pagegen_autotune.space import resources

# Variants within 1 % of the best are as good: the one that takes fewer resources is chosen.
TIE = 0.01
# Leaders that get fresh samples: each further one is another chance for luck.
MAX_JUDGED = 3


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What serves one class of batches on one layout, and why.

    `batches` is "decode" (at most one query a sequence), "mixed" (the others) or "all". Times are microseconds of one
    call, the mean over the class's workloads by weight. `weight` is the class's share of the profile's steps,
    `compared` the number of variants measured beside the default. `regret` is the excess over choosing the best
    variant for every workload (an upper bound: the best of noisy times is too good).
    """

    batches: str
    default: Variant
    chosen: Variant
    default_us: float
    chosen_us: float
    weight: float
    confidence: str
    compared: int
    regret: float

    @property
    def speedup(self) -> float:
        """The default's time over the chosen variant's."""
        return self.default_us / self.chosen_us

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields; variants by name."""
        return {**asdict(self), "default": self.default.name, "chosen": self.chosen.name, "speedup": self.speedup}


def common_loads(evidence: Evidence, loads: Loads) -> Loads:
    """The workloads to search by: all of them where some variant was measured on all, or else those that every variant
    was measured on."""
    if evidence.comparisons(loads, fresh=False):
        return loads
    # not those that only the layout's other class of batches was measured with
    known = [v for v in evidence.variants if any(evidence.pairs(v, w, fresh=False) for w, _ in loads)]
    return [load for load in loads if known and all(evidence.pairs(v, load[0], fresh=False) for v in known)]


def best(evidence: Evidence, loads: Loads) -> Comparison | None:
    """The variant that should replace the default, or None where none is proven better over all of `loads`. Ties go to
    fewer resources, then to the name."""
    improving = [c for c in evidence.comparisons(loads, fresh=True) if c.improves]
    if not improving:
        return None
    return _leanest(improving)


def leader(evidence: Evidence, loads: Loads) -> Variant | None:
    """The variant that fresh samples should be taken of next: by the search's samples faster than the default by the
    margin, and than every variant already proven better. None when there is no such variant, or enough were judged."""
    proven = evidence.comparisons(loads, fresh=True)
    judged = {c.variant for c in proven if c.rounds >= MIN_FRESH_ROUNDS}
    if len(judged) >= MAX_JUDGED:
        return None
    bar = min([1 - MARGIN, *(c.ratio for c in proven if c.improves)])
    found = [c for c in evidence.comparisons(common_loads(evidence, loads), fresh=False) if c.variant not in judged]
    found = [c for c in found if c.ratio <= bar]
    return _leanest(found).variant if found else None


def _leanest(found: Sequence[Comparison]) -> Comparison:
    """Of those that tie with the fastest, the one with fewest resources, then the first by name."""
    limit = min(c.ratio for c in found) * (1 + TIE)
    return min((c for c in found if c.ratio <= limit), key=lambda c: (resources(c.variant), c.variant.name))


def decide(evidence: Evidence, loads: Loads, batches: str) -> Decision | None:
    """The decision for one class; None where the default was never measured on one of its workloads."""
    found = {w: evidence.default_us(w) for w, _ in loads}
    base = {w: us for w, us in found.items() if us is not None}
    if len(base) < len(loads):
        return None
    weight = sum(share for _, share in loads)

    def mean(ratio: Callable[[Workload], float]) -> float:
        return sum(share * base[w] * ratio(w) for w, share in loads) / weight

    winner = best(evidence, loads)
    single = winner.by_workload if winner else dict.fromkeys(base, 1.0)
    chosen_us = mean(single.__getitem__)
    tried = {w: evidence.comparisons([(w, 1.0)], fresh=False) for w in base}
    return Decision(
        batches=batches,
        default=evidence.default,
        chosen=winner.variant if winner else evidence.default,
        default_us=mean(lambda w: 1.0),
        chosen_us=chosen_us,
        weight=weight,
        confidence=winner.statement if winner else _no_winner(evidence, loads),
        compared=len({c.variant for comparisons in tried.values() for c in comparisons}),
        regret=chosen_us / mean(lambda w: min([1.0, single[w], *(c.ratio for c in tried[w])])) - 1,
    )


def _no_winner(evidence: Evidence, loads: Loads) -> str:
    """Why the default stays."""
    common = common_loads(evidence, loads)
    searched = evidence.comparisons(common, fresh=False)
    if not searched:
        return "the default stays: nothing was compared with it"
    fresh = {c.variant: c for c in evidence.comparisons(loads, fresh=True)}
    nearest = min(searched, key=lambda c: c.ratio)
    shown = fresh.get(nearest.variant, nearest)
    part = "" if len(common) == len(loads) else f", on {len(common)} of {len(loads)} workloads"
    others = f"the best of {len(searched)} others takes {shown.ratio:.3f} of its time"
    tie = "a tie, " if shown.ratio > 1 - MARGIN else ""
    return f"{tie}the default stays: {others} ({shown.statement}{part})"


def dispatch_rule(
    decisions: Sequence[Decision],
    defaults: Mapping[str, Variant],
    *,
    kind: str,
    source: str,
    evidence: dict[str, Any],
) -> DispatchRule:
    """The rule of one layout. `defaults` names the classes in order, the narrower one first, and what serves one that
    the profile does not hold. `source` begins the reason ("tuned on ...")."""
    made = {d.batches: d for d in decisions}
    chosen = {name: made[name].chosen if name in made else default for name, default in defaults.items()}
    clauses: tuple[Clause, ...] = (Clause(variant=list(chosen.values())[-1]),)
    if len(set(chosen.values())) > 1:
        clauses = (Clause(variant=chosen["decode"], max_query_len=1), *clauses)
    parts = [f"{name} {_words(made[name]) if name in made else 'not in the profile: default'}" for name in defaults]
    figures = {d.batches: d.to_dict() for d in decisions}
    return DispatchRule(
        clauses=clauses, reason=f"{source}: {'; '.join(parts)}", evidence={"kind": kind, **evidence, **figures}
    )


def _words(decision: Decision) -> str:
    if decision.chosen == decision.default:
        return decision.confidence
    return f"{decision.chosen.name}, {decision.speedup:.2f} times as fast as the default ({decision.confidence})"
