"""Small decision trees over the integers that a host knows of a batch, and the clauses they come to."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pagegen.spec import Clause, DispatchRule, Variant, Workload

# In this order where splits are as good: the number of sequences is exact, a context may be an upper bound.
FEATURES = ("num_seqs", "max_query_len", "max_context_len")
BOUNDS = {"num_seqs": "max_num_seqs", "max_query_len": "max_query_len", "max_context_len": "max_context_len"}
MAX_LEAVES = 4

Part = tuple[Workload, ...]
# The best variant for some workloads and what it costs there, infinite where none may serve them.
BestOf = Callable[[Part], tuple[float, Variant]]


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """`variant` serves the batches that come here, `part` of those it was learned from."""

    variant: Variant
    part: Part


@dataclass(frozen=True, kw_only=True)
class Split:
    """Batches whose `feature` is at most `threshold` go to `low`."""

    feature: str
    threshold: int
    low: Tree
    high: Tree


Tree = Leaf | Split


def grow(workloads: Sequence[Workload], best_of: BestOf) -> list[Tree]:
    """The cheapest tree with one leaf, with at most two, ... with at most MAX_LEAVES."""

    @functools.cache
    def cheapest(part: Part, leaves: int) -> tuple[float, Tree]:
        if leaves == 1:
            cost, variant = best_of(part)
            return cost, Leaf(variant=variant, part=part)
        best = cheapest(part, leaves - 1)
        for feature, threshold in _splits(part):
            low, high = _halves(part, feature, threshold)
            for few in range(1, leaves):
                (low_us, below), (high_us, above) = cheapest(low, few), cheapest(high, leaves - few)
                # a further leaf or a later split must be better, and by more than rounding
                if low_us + high_us < best[0] * (1 - 1e-9):
                    best = low_us + high_us, Split(feature=feature, threshold=threshold, low=below, high=above)
        return best

    whole = tuple(workloads)
    return [merged(cheapest(whole, leaves)[1]) for leaves in range(1, MAX_LEAVES + 1)]


def merged(tree: Tree) -> Tree:
    """The tree without splits whose sides are served alike."""
    if isinstance(tree, Leaf):
        return tree
    low, high = merged(tree.low), merged(tree.high)
    if isinstance(low, Leaf) and isinstance(high, Leaf) and low.variant == high.variant:
        return Leaf(variant=low.variant, part=low.part + high.part)
    return replace(tree, low=low, high=high)


def leaves(tree: Tree) -> Iterator[Leaf]:
    """Its leaves, the lower side first."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        yield from leaves(tree.low)
        yield from leaves(tree.high)


def clauses(tree: Tree, **bounds: int) -> tuple[Clause, ...]:
    """The tree as an ordered list of clauses, all within `bounds`, the last within nothing else: the upper side of a
    split needs no lower bound, since its lower side was asked before."""
    if isinstance(tree, Leaf):
        return (Clause(variant=tree.variant, **bounds),)
    bound = BOUNDS[tree.feature]
    below = {**bounds, bound: min(tree.threshold, bounds.get(bound, tree.threshold))}
    return (*clauses(tree.low, **below), *clauses(tree.high, **bounds))


def _splits(part: Part) -> Iterator[tuple[str, int]]:
    for feature in FEATURES:
        values = sorted({getattr(workload, feature) for workload in part})
        for low, high in itertools.pairwise(values):
            # what lies between was not measured: half way on a scale of factors
            yield feature, max(low, min(high - 1, math.isqrt(max(low, 1) * high)))


def _halves(part: Part, feature: str, threshold: int) -> tuple[Part, Part]:
    low = tuple(w for w in part if getattr(w, feature) <= threshold)
    return low, tuple(w for w in part if getattr(w, feature) > threshold)


def cells(rule: DispatchRule) -> Iterator[tuple[int, int, int]]:
    """One batch (sequences, longest query, longest context) of every cell that the rule's bounds cut the batches
    into: on each bound and just above it."""
    axes = []
    for name in BOUNDS.values():
        cuts = {getattr(clause, name) for clause in rule.clauses} - {None}
        axes.append(sorted({1, *cuts, *(cut + 1 for cut in cuts)}))
    yield from itertools.product(*axes)


def checked(rule: DispatchRule, legal: Callable[[Variant], bool], safe: Variant) -> tuple[DispatchRule, int]:
    """The rule with `safe` in place of every variant that must not run in a cell that the rule reaches, without the
    clauses that no batch reaches, and the number of cells that were looked at."""
    reached: dict[Clause, None] = {}
    count = 0
    for cell in cells(rule):
        count += 1
        reached.setdefault(next(clause for clause in rule.clauses if clause.admits(*cell)))
    kept = [clause for clause in rule.clauses if clause in reached or clause == rule.clauses[-1]]
    made = tuple(c if legal(c.variant) else replace(c, variant=safe) for c in kept)
    return replace(rule, clauses=made), count


def text(rule: DispatchRule) -> list[str]:
    """The rule for people, a line a clause."""
    return [f"{_condition(clause)}: {clause.variant.name}" for clause in rule.clauses]


def _condition(clause: Clause) -> str:
    bounds = [(feature, getattr(clause, name)) for feature, name in BOUNDS.items()]
    parts = [f"{feature} <= {bound}" for feature, bound in bounds if bound is not None]
    return " and ".join(parts) if parts else "else"
