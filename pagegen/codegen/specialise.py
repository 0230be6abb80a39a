"""Source-level specialisation of a Python template: binds constants, folds branches, drops what is left over.

A template is a module of `@triton.jit` kernels and host functions that launch them. Names in capitals that a
function takes as parameters are constants to bind; calls between the template's functions pass everything by
keyword, constants as `NAME=NAME`. That convention is all the specialiser relies on:

1. `if` statements and expressions whose tests are decided by the bound values are folded;
   likewise a product or quotient with a constant 1, and an option of a tl function that is False;
2. bound parameters and the keywords that passed them go, the names become module constants;
3. assignments to names that nothing reads, parameters that nothing uses (with the arguments that fed them) and
   functions and imports that nothing refers to are dropped, until nothing changes.

Comments and blank lines stay with the statements that stay. libcst keeps them through every step.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst

from pagegen.codegen import below, prune

Value = int | float | bool | str

_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip

MAX_LINE = 120
# A bracket whose items stand on lines of their own, none of them with a comment.
_EXPLODED = re.compile(r"^(?P<head>.*\()\n(?P<items>(?: +[^\s#][^\n#]*,\n)+) *(?P<tail>\).*)$", re.MULTILINE)


def specialise(source: str, bindings: Mapping[str, Value], *, header: Sequence[str], roots: Sequence[str]) -> str:
    """`source` with the constants of `bindings` bound, behind the comment lines of `header`.

    `roots` names the host functions that the result is for; what they do not reach is dropped. Raises ValueError
    when a root or a binding is not in the template, or a root needs a constant that is not bound.
    """
    module = _parsed(source)
    notes = _constant_notes(module)
    missing = set(bindings) - set(notes)
    if missing:
        raise ValueError(f"bindings must name constants of the template, got {', '.join(sorted(missing))}")
    module = _visit(module, _Fold(bindings))
    module = _visit(module, _Bind(bindings))
    module = prune.without_headings(prune.unused(module, roots))
    unbound = sorted(set(_constant_notes(module)))
    if unbound:
        raise ValueError(f"bindings must give a value for {', '.join(unbound)}")
    module = _with_constants(module, bindings, notes)
    comments = [cst.EmptyLine(comment=cst.Comment(f"# {line}")) for line in header]
    return _EXPLODED.sub(_on_one_line, module.with_changes(header=[*comments, *module.header]).code)


@functools.lru_cache(maxsize=4)  # a tree of 17,000 nodes each, which nothing changes
def _parsed(source: str) -> cst.Module:
    return cst.parse_module(source)


def _on_one_line(exploded: re.Match[str]) -> str:
    """What is left of a list that no longer needs several lines, as a formatter would write it."""
    items = " ".join(line.strip() for line in exploded["items"].splitlines()).removesuffix(",")
    line = f"{exploded['head']}{items}{exploded['tail']}"
    return line if len(line) <= MAX_LINE else exploded[0]


def _visit(module: cst.Module, transformer: cst.CSTTransformer) -> cst.Module:
    changed = module.visit(transformer)
    assert isinstance(changed, cst.Module)
    return changed


def _constant_notes(module: cst.Module) -> dict[str, str]:
    """Every constant parameter of the template, in order, with the comment behind it ("" for none)."""
    notes: dict[str, str] = {}
    for function in prune.functions(module):
        for param in function.params.params:
            name = param.name.value
            if name.isupper():
                notes[name] = notes.get(name) or _trailing_comment(param)
    return notes


def _trailing_comment(param: cst.Param) -> str:
    space = param.comma.whitespace_after if isinstance(param.comma, cst.Comma) else None
    if isinstance(space, cst.ParenthesizedWhitespace) and space.first_line.comment:
        return space.first_line.comment.value
    return ""


class _Bind(below.Transformer):
    """Drops bound parameters and the `NAME=NAME` arguments that passed them."""

    def __init__(self, bindings: Mapping[str, Value]) -> None:
        super().__init__(bindings)
        self.bindings = bindings

    def leave_Parameters(self, original_node: cst.Parameters, updated_node: cst.Parameters) -> cst.Parameters:
        kept = [p for p in updated_node.params if p.name.value not in self.bindings]
        return updated_node.with_changes(params=prune.relist(updated_node.params, kept))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        kept = [a for a in updated_node.args if not self._passes_bound(a)]
        return updated_node.with_changes(args=prune.relist(updated_node.args, kept))

    def _passes_bound(self, arg: cst.Arg) -> bool:
        return (
            arg.keyword is not None
            and arg.keyword.value in self.bindings
            and isinstance(arg.value, cst.Name)
            and arg.value.value == arg.keyword.value
        )


class _Fold(below.Transformer):
    """Replaces every `if` that the bound values decide by the branch they choose."""

    def __init__(self, bindings: Mapping[str, Value]) -> None:
        super().__init__(bindings)
        self.bindings = bindings
        self.elifs: set[cst.CSTNode] = set()

    def visit_If(self, node: cst.If) -> None:
        if isinstance(node.orelse, cst.If):
            self.elifs.add(node.orelse)

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        if original_node in self.elifs:  # folded with the chain it belongs to
            return updated_node
        chosen = self._choose(updated_node)
        if chosen is None:
            return cst.RemoveFromParent()
        if isinstance(chosen, cst.If):
            return chosen.with_changes(leading_lines=updated_node.leading_lines)
        body = chosen.body if isinstance(chosen, cst.Else) else chosen
        assert isinstance(body, cst.IndentedBlock)
        first = prune.with_lines_before(body.body[0], updated_node.leading_lines)
        return cst.FlattenSentinel([first, *body.body[1:]])

    def _choose(self, node: cst.If | cst.Else | None) -> cst.If | cst.Else | cst.BaseSuite | None:
        """What is left of an if-elif-else chain: a shorter chain, one branch's body, or nothing."""
        if not isinstance(node, cst.If):
            return node
        value = self._value(node.test)
        if value is None:
            rest = self._choose(node.orelse)
            return node.with_changes(orelse=cst.Else(body=rest) if isinstance(rest, cst.BaseSuite) else rest)
        return node.body if value else self._choose(node.orelse)

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.BaseExpression:
        value = self._value(updated_node.test)
        if value is None:
            return updated_node
        return updated_node.body if value else updated_node.orelse

    def leave_BinaryOperation(
        self, original_node: cst.BinaryOperation, updated_node: cst.BinaryOperation
    ) -> cst.BaseExpression:
        """Drops a multiplication or division by a constant that is bound to 1."""
        right = updated_node.right
        if isinstance(updated_node.operator, cst.FloorDivide | cst.Multiply) and isinstance(right, cst.Name):
            return updated_node.left if self.bindings.get(right.value) == 1 else updated_node
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Drops an option of a tl function that is bound to False, which is its default."""
        if not cst.Module([]).code_for_node(updated_node.func).startswith("tl."):
            return updated_node
        kept = [a for a in updated_node.args if a.keyword is None or not self._is_false(a.value)]
        return updated_node.with_changes(args=prune.relist(updated_node.args, kept))

    def _is_false(self, value: cst.BaseExpression) -> bool:
        return isinstance(value, cst.Name) and self.bindings.get(value.value) is False

    def _value(self, test: cst.BaseExpression) -> bool | None:
        """The truth of a test, or None when it depends on more than the bound values."""
        text = cst.Module([]).code_for_node(test)
        try:
            return bool(_evaluate(ast.parse(text, mode="eval").body, self.bindings))
        except _Undecided:
            return None


class _Undecided(Exception):
    """The expression depends on a name that is not bound, or has a form that is not folded."""


def _evaluate(node: ast.expr, bindings: Mapping[str, Value]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in bindings:
        return bindings[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _evaluate(node.operand, bindings)
    if isinstance(node, ast.BoolOp):
        values = [bool(_evaluate(value, bindings)) for value in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left, bindings), _evaluate(node.right, bindings))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        left, right = _evaluate(node.left, bindings), _evaluate(node.comparators[0], bindings)
        return _OPERATORS[type(node.ops[0])](left, right)
    raise _Undecided


def _with_constants(module: cst.Module, bindings: Mapping[str, Value], notes: Mapping[str, str]) -> cst.Module:
    """The bound values that are still read, as module constants behind the imports. Triton reads a global only
    as a tl.constexpr; host code then takes its `.value`."""
    kernels, host = prune.names_by_side(module)
    lines = []
    for name in bindings:
        if name not in kernels | host:
            continue
        value = f"tl.constexpr({bindings[name]!r})" if name in kernels else repr(bindings[name])
        comment = f"  {notes[name]}" if notes[name] else ""
        lines.append(f"{name} = {value}{comment}\n")
    module = _visit(module, _HostValues({name for name in bindings if name in kernels}))
    constants = cst.parse_module("".join(lines)).body
    last_import = max(i for i, s in enumerate(module.body) if prune.is_import(s))
    spaced = [prune.with_lines_before(constants[0], [cst.EmptyLine(indent=False)]), *constants[1:]] if lines else []
    return module.with_changes(body=[*module.body[: last_import + 1], *spaced, *module.body[last_import + 1 :]])


class _HostValues(below.Transformer):
    """In host functions, reads a constant that kernels share as `NAME.value`."""

    def __init__(self, shared: set[str]) -> None:
        super().__init__(shared)
        self.shared = shared
        self.in_host = False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        self.in_host = not node.decorators
        return self.in_host

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        self.in_host = False
        return updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        if self.in_host and updated_node.value in self.shared:
            return cst.Attribute(value=updated_node, attr=cst.Name("value"))
        return updated_node
