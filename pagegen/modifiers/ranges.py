"""Which keys a mask can let a query attend: bounds of k_pos, derived from the mask's expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from pagegen.modifiers.symbolic import Wide
from pagegen.modifiers.tracing import SYMBOLS

Range = tuple[Any, Any]  # (low, high): low <= k_pos < high, None where there is no bound
_ANYTHING: Range = (None, None)
_K = SYMBOLS["k_pos"]


def mask_range(expression: Any) -> Range:
    """(low, high) such that the mask can only hold for low <= k_pos < high: integer expressions over batch, head, q_pos
    and captured tensors, or None for no bound at that end. Every bound is sound; not every mask has one.

    Understood are comparisons of integers that are linear in k_pos, in k_pos // c or in abs(k_pos - x), and what &, |
    and ~ make of them. Comparisons with a float bound nothing: a kernel evaluates them in float32, which may round
    another way than the exact arithmetic here.
    """
    low, high = _of(sympy.to_nnf(expression, simplify=False))
    return _widened(low), _widened(high)


def _widened(bound: Any) -> Any:
    """The bound, which computes in 64 bits with what it reads: "no limit" is often the largest number of an int32
    tensor, to which k_pos <= limit would add 1."""
    if isinstance(bound, (sympy.Min, sympy.Max)):
        return bound.func(*map(_widened, bound.args))
    if bound is None or isinstance(bound, AppliedUndef):
        return bound
    return bound.xreplace({load: Wide(load) for load in bound.atoms(AppliedUndef)})


def _of(condition: Any) -> Range:
    if condition == sympy.false:
        return sympy.Integer(0), sympy.Integer(0)
    if isinstance(condition, sympy.And):
        return _all([_of(part) for part in condition.args])
    if isinstance(condition, sympy.Or):
        return _any([_of(part) for part in condition.args])
    if isinstance(condition, sympy.core.relational.Relational):
        return _comparison(condition)
    return _ANYTHING


def _all(ranges: list[Range]) -> Range:
    lows, highs = ([r[end] for r in ranges if r[end] is not None] for end in (0, 1))
    return _join(sympy.Max, lows), _join(sympy.Min, highs)


def _any(ranges: list[Range]) -> Range:
    lows, highs = ([r[end] for r in ranges] for end in (0, 1))
    return (
        None if None in lows else _join(sympy.Min, lows),
        None if None in highs else _join(sympy.Max, highs),
    )


def _join(function: Callable[..., Any], bounds: list[Any]) -> Any:
    return function(*bounds) if bounds else None


def _comparison(condition: Any) -> Range:
    difference = sympy.expand(condition.lhs - condition.rhs)
    if difference.has(sympy.Float) or not difference.is_integer:
        return _ANYTHING
    zero, one = sympy.Integer(0), sympy.Integer(1)
    if isinstance(condition, sympy.StrictLessThan):
        return _at_most(difference, -one)
    if isinstance(condition, sympy.LessThan):
        return _at_most(difference, zero)
    if isinstance(condition, sympy.StrictGreaterThan):
        return _at_least(difference, one)
    if isinstance(condition, sympy.GreaterThan):
        return _at_least(difference, zero)
    if isinstance(condition, sympy.Equality):
        return _all([_at_most(difference, zero), _at_least(difference, zero)])
    return _ANYTHING


def _at_most(expression: Any, bound: Any) -> Range:
    """What expression <= bound says about k_pos; both are integers, and `bound` is free of k_pos."""
    factor, term, rest = _split(expression)
    if factor is None:
        return _ANYTHING
    room = bound - rest
    if factor < 0:
        return _solved_at_least(term, -sympy.floor(room / -factor))
    return _solved_at_most(term, sympy.floor(room / factor))


def _at_least(expression: Any, bound: Any) -> Range:
    return _at_most(-expression, -bound)


def _split(expression: Any) -> tuple[Any, Any, Any]:
    """(a, t, r) with expression = a*t + r, where the term t alone holds k_pos and a is an integer; a is None where that
    cannot be had."""
    with_key: list[Any] = []
    rest: list[Any] = []
    for term in sympy.Add.make_args(expression):
        (with_key if term.has(_K) else rest).append(term)
    if len(with_key) != 1:
        return None, None, None
    factor, term = with_key[0].as_coeff_Mul()
    if not factor.is_Integer or factor == 0:
        return None, None, None
    return factor, term, sympy.Add(*rest)


def _solved_at_most(term: Any, bound: Any) -> Range:
    if term == _K:
        return None, bound + 1
    if isinstance(term, sympy.floor):  # n // c <= b  <=>  n < c * (b + 1)
        dividend, divisor = _quotient(term)
        return _ANYTHING if divisor is None else _at_most(dividend, divisor * bound + divisor - 1)
    if isinstance(term, sympy.Abs) and term.args[0].is_integer:
        inner = sympy.expand(term.args[0])
        return _all([_at_most(inner, bound), _at_least(inner, -bound)])
    return _ANYTHING


def _solved_at_least(term: Any, bound: Any) -> Range:
    if term == _K:
        return bound, None
    if isinstance(term, sympy.floor):  # n // c >= b  <=>  n >= c * b
        dividend, divisor = _quotient(term)
        return _ANYTHING if divisor is None else _at_least(dividend, divisor * bound)
    return _ANYTHING


def _quotient(floor: Any) -> tuple[Any, Any]:
    """(n, c) of n // c with integers n and a constant c > 0; c is None where it is none."""
    dividend, divisor = floor.args[0].as_numer_denom()
    if divisor.is_Integer and divisor > 0 and dividend.is_integer:
        return sympy.expand(dividend), divisor
    return None, None
