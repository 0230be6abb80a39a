"""Values that a modifier computes with while it is traced: sympy expressions that behave like torch tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor

from pagegen.modifiers.closures import Capture


class Untraceable(TypeError):
    """A modifier does what no expression can say; the message says what. It still computes densely."""


class Where(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """Where(condition, a, b): a where the condition holds, else b. Unlike sympy's Piecewise it rewrites nothing."""

    nargs = 3

    @classmethod
    def eval(cls, condition: Any, a: Any, b: Any) -> Any:
        if condition in (sympy.true, sympy.false):
            return a if condition == sympy.true else b
        return a if a == b else None

    def _both(self, name: str) -> bool | None:
        found = {getattr(branch, name) for branch in self.args[1:]}
        return found.pop() if len(found) == 1 else None

    def _eval_is_integer(self) -> bool | None:
        return True if self._both("is_integer") else None

    def _eval_is_extended_real(self) -> bool | None:
        return True if self._both("is_extended_real") else None

    def _eval_is_finite(self) -> bool | None:
        return True if self._both("is_finite") else None

    def _eval_is_nonnegative(self) -> bool | None:
        return self._both("is_nonnegative")


class Wide(sympy.Function):  # type: ignore[misc]
    """An integer in 64 bits: what is computed with it does not overflow where a captured tensor holds large ones."""

    nargs = 1
    is_integer = True
    is_extended_real = True
    is_finite = True


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    def method(self: Symbolic, other: Any) -> Any:
        return apply(name, other, self) if swapped else apply(name, self, other)

    return method


class Symbolic:
    """A sympy expression, numeric or boolean, with the operators, methods and functions of a torch tensor."""

    def __init__(self, expression: Any) -> None:
        self.expression = expression

    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swapped=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", swapped=True)
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _operator("floor_divide", swapped=True)
    __mod__, __rmod__ = _operator("remainder"), _operator("remainder", swapped=True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", swapped=True)
    __and__, __rand__ = _operator("bitwise_and"), _operator("bitwise_and", swapped=True)
    __or__, __ror__ = _operator("bitwise_or"), _operator("bitwise_or", swapped=True)
    __xor__, __rxor__ = _operator("bitwise_xor"), _operator("bitwise_xor", swapped=True)
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Any:
        return apply("neg", self)

    def __pos__(self) -> Symbolic:
        return self

    def __abs__(self) -> Any:
        return apply("abs", self)

    def __invert__(self) -> Any:
        return apply("bitwise_not", self)

    def __bool__(self) -> bool:
        raise Untraceable(
            "it decides in Python on a symbolic value (if, and, or, not, min, max or a chained comparison): "
            "use & | ~, torch.where, torch.minimum and torch.maximum"
        )

    @property
    def dtype(self) -> torch.dtype:
        if is_truth(self.expression):
            return torch.bool
        return torch.int64 if self.expression.is_integer else torch.float32

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(apply, name, self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return apply(func.__name__.strip("_"), *args, **(kwargs or {}))


class StandIn:
    """A captured tensor while its modifier is traced: it can be indexed."""

    def __init__(self, capture: Capture, indices: tuple[Any, ...] = ()) -> None:
        self.capture, self.indices = capture, indices

    def __getitem__(self, index: Any) -> Any:
        given = index if isinstance(index, tuple) else (index,)
        indices = (*self.indices, *(self._index(i) for i in given))
        if len(indices) > self.capture.rank:
            raise Untraceable(
                f"captured tensor {self.capture.name} has {self.capture.rank} dimensions, got {len(indices)} indices"
            )
        if len(indices) < self.capture.rank:
            # table[batch][k_pos] is table[batch, k_pos], since batch is a number where the function is on tensors;
            # head and positions are tensors there, whose dimensions the next index would meet
            if {symbol.name for index in indices for symbol in index.free_symbols} - {"batch"}:
                raise Untraceable(f"captured tensor {self.capture.name} must be indexed in all its dimensions at once")
            return StandIn(self.capture, indices)
        integer = self.capture.dtype != torch.float32
        load = sympy.Function(self.capture.name, integer=True if integer else None, real=True)(*indices)
        return Symbolic(sympy.Ne(load, 0) if self.capture.dtype == torch.bool else load)

    def _index(self, index: Any) -> Any:
        if isinstance(index, (Symbolic, int)) and not isinstance(index, bool):
            expression = lift(index)
            if expression.is_integer and not (expression.is_Integer and expression < 0):
                return expression
        raise Untraceable(
            f"captured tensor {self.capture.name} must be indexed with integers (no slices, no negative constants), "
            f"got {index.expression if isinstance(index, Symbolic) else index!r}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Untraceable(f"captured tensor {self.capture.name} can only be indexed, got .{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Untraceable(f"a captured tensor can only be indexed with all its dimensions, got torch's {func.__name__}")


def is_truth(expression: Any) -> bool:
    """Whether an expression is a condition and not a number."""
    return isinstance(expression, (sympy.logic.boolalg.Boolean, bool)) and not isinstance(expression, sympy.Symbol)


def lift(value: Any) -> Any:
    """A value as a sympy expression. Raises Untraceable for what is neither symbolic nor a number."""
    if isinstance(value, Symbolic):
        return value.expression
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if isinstance(value, float):
        if value != value:
            raise Untraceable("it computes with NaN")
        return sympy.Float(value) if abs(value) != float("inf") else (sympy.oo if value > 0 else -sympy.oo)
    if isinstance(value, StandIn):
        raise Untraceable(f"captured tensor {value.capture.name} needs {value.capture.rank} indices")
    if isinstance(value, Tensor):
        raise Untraceable("it reads a tensor that it did not capture by name (an attribute, or in a container)")
    raise Untraceable(f"it computes with a {type(value).__name__}")


def apply(name: str, *args: Any, **options: Any) -> Symbolic:
    """The torch function or method `name` of symbolic values. Raises Untraceable for one that has no expression."""
    from pagegen.modifiers.operations import OPERATIONS

    if name == "getitem":
        raise Untraceable("it reads a tensor that it did not capture by name (an attribute, or in a container)")
    if name not in OPERATIONS:
        raise Untraceable(f"torch's {name} of a symbolic value has no expression")
    lifted = [_operand(value) for value in args]
    return Symbolic(OPERATIONS[name](*lifted, **{key: _operand(value) for key, value in options.items()}))


def _operand(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, torch.dtype, torch.device)) else lift(value)
