"""From trials to a decision: which variants serve a class of batches, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pagegen.spec import Clause, DispatchRule, Variant, Workload
from pagegen_autotune import tree
from pagegen_autotune.evidence import MARGIN, MIN_FRESH_ROUNDS, Comparison, Evidence
from pagegen_autotune.objective import OBJECTIVES, Loads
from pagegen_autotune.partition import REGRET_BOUND, loads_of, proven_best, smallest
from pagegen_autotune.regret import CONFIDENCE, Regret, regret
from pagegen_autotune.space import resources

# Variants within 1 % of the best are as good: the one that takes fewer resources is chosen.
TIE = 0.01
# Leaders that get fresh samples: each further one is another chance for luck.
MAX_JUDGED = 3
# With 5 % of noise in a ratio, the medians of a search's five to seven rounds are 3 % off one from another by luck.
UNSURE = 0.03


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What serves one class of batches on one layout, and why.

    `batches` is "decode" (at most one query a sequence), "mixed" (the others) or "all". `tree` says what serves which
    of them; `chosen` serves all that no proof speaks for serving otherwise. Times are microseconds of one call: `_us`
    the mean over the class's workloads by weight, the others by their name. `weight` is the class's share of the
    profile's steps, `compared` the number of variants measured beside the default (compiled, where nothing is
    measured). `regret` is the excess over choosing the best variant for every workload, of those that were measured;
    `regret_bound` is None where some workload had nothing to compare with, and `regret` then says nothing.
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
    tree: tree.Tree | None = None
    regret_bound: Regret | None = None
    by_workload: Mapping[Workload, tuple[float, float]] = field(default_factory=dict)  # (default's, chosen one's) us
    objectives: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # the same of every objective

    @property
    def speedup(self) -> float:
        """The default's time over the chosen variants'."""
        return self.default_us / self.chosen_us

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What serves some batch of the class, the chosen one first where it does."""
        serving = [self.chosen] if self.tree is None else [leaf.variant for leaf in tree.leaves(self.tree)]
        return tuple(sorted(dict.fromkeys(serving), key=lambda v: v != self.chosen))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields; variants by name."""
        plain = ("batches", "default_us", "chosen_us", "weight", "confidence", "compared", "regret")
        found = {name: getattr(self, name) for name in plain}
        found |= {"default": self.default.name, "chosen": self.chosen.name, "speedup": self.speedup}
        found["variants"] = [variant.name for variant in self.variants]
        found["objectives_us"] = {n: {"default": d, "chosen": c} for n, (d, c) in self.objectives.items()}
        if self.regret_bound is not None:
            found |= {"regret_at_most": self.regret_bound.at_most, "regret_confidence": CONFIDENCE}
            found["workloads"] = [
                {"num_seqs": w.num_seqs, "total_context": w.total_context, "total_q": w.total_q, "default_us": d,
                 "chosen_us": c, "regret": self.regret_bound.by_workload[w]}
                for w, (d, c) in self.by_workload.items()
            ]  # fmt: skip
        return found


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


def leaders(evidence: Evidence, loads: Loads) -> list[Variant]:
    """The variants that fresh samples should be taken of next, the first one before all: by the search's samples faster
    than the default by the margin, and than every variant already proven better; then those that the search's samples
    cannot tell from it. None when there is no such variant, or enough were judged."""
    proven = evidence.comparisons(loads, fresh=True)
    judged = {c.variant for c in proven if c.rounds >= MIN_FRESH_ROUNDS}
    # what was proven is no luck, what the search saw may be: it must look better by more than a tie
    bar = min([1 - MARGIN, *((1 - TIE) * c.ratio for c in proven if c.improves)])
    found = [c for c in evidence.comparisons(common_loads(evidence, loads), fresh=False) if c.variant not in judged]
    found = [c for c in found if c.ratio <= bar]
    if not found:
        return []
    first = _leanest(found)
    near = [c for c in found if c != first and c.ratio <= (1 + UNSURE) * first.ratio]
    near.sort(key=lambda c: (c.ratio, resources(c.variant), c.variant.name))
    return [c.variant for c in (first, *near)][: max(0, MAX_JUDGED - len(judged))]


def _leanest(found: Sequence[Comparison]) -> Comparison:
    """Of those that tie with the fastest, the one with fewest resources, then the first by name."""
    limit = min(c.ratio for c in found) * (1 + TIE)
    return min((c for c in found if c.ratio <= limit), key=lambda c: (resources(c.variant), c.variant.name))


def decide(evidence: Evidence, loads: Loads, batches: str, *, bound: float = REGRET_BOUND) -> Decision | None:
    """The decision for one class; None where the default was never measured on one of its workloads. More than one
    variant serves it where one alone would lose more than `bound`, and each is proven better on its part."""
    found = {w: evidence.default_us(w) for w, _ in loads}
    base = {w: us for w, us in found.items() if us is not None}
    if len(base) < len(loads):
        return None
    winner = best(evidence, loads)
    chosen = winner.variant if winner else evidence.default
    ratios = dict(winner.by_workload) if winner else dict.fromkeys(base, 1.0)
    if batches == "all":  # a row's result must not depend on what it is batched with, so one kernel serves all
        bound = math.inf
    plan = smallest(evidence, loads, chosen, bound, proven_best(evidence, loads, chosen))
    for leaf in tree.leaves(plan):
        if leaf.variant == evidence.default:
            ratios |= dict.fromkeys(leaf.part, 1.0)
        elif leaf.variant != chosen:
            proof = evidence.compare(leaf.variant, loads_of(loads, leaf), fresh=True)
            ratios |= dict(proof.by_workload) if proof else {}
    served = {w: leaf.variant for leaf in tree.leaves(plan) for w in leaf.part}
    tried = evidence.ratios(loads)
    compared = all(any(w in known for known in tried.values()) for w in base)
    lost = regret(evidence, loads, served) if compared else None  # nothing is known of what was not compared
    times = {w: base[w] * ratios[w] for w in base}
    objectives = {name: (of(base, loads), of(times, loads)) for name, of in OBJECTIVES.items()}
    made = Decision(
        batches=batches,
        default=evidence.default,
        chosen=chosen,
        default_us=objectives["mean"][0],
        chosen_us=objectives["mean"][1],
        weight=sum(share for _, share in loads),
        confidence=winner.statement if winner else _no_winner(evidence, loads),
        compared=len(tried),
        regret=lost.expected if lost else 0.0,
        tree=plan,
        regret_bound=lost,
        by_workload={w: (base[w], times[w]) for w in base},
        objectives=objectives,
    )
    parts = [_words_of_part(evidence, loads, leaf, chosen) for leaf in tree.leaves(plan) if leaf.variant != chosen]
    return replace(made, confidence="; ".join([made.confidence, *parts])) if parts else made


def _words_of_part(evidence: Evidence, loads: Loads, leaf: tree.Leaf, chosen: Variant) -> str:
    part = loads_of(loads, leaf)
    proof = evidence.compare(leaf.variant, part, fresh=True, base=chosen)
    gain = "" if proof is None else f" takes {proof.ratio:.3f} of its time there ({proof.statement})"
    return f"on {len(part)} of {len(loads)} batches {leaf.variant.name}{gain}"


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
    parts = [f"{name} {_words(made[name]) if name in made else 'not in the profile: default'}" for name in defaults]
    figures = {d.batches: d.to_dict() for d in decisions}
    return DispatchRule(
        clauses=_clauses(made, defaults),
        reason=f"{source}: {'; '.join(parts)}",
        evidence={"kind": kind, **evidence, **figures},
    )


def _clauses(made: Mapping[str, Decision], defaults: Mapping[str, Variant]) -> tuple[Clause, ...]:
    """The classes' trees one after the other: the narrower class within its bound, the last without."""
    names = list(defaults)
    found: list[Clause] = []
    for name, default in defaults.items():
        bounds = {"max_query_len": 1} if name == "decode" else {}
        decision = made.get(name)
        plan = decision.tree if decision is not None else None
        if plan is None:
            plan = tree.Leaf(variant=decision.chosen if decision else default, part=())
        own = tree.clauses(plan, **bounds)
        if name == names[-1] and len(found) == 1 and len(own) == 1 and found[0].variant == own[0].variant:
            found = []
        found += own
    return tuple(found)


def _words(decision: Decision) -> str:
    if decision.variants == (decision.default,):
        return decision.confidence
    names = " and ".join(variant.name for variant in decision.variants)
    return f"{names}, {decision.speedup:.2f} times as fast as the default ({decision.confidence})"
