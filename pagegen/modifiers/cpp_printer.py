"""Traced expressions as C++20 source."""

from __future__ import annotations

from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from pagegen.modifiers.printing import ATOM, EXP2, UNARY, Printer, Text
from pagegen.modifiers.tracing import Traced

_CHOICE = 10  # ?: binds last


class CppPrinter(Printer):
    """C++'s precedences: comparisons bind tighter than &&, that tighter than ||."""

    disjunction, conjunction, comparison = 20, 30, 40
    logic = {sympy.And: "&&", sympy.Or: "||"}
    functions = {
        EXP2: "std::exp2", sympy.exp: "std::exp", sympy.log: "std::log", sympy.sqrt: "std::sqrt", sympy.sin: "std::sin",
        sympy.cos: "std::cos", sympy.erf: "std::erf", sympy.tanh: "std::tanh", sympy.Abs: "std::abs",
    }  # fmt: skip
    infinity = "std::numeric_limits<float>::infinity()"
    division = "/"

    def literal(self, value: float) -> str:
        return f"{value!r}f"

    def truth(self, value: bool) -> str:
        return "true" if value else "false"

    def negation(self, operand: Text) -> Text:
        return Text(f"!{operand.within(UNARY)}", UNARY, "bool")

    def to_float(self, operand: Text) -> Text:
        if operand.type == "float":
            return operand
        if operand.text.isdigit():
            return Text(f"{operand.text}.0f", ATOM, "float")
        return Text(f"static_cast<float>({operand.text})", ATOM, "float")

    def to_int(self, operand: Text) -> str:
        return f"static_cast<int64_t>({operand.text})"

    def where(self, condition: Text, a: Text, b: Text) -> Text:
        kind = "float" if "float" in (a.type, b.type) else "int"
        branches = [branch.within(_CHOICE + 1) for branch in (a, b)]
        return Text(f"{condition.within(_CHOICE + 1)} ? {branches[0]} : {branches[1]}", _CHOICE, kind)

    def _integer_division(self, dividend: Any, divisor: Any, operator: str, helper: str) -> Text:
        """C++'s own operators for constant divisors only. Any other may come out as 0, if only by wrapping around or at
        a key that nobody attends, and the CPU ends a process that divides by it: the kernel's helpers do not trap."""
        if divisor.is_Integer:
            return super()._integer_division(dividend, divisor, operator, helper)
        a, b = (self._integer(self.print(part)) for part in (dividend, divisor))
        return Text(f"{helper}({a.text}, {b.text})", ATOM, "int")

    def extreme(self, name: str, operands: list[Text], exact: Any) -> Text:
        kind = "float" if any(operand.type == "float" for operand in operands) else "int"
        held = "float" if kind == "float" else "int64_t" if exact.has(AppliedUndef) else "int32_t"
        text = operands[0].text
        for operand in operands[1:]:
            text = f"std::{name}<{held}>({text}, {operand.text})"
        return Text(text, ATOM, kind)

    def load(self, name: str, indices: list[str], kind: str) -> Text:
        return Text(f"captured.{self.kind}_{name}({', '.join(indices)})", ATOM, kind)

    def widened(self, operand: Text) -> Text:
        return operand  # a load gives 64 bits

    def rounded(self, name: str, operand: Text) -> Text:
        return Text(f"std::{name}({self.to_float(operand).text})", ATOM, "float")


def print_cpp(expression: Traced | Any, kind: str | None = None) -> str:
    """One C++20 expression over `float score; int32_t batch, head, q_pos, k_pos`, for a `Traced` or for an expression
    of a modifier of `kind` (say, a bound from `mask_range`).

    It needs the headers `algorithm`, `cmath`, `cstdint`, `cstdlib` and `limits`, and calls what the kernel defines:
    floor_div(a, b) and floor_mod(a, b) for integers of 32 and 64 bits, also mixed (Python's // and %, where an operand
    may be negative or the divisor 0: that result is unspecified, but must not trap), and
    captured.{kind}_NAME(indices...), which returns int64_t, float or bool. Raises ValueError for an expression without
    its `kind`.
    """
    return CppPrinter.source(expression, kind)
