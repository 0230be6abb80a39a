"""Traced expressions as Triton source."""

from __future__ import annotations

from typing import Any

import sympy

from pagegen.modifiers.printing import ATOM, EXP2, PRODUCT, UNARY, Printer, Text
from pagegen.modifiers.tracing import Traced


class TritonPrinter(Printer):
    """Python's precedences: & and | bind tighter than comparisons."""

    comparison, disjunction, conjunction = 30, 40, 50
    logic = {sympy.And: "&", sympy.Or: "|"}
    functions = {
        EXP2: "tl.exp2", sympy.exp: "tl.exp", sympy.log: "tl.log", sympy.sqrt: "tl.sqrt", sympy.sin: "tl.sin",
        sympy.cos: "tl.cos", sympy.erf: "tl.erf", sympy.tanh: "tanh", sympy.Abs: "tl.abs",
    }  # fmt: skip
    infinity = 'float("inf")'
    division = "//"

    def literal(self, value: float) -> str:
        return repr(value)

    def truth(self, value: bool) -> str:
        return str(value)

    def negation(self, operand: Text) -> Text:
        return Text(f"~{operand.within(UNARY)}", UNARY, "bool")

    def to_float(self, operand: Text) -> Text:
        if operand.type == "float":
            return operand
        if operand.text.isdigit():
            return Text(f"{operand.text}.0", ATOM, "float")
        return Text(f"1.0 * {operand.within(PRODUCT + 1)}", PRODUCT, "float")

    def to_int(self, operand: Text) -> str:
        return f"{operand.within(ATOM)}.to(tl.int32)"

    def where(self, condition: Text, a: Text, b: Text) -> Text:
        kind = "float" if "float" in (a.type, b.type) else "int"
        return Text(f"tl.where({condition.text}, {a.text}, {b.text})", ATOM, kind)

    def extreme(self, name: str, operands: list[Text], exact: Any) -> Text:
        text, kinds = operands[0].text, {operand.type for operand in operands}
        for operand in operands[1:]:
            text = f"tl.{name}imum({text}, {operand.text})"
        return Text(text, ATOM, "float" if "float" in kinds else "int")

    def load(self, name: str, indices: list[str], kind: str) -> Text:
        prefix = f"{self.kind}_{name}"
        sizes = [f"{prefix}_size_{i}" for i in range(len(indices))]
        return Text(f"captured_{len(indices)}({', '.join([f'{prefix}_ptr', *indices, *sizes])})", ATOM, kind)

    def widened(self, operand: Text) -> Text:
        return Text(f"{operand.within(ATOM)}.to(tl.int64)", ATOM, "int")

    def rounded(self, name: str, operand: Text) -> Text:
        return Text(f"tl.{name}({self.to_float(operand).text})", ATOM, "float")


def print_triton(expression: Traced | Any, kind: str | None = None) -> str:
    """One Triton expression over the names score, batch, head, q_pos and k_pos, for a `Traced` or for an expression of
    a modifier of `kind` (say, a bound from `mask_range`).

    It calls what the template defines: tanh(x), floor_div(a, b), floor_mod(a, b) (Python's // and %, where an operand
    may be negative) and captured_N(pointer, indices..., sizes...) for a captured tensor of N dimensions, with the
    arguments {kind}_NAME_ptr and {kind}_NAME_size_0 ... in scope. A condition may be the literal True or False, and
    what depends on fewer than all positions has fewer dimensions: broadcast it. Raises ValueError for an expression
    without its `kind`.
    """
    return TritonPrinter.source(expression, kind)
