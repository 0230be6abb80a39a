"""What the functions and methods of torch mean as sympy expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from pagegen.modifiers.symbolic import Untraceable, Where, is_truth


def _number(value: Any) -> Any:
    """A condition counts as 1 or 0, as in torch."""
    return Where(value, sympy.Integer(1), sympy.Integer(0)) if is_truth(value) else value


def _condition(value: Any) -> Any:
    if not is_truth(value):
        raise Untraceable(f"it uses the number {value} as a condition: compare it")
    return value


def _numeric(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of operands that are numbers."""

    def operation(*values: Any, **options: Any) -> Any:
        return function(*(_number(v) for v in values), **options)

    return operation


def _logical(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of operands that are conditions."""

    def operation(*values: Any) -> Any:
        return function(*(_condition(v) for v in values))

    return operation


def _compared(relation: Any) -> Callable[..., Any]:
    def operation(a: Any, b: Any) -> Any:
        a, b = _number(a), _number(b)
        condition = relation(a, b)
        return _exact(condition) if a.is_integer and b.is_integer else condition

    return operation


def _exact(condition: Any) -> Any:
    """A comparison of integers without fractions: sympy makes k/3 < 2 of k // 3 <= 1, which a kernel would round."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return condition
    divisor = sympy.fraction(sympy.together(condition.lhs - condition.rhs))[1]
    if divisor == 1 or not divisor.is_Integer:
        return condition
    return _exact(condition.func(*(sympy.expand(side * divisor) for side in condition.args)))


def _exclusive(a: Any, b: Any) -> Any:
    return sympy.Or(sympy.And(a, sympy.Not(b)), sympy.And(sympy.Not(a), b))


def _equal(a: Any, b: Any) -> Any:
    if is_truth(a) and is_truth(b):
        return sympy.Not(_exclusive(a, b))
    return _compared(sympy.Eq)(a, b)


def _where(condition: Any, a: Any, b: Any) -> Any:
    condition = _condition(condition)
    if is_truth(a) and is_truth(b):
        return sympy.Or(sympy.And(condition, a), sympy.And(sympy.Not(condition), b))
    return Where(condition, _number(a), _number(b))


def _nonzero(divisor: Any) -> Any:
    if divisor == 0:
        raise Untraceable("it divides by zero")
    return divisor


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return sympy.floor(a / _nonzero(b))
    if rounding_mode == "trunc":
        return _truncate(a / _nonzero(b))
    return a / _nonzero(b)


def _truncate(value: Any) -> Any:
    return value if value.is_integer else Where(value >= 0, sympy.floor(value), sympy.ceiling(value))


def _power(base: Any, exponent: Any) -> Any:
    """A kernel has no general power: a constant exponent, or a constant positive base."""
    if not (exponent.is_number or (base.is_number and base > 0)):
        raise Untraceable(f"it raises {base} to {exponent}: one must be a constant (a base a positive one)")
    return base**exponent


def _clamp(value: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002  torch's names
    raised = value if min is None else sympy.Max(value, min)
    return raised if max is None else sympy.Min(raised, max)


def _to(value: Any, *kinds: Any, dtype: Any = None, **_: Any) -> Any:
    """The dtypes that a conversion can name; a device or nothing converts nothing."""
    for kind in (*kinds, dtype):
        if kind in (torch.float32, torch.float64):
            return _number(value)
        if kind in (torch.int32, torch.int64):
            return _truncate(_number(value))
        if kind == torch.bool:
            return _truth_of(value)
        if isinstance(kind, torch.dtype):
            raise Untraceable(f"it converts to {kind}: only float32, float64, int32, int64 and bool have expressions")
    return value


def _truth_of(value: Any) -> Any:
    return value if is_truth(value) else sympy.Ne(value, 0)


def _sign(value: Any) -> Any:
    return Where(value > 0, sympy.Integer(1), Where(value < 0, sympy.Integer(-1), sympy.Integer(0)))


def _full(_: Any, value: Any, dtype: Any = None, device: Any = None) -> Any:
    return value if dtype is None else _to(value, dtype)


# By the name that torch gives a function or a method, less underscores at its ends (`__rsub__` is rsub).
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _numeric(lambda a, b, alpha=1: a + alpha * b),
    "radd": _numeric(lambda a, b: a + b),
    "sub": _numeric(lambda a, b, alpha=1: a - alpha * b),
    "subtract": _numeric(lambda a, b, alpha=1: a - alpha * b),
    "rsub": _numeric(lambda a, b, alpha=1: b - alpha * a),
    "mul": _numeric(lambda a, b: a * b),
    "multiply": _numeric(lambda a, b: a * b),
    "rmul": _numeric(lambda a, b: a * b),
    "div": _numeric(_divide),
    "divide": _numeric(_divide),
    "true_divide": _numeric(_divide),
    "rdiv": _numeric(lambda a, b: b / _nonzero(a)),
    "floor_divide": _numeric(lambda a, b: sympy.floor(a / _nonzero(b))),
    "rfloordiv": _numeric(lambda a, b: sympy.floor(b / _nonzero(a))),
    "remainder": _numeric(lambda a, b: sympy.Mod(a, _nonzero(b))),
    "pow": _numeric(_power),
    "rpow": _numeric(lambda a, b: _power(b, a)),
    "neg": _numeric(lambda a: -a),
    "negative": _numeric(lambda a: -a),
    "abs": _numeric(sympy.Abs),
    "absolute": _numeric(sympy.Abs),
    "sign": _numeric(_sign),
    "square": _numeric(lambda a: a * a),
    "reciprocal": _numeric(lambda a: 1 / _nonzero(a)),
    "lt": _compared(sympy.StrictLessThan),
    "le": _compared(sympy.LessThan),
    "gt": _compared(sympy.StrictGreaterThan),
    "ge": _compared(sympy.GreaterThan),
    "less": _compared(sympy.StrictLessThan),
    "less_equal": _compared(sympy.LessThan),
    "greater": _compared(sympy.StrictGreaterThan),
    "greater_equal": _compared(sympy.GreaterThan),
    "eq": _equal,
    "ne": lambda a, b: sympy.Not(_equal(a, b)),
    "not_equal": lambda a, b: sympy.Not(_equal(a, b)),
    "bitwise_and": _logical(sympy.And),
    "and": _logical(sympy.And),
    "logical_and": lambda a, b: sympy.And(_truth_of(a), _truth_of(b)),
    "bitwise_or": _logical(sympy.Or),
    "or": _logical(sympy.Or),
    "logical_or": lambda a, b: sympy.Or(_truth_of(a), _truth_of(b)),
    "bitwise_xor": _logical(_exclusive),
    "xor": _logical(_exclusive),
    "logical_xor": lambda a, b: _exclusive(_truth_of(a), _truth_of(b)),
    "bitwise_not": _logical(sympy.Not),
    "logical_not": lambda a: sympy.Not(_truth_of(a)),
    "where": _where,
    "minimum": _numeric(sympy.Min),
    "maximum": _numeric(sympy.Max),
    "clamp": _numeric(_clamp),
    "clip": _numeric(_clamp),
    "clamp_min": _numeric(lambda a, min: sympy.Max(a, min)),  # noqa: A006
    "clamp_max": _numeric(lambda a, max: sympy.Min(a, max)),  # noqa: A006
    "relu": _numeric(lambda a: sympy.Max(a, 0)),
    "tanh": _numeric(sympy.tanh),
    "sigmoid": _numeric(lambda a: 1 / (1 + sympy.exp(-a))),
    "exp": _numeric(sympy.exp),
    "exp2": _numeric(lambda a: sympy.Integer(2) ** a),
    "log": _numeric(sympy.log),
    "log2": _numeric(lambda a: sympy.log(a) / sympy.log(2)),
    "sqrt": _numeric(sympy.sqrt),
    "rsqrt": _numeric(lambda a: 1 / sympy.sqrt(a)),
    "sin": _numeric(sympy.sin),
    "cos": _numeric(sympy.cos),
    "erf": _numeric(sympy.erf),
    "floor": _numeric(sympy.floor),
    "ceil": _numeric(sympy.ceiling),
    "trunc": _numeric(_truncate),
    "to": _to,
    "type": _to,
    "float": lambda a: _to(a, torch.float32),
    "double": lambda a: _to(a, torch.float64),
    "int": lambda a: _to(a, torch.int32),
    "long": lambda a: _to(a, torch.int64),
    "bool": lambda a: _to(a, torch.bool),
    "full_like": _full,
    "zeros_like": lambda a, **options: _full(a, sympy.Integer(0), **options),
    "ones_like": lambda a, **options: _full(a, sympy.Integer(1), **options),
}
