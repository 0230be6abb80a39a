"""Dividing a class of batches among variants: where one alone loses too much, and others are proven better."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagegen.spec import Variant, Workload
from pagegen_autotune import tree
from pagegen_autotune.evidence import MARGIN, MIN_FRESH_ROUNDS, Evidence
from pagegen_autotune.objective import Loads
from pagegen_autotune.regret import regret
from pagegen_autotune.space import resources

# A portfolio may lose so much against the best variant of every batch before it grows.
REGRET_BOUND = 0.02
# Variants that get fresh samples for a part of the batches: each further one is another chance for luck.
MAX_JUDGED = 3


def divisions(
    evidence: Evidence, loads: Loads, chosen: Variant, *, bound: float = REGRET_BOUND
) -> list[tuple[Variant, Loads]]:
    """What fresh samples should be taken of next, beside those of the chosen variant: the variants that would serve a
    part of the batches better by the search's samples, with their parts. None where the choice loses no more than
    `bound`, or enough were judged."""
    if any(evidence.default_us(w) is None for w, _ in loads):
        return []
    judged = {v: [w for w, _ in loads if evidence.pairs(v, w, fresh=True, base=chosen)] for v in
              judged_beside(evidence, loads, chosen)}  # fmt: skip
    in_part = [v for v, known in judged.items() if len(known) < len(loads)]
    plan = smallest(evidence, loads, chosen, bound, hoped_best(evidence, loads, chosen))
    parts = [(leaf.variant, loads_of(loads, leaf)) for leaf in tree.leaves(plan) if leaf.variant != chosen]
    new = [(v, part) for v, part in parts if not all(w in judged.get(v, ()) for w, _ in part)]
    return [(v, part) for v, part in new if v in in_part or len(in_part) < MAX_JUDGED]


def smallest(evidence: Evidence, loads: Loads, chosen: Variant, bound: float, best_of: tree.BestOf) -> tree.Tree:
    """The first tree, from one leaf on, that loses no more than `bound`; else the cheapest."""
    found = tree.grow([w for w, _ in loads], best_of)
    for one in found:
        served = {w: leaf.variant for leaf in tree.leaves(one) for w in leaf.part}
        if bound == math.inf or one == found[-1] or regret(evidence, loads, served, draws=0).expected <= bound:
            return one
    return found[-1]


def loads_of(loads: Loads, leaf: tree.Leaf) -> Loads:
    """Those of `loads` that a leaf serves."""
    return [(w, weight) for w, weight in loads if w in leaf.part]


def proven_best(evidence: Evidence, loads: Loads, chosen: Variant) -> tree.BestOf:
    """What may serve a part by fresh samples: what beats the chosen variant there as it must to replace the default,
    and was hoped to by the search's samples. A rival of the chosen one has fresh samples everywhere, and by luck some
    part where they flatter it."""

    judged = judged_beside(evidence, loads, chosen)
    ratios = {evidence.default: {w: 1.0 for w, _ in loads}, **evidence.ratios(loads)}

    def best_of(part: tree.Part) -> tuple[float, Variant]:
        own = [(w, weight) for w, weight in loads if w in part]
        cost = sum(weight * evidence.cost_us(w) for w, weight in own)
        found = [(1.0, chosen)]
        for variant in judged if len(own) < len(loads) else ():
            proof = evidence.compare(variant, own, fresh=True, base=chosen)
            hoped = _sum(evidence, own, ratios.get(variant)) <= (1 - MARGIN) * _sum(evidence, own, ratios.get(chosen))
            found += [(proof.ratio, variant)] if hoped and proof is not None and proof.improves else []
        ratio, variant = min(found, key=lambda f: (f[0], resources(f[1]), f[1].name))
        return cost * ratio, variant

    return best_of


def _sum(evidence: Evidence, part: Loads, ratios: Mapping[Workload, float] | None) -> float:
    """The time of a part by the search's samples; as the default where they say nothing."""
    return sum(weight * evidence.cost_us(w) * (ratios or {}).get(w, 1.0) for w, weight in part)


def hoped_best(evidence: Evidence, loads: Loads, chosen: Variant) -> tree.BestOf:
    """What may serve a part by the search's samples, less what fresh ones spoke against already."""
    ratios = evidence.ratios(loads)
    base = {w: evidence.cost_us(w) for w, _ in loads}
    ratios[evidence.default] = dict.fromkeys(base, 1.0)
    of_chosen = {w: ratios.get(chosen, {}).get(w, 1.0) for w in base}
    seen = judged_beside(evidence, loads, chosen)

    def best_of(part: tree.Part) -> tuple[float, Variant]:
        own = [(w, weight) for w, weight in loads if w in part]
        cost = sum(weight * base[w] * of_chosen[w] for w, weight in own)
        found = [(cost, chosen)]
        for variant, known in ratios.items() if len(own) < len(loads) else ():
            if variant == chosen or not all(w in known for w in part):
                continue
            judged = evidence.compare(variant, own, fresh=True, base=chosen) if variant in seen else None
            if judged is not None and judged.rounds >= MIN_FRESH_ROUNDS and not judged.improves:
                continue
            theirs = sum(weight * base[w] * known[w] for w, weight in own)
            found += [(theirs, variant)] if theirs <= (1 - MARGIN) * cost else []
        return min(found, key=lambda f: (f[0], resources(f[1]), f[1].name))

    return best_of


def judged_beside(evidence: Evidence, loads: Loads, chosen: Variant) -> list[Variant]:
    """The variants with fresh samples beside the chosen one on some of the batches."""
    others = [v for v in (evidence.default, *evidence.variants) if v != chosen]
    return [v for v in others if any(evidence.pairs(v, w, fresh=True, base=chosen) for w, _ in loads)]
