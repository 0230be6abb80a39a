"""From a modifier to one sympy expression over batch, head, q_pos, k_pos and score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from pagegen.modifiers.closures import Capture
from pagegen.modifiers.registry import OUTCOMES, PARAMETERS, Modifier
from pagegen.modifiers.symbolic import StandIn, Symbolic, Untraceable, Where, is_truth, lift

__all__ = ["SYMBOLS", "Traced", "Untraceable", "trace"]

# Positions of queries may be negative: a sequence may have more queries in a call than tokens in the cache.
SYMBOLS: dict[str, sympy.Symbol] = {
    "score": sympy.Symbol("score", real=True),
    "batch": sympy.Symbol("batch", integer=True, nonnegative=True),
    "head": sympy.Symbol("head", integer=True, nonnegative=True),
    "q_pos": sympy.Symbol("q_pos", integer=True),
    "k_pos": sympy.Symbol("k_pos", integer=True, nonnegative=True),
}
# What the printers have words for. Everything else that sympy may make of a function cannot be printed.
_PRINTED = (
    sympy.Symbol, sympy.Number, sympy.NumberSymbol, sympy.Add, sympy.Mul, sympy.Pow, sympy.Mod, sympy.floor,
    sympy.ceiling, sympy.Abs, sympy.Min, sympy.Max, sympy.exp, sympy.log, sympy.tanh, sympy.sin, sympy.cos, sympy.erf,
    Where, AppliedUndef, sympy.core.relational.Relational, sympy.And, sympy.Or, sympy.Not,
    sympy.logic.boolalg.BooleanAtom, sympy.core.numbers.Infinity, sympy.core.numbers.NegativeInfinity,
)  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """A modifier as an expression. `kind` is "score" or "mask"; the expression is a real number, respectively a
    condition, over `SYMBOLS`, in which an applied undefined function NAME(i, j) is the captured tensor NAME at [i, j]
    (of a bool tensor 0 or 1). `captures` are all captured tensors, in the order in which a call hands them over."""

    kind: str
    expression: Any
    captures: tuple[Capture, ...]

    @property
    def indexes_by_score(self) -> bool:
        """Whether a captured tensor is indexed by something that is computed from the score."""
        return any(SYMBOLS["score"] in load.free_symbols for load in self.expression.atoms(AppliedUndef))


def trace(modifier: Modifier) -> Traced:
    """Calls the modifier on symbolic values and returns what it computes as one expression, traced once a name.

    A function may use + - * / // % **, comparisons, & | ^ ~, abs, torch.where, minimum, maximum, clamp, tanh, sigmoid,
    exp, exp2, log, log2, sqrt, rsqrt, sin, cos, erf, floor, ceil, trunc, sign and the methods of these names,
    conversions to float32, int32, int64 and bool, and captured tensors indexed by integers. // and % are Python's.
    Raises `Untraceable` for all else, naming it; such a modifier is served densely.
    """
    outcome = OUTCOMES.get(modifier.name)
    if outcome is None:
        outcome = OUTCOMES[modifier.name] = _trace(modifier)
    if isinstance(outcome, Traced):
        return outcome
    raise Untraceable(f"{modifier.kind}_mod {modifier.name} cannot be traced: {outcome}")


def outcome_of(modifier: Modifier) -> tuple[Traced | str, str]:
    """What tracing the modifier gives now, an expression or why there is none, and that as a text to compare."""
    outcome = _trace(modifier)
    return outcome, outcome if isinstance(outcome, str) else sympy.srepr(outcome.expression)


def check_unchanged(modifier: Modifier) -> None:
    """Raises ValueError where the modifier's kernels compute something else than the function does now."""
    known = OUTCOMES.get(modifier.name)
    if not isinstance(known, Traced):  # no kernel
        return
    outcome, says = outcome_of(modifier)
    if isinstance(outcome, str) or says != sympy.srepr(known.expression):
        now = outcome if isinstance(outcome, str) else outcome.expression
        raise ValueError(
            f"{modifier.kind}_mod {modifier.name} must compute what it did when it was registered, {known.expression}, "
            f"got {now}: an object that it reads has changed, so register it again"
        )


def _trace(modifier: Modifier) -> Traced | str:
    try:
        result = modifier.bound([StandIn(capture) for capture in modifier.captures])(
            *(Symbolic(SYMBOLS[name]) for name in PARAMETERS[modifier.kind])
        )
        expression = _checked(modifier.kind, lift(result))
    except Exception as error:  # whatever the user's function raises on a symbolic value
        return str(error) if isinstance(error, Untraceable) else f"{type(error).__name__}: {error}"
    return Traced(modifier.kind, expression, modifier.captures)


def _checked(kind: str, expression: Any) -> Any:
    if kind == "mask" and not is_truth(expression):
        raise Untraceable(f"a mask function must return a condition, got {expression}")
    if kind == "score" and is_truth(expression):
        raise Untraceable(f"a score function must return a number, got {expression}")
    for node in sympy.preorder_traversal(expression):
        if node.has(sympy.nan, sympy.zoo) or not isinstance(node, _PRINTED):
            raise Untraceable(f"{node} has no expression in a kernel")
    return expression
