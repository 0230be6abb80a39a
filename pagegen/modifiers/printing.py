"""One expression in a target language: what the printers of Triton and C++ have in common.

Text depends on the expression alone: terms come in sympy's own order, which compares structure and not hashes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from pagegen.modifiers.registry import PARAMETERS
from pagegen.modifiers.symbolic import Where, Wide, is_truth
from pagegen.modifiers.tracing import Traced

# How tight a form binds; the languages differ below sums. Integer division is set apart: -k // 4 is not -(k // 4).
ATOM, UNARY, PRODUCT, QUOTIENT, SUM = 100, 90, 80, 75, 70

EXP2 = "exp2"  # sympy has no function of this name
_MOST_FACTORS = 16  # of a power that is printed as a product


@dataclass(frozen=True)
class Text:
    """A printed expression: how tight its outermost operator binds, and its type: "int", "float" or "bool"."""

    text: str
    binds: int
    type: str

    def within(self, least: int) -> str:
        """The text as an operand of an operator that needs operands binding at least `least`."""
        return self.text if self.binds >= least else f"({self.text})"


class Printer:
    """Prints traced expressions; a language is a subclass. `kind` ("score" or "mask") starts the names of captures."""

    comparison: int
    conjunction: int
    disjunction: int
    logic: dict[type, str]
    functions: dict[Any, str]
    infinity: str
    division: str  # of integers

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @classmethod
    def source(cls, expression: Traced | Any, kind: str | None) -> str:
        """The text of a `Traced`, or of an expression of a modifier of `kind`. Raises ValueError where no kind is
        known."""
        if isinstance(expression, Traced):
            expression, kind = expression.expression, expression.kind
        if kind not in PARAMETERS:
            raise ValueError(f'kind must be "score" or "mask", got {kind!r}')
        return cls(kind).print(expression).text

    # What a language says in its own way.
    def literal(self, value: float) -> str:
        raise NotImplementedError

    def truth(self, value: bool) -> str:
        raise NotImplementedError

    def negation(self, operand: Text) -> Text:
        raise NotImplementedError

    def to_float(self, operand: Text) -> Text:
        raise NotImplementedError

    def to_int(self, operand: Text) -> str:
        raise NotImplementedError

    def where(self, condition: Text, a: Text, b: Text) -> Text:
        raise NotImplementedError

    def extreme(self, name: str, operands: list[Text], exact: Any) -> Text:
        raise NotImplementedError

    def load(self, name: str, indices: list[str], kind: str) -> Text:
        raise NotImplementedError

    def widened(self, operand: Text) -> Text:
        raise NotImplementedError

    def rounded(self, name: str, operand: Text) -> Text:
        raise NotImplementedError

    # What all say alike.
    def print(self, expression: Any) -> Text:  # noqa: A003
        if expression in (sympy.true, sympy.false):
            return Text(self.truth(expression == sympy.true), ATOM, "bool")
        if is_truth(expression):
            return self._condition(expression)
        if expression in (sympy.oo, -sympy.oo):
            return self._signed(self.infinity, negative=expression == -sympy.oo, kind="float")
        if expression.is_Integer:
            return self._signed(str(abs(int(expression))), negative=expression < 0, kind="int")
        if expression.is_number and not expression.has(AppliedUndef):
            return self._signed(self.literal(abs(float(expression))), negative=expression < 0, kind="float")
        return self._number(expression)

    def _signed(self, text: str, *, negative: bool, kind: str) -> Text:
        return Text(f"-{text}", UNARY, kind) if negative else Text(text, ATOM, kind)

    def _number(self, e: Any) -> Text:
        if e.is_Symbol:
            return Text(e.name, ATOM, "int" if e.is_integer else "float")
        if isinstance(e, AppliedUndef):
            indices = [self._integer(self.print(index)).text for index in e.args]
            return self.load(e.func.__name__, indices, "int" if e.is_integer else "float")
        if isinstance(e, Wide):
            return self.widened(self.print(e.args[0]))
        special: dict[type, Callable[[Any], Text]] = {
            sympy.Add: self._sum, sympy.Mul: self._product, sympy.Pow: self._power, sympy.floor: self._floor,
            sympy.ceiling: self._ceiling, sympy.Mod: self._modulo, sympy.Min: self._extreme, sympy.Max: self._extreme,
            Where: self._where, sympy.Abs: self._absolute,
        }  # fmt: skip
        for form, method in special.items():
            if isinstance(e, form):
                return method(e)
        return self._called(e.func, self.print(e.args[0]))

    def _called(self, function: Any, operand: Text) -> Text:
        return Text(f"{self.functions[function]}({self.to_float(operand).text})", ATOM, "float")

    def _condition(self, e: Any) -> Text:
        if isinstance(e, Relational):
            sides = [self.print(side).within(self.comparison + 1) for side in e.args]
            return Text(f"{sides[0]} {e.rel_op} {sides[1]}", self.comparison, "bool")
        if isinstance(e, sympy.Not):
            return self.negation(self.print(e.args[0]))
        binds = self.conjunction if isinstance(e, sympy.And) else self.disjunction
        # one level more than needed between && and ||: compilers warn of the bare form
        parts = [self.print(part).within(self.conjunction + 1) for part in e.args]
        return Text(f" {self.logic[e.func]} ".join(parts), binds, "bool")

    def _sum(self, e: Any) -> Text:
        terms = [(term, term.could_extract_minus_sign()) for term in e.as_ordered_terms()]
        terms.sort(key=lambda term: term[1])  # stable: what is added comes before what is taken away
        text, kinds = "", []
        for term, negative in terms:
            printed = self.print(-term if negative else term)
            kinds.append(printed.type)
            if text:
                text += f" - {printed.within(SUM + 1)}" if negative else f" + {printed.within(SUM)}"
            else:
                text = f"-{printed.within(PRODUCT)}" if negative else printed.within(SUM)
        return Text(text, SUM, _joint(kinds))

    def _product(self, e: Any) -> Text:
        if e.could_extract_minus_sign():
            positive = self.print(-e)
            return Text(f"-{positive.within(PRODUCT)}", SUM, positive.type)
        above, below = [], []
        for factor in e.as_ordered_factors():
            if factor.is_Rational and not factor.is_Integer:
                above += [sympy.Integer(factor.p)] if factor.p != 1 else []
                below.append(sympy.Integer(factor.q))
            elif factor.is_Pow and factor.exp.is_number and factor.exp < 0:
                below.append(factor.base**-factor.exp)
            else:
                above.append(factor)
        top = self._times([self.print(factor) for factor in above] or [self.print(sympy.Integer(1))])
        if not below:
            return top
        bottom = self._times([self.print(factor) for factor in below])
        if bottom.type == "int":  # in C++ the quotient of integers is one
            top = top if top.type == "float" or self.division == "//" else self.to_float(top)
        return Text(f"{top.within(PRODUCT)} / {bottom.within(PRODUCT + 1)}", PRODUCT, "float")

    def _times(self, factors: list[Text]) -> Text:
        if len(factors) == 1:
            return factors[0]
        texts = [factors[0].within(PRODUCT), *(factor.within(PRODUCT + 1) for factor in factors[1:])]
        return Text(" * ".join(texts), PRODUCT, _joint([factor.type for factor in factors]))

    def _power(self, e: Any) -> Text:
        base, exponent = e.args
        if exponent.is_number and exponent >= 0 and float(exponent).is_integer():
            return self._whole_power(base, int(exponent), exact=bool(exponent.is_Integer))
        if exponent.is_number and exponent < 0:
            below = self.print(base**-exponent)
            top = self.to_float(self.print(sympy.Integer(1)))
            return Text(f"{top.text} / {below.within(PRODUCT + 1)}", PRODUCT, "float")
        if exponent == sympy.Rational(1, 2):
            return self._called(sympy.sqrt, self.print(base))
        if exponent.is_number:  # NaN of a negative base, as in torch
            return self._exponential(base, exponent)
        return self._called(EXP2, self.print(exponent * _log2(base)))

    def _whole_power(self, base: Any, exponent: int, *, exact: bool) -> Text:
        """`exponent` factors, integers where the exponent is written as one; of many, the magnitude and its sign."""
        if exponent <= _MOST_FACTORS:
            factor = self.print(base)
            factor = factor if exact else self.to_float(factor)
            return self._times([factor] * exponent) if exponent else self.to_float(self.print(sympy.Integer(1)))
        size = self._exponential(sympy.Abs(base), sympy.Integer(exponent))
        if exponent % 2 == 0 or base.is_nonnegative:
            return size
        return self.where(self.print(base < 0), Text(f"-{size.within(UNARY)}", UNARY, "float"), size)

    def _exponential(self, base: Any, exponent: Any) -> Text:
        logarithm = self._called(sympy.log, self.print(base))
        return self._called(sympy.exp, self._times([self.print(sympy.Float(exponent)), logarithm]))

    def _floor(self, e: Any) -> Text:
        dividend, divisor = e.args[0].as_numer_denom()
        if not (dividend.is_integer and divisor.is_integer):
            return self.rounded("floor", self.print(e.args[0]))
        return self._integer_division(dividend, divisor, "//", "floor_div")

    def _ceiling(self, e: Any) -> Text:
        dividend, divisor = e.args[0].as_numer_denom()
        if not (dividend.is_integer and divisor.is_integer):
            return self.rounded("ceil", self.print(e.args[0]))
        return self.print(-sympy.floor(-dividend / divisor))

    def _modulo(self, e: Any) -> Text:
        dividend, divisor = e.args
        if dividend.is_integer and divisor.is_integer:
            return self._integer_division(dividend, divisor, "%", "floor_mod")
        return self.print(dividend - divisor * sympy.floor(dividend / divisor))

    def _integer_division(self, dividend: Any, divisor: Any, operator: str, helper: str) -> Text:
        """Truncation is floor where both are known not to be negative; elsewhere the template's helper does it."""
        a, b = (self._integer(self.print(part)) for part in (dividend, divisor))
        if dividend.is_nonnegative and divisor.is_positive:
            operator = self.division if operator == "//" else operator
            return Text(f"{a.within(PRODUCT)} {operator} {b.within(PRODUCT + 1)}", QUOTIENT, "int")
        return Text(f"{helper}({a.text}, {b.text})", ATOM, "int")

    def _integer(self, operand: Text) -> Text:
        """A whole number as an integer: what floor and powers give is a float in both languages."""
        return operand if operand.type == "int" else Text(self.to_int(operand), ATOM, "int")

    def _extreme(self, e: Any) -> Text:
        return self.extreme("min" if isinstance(e, sympy.Min) else "max", [self.print(arg) for arg in e.args], e)

    def _where(self, e: Any) -> Text:
        return self.where(*(self.print(arg) for arg in e.args))

    def _absolute(self, e: Any) -> Text:
        operand = self.print(e.args[0])
        return Text(f"{self.functions[sympy.Abs]}({operand.text})", ATOM, operand.type)


def _log2(base: Any) -> Any:
    return sympy.Integer(1) if base == 2 else sympy.Float(math.log2(float(base)))


def _joint(kinds: list[str]) -> str:
    return "float" if "float" in kinds else "int"
