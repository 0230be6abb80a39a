"""Dropping what specialisation left unused, and the list surgery that keeps the layout of what stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import libcst as cst

from pagegen.codegen import below

Element = TypeVar("Element", cst.Param, cst.Arg)


def functions(module: cst.Module) -> list[cst.FunctionDef]:
    """The module's functions, in order."""
    return [s for s in module.body if isinstance(s, cst.FunctionDef)]


def is_import(statement: cst.CSTNode) -> bool:
    """Whether a module statement is an import."""
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.Import | cst.ImportFrom)


def relist(before: Sequence[Element], kept: Sequence[Element]) -> list[Element]:
    """`kept` of `before`. The last one kept ends the list the way the last one of before did (its comma and line
    break), but keeps its own comment."""
    if not kept or kept[-1] is before[-1]:
        return list(kept)
    ending: dict[str, Any] = {"comma": _with_comment_of(kept[-1].comma, before[-1].comma)}
    if isinstance(before[-1], cst.Arg):
        ending["whitespace_after_arg"] = before[-1].whitespace_after_arg
    result = list(kept)
    result[-1] = result[-1].with_changes(**ending)  # type: ignore[assignment]  # the type stays
    return result


def _with_comment_of(own: Any, last: Any) -> Any:
    """The comma `last`, with the comment behind the comma `own` in place of its own."""
    if not isinstance(last, cst.Comma) or not isinstance(last.whitespace_after, cst.ParenthesizedWhitespace):
        return last
    line = last.whitespace_after.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))
    if isinstance(own, cst.Comma) and isinstance(own.whitespace_after, cst.ParenthesizedWhitespace):
        line = own.whitespace_after.first_line
    return last.with_changes(whitespace_after=last.whitespace_after.with_changes(first_line=line))


def with_lines_before(statement: Any, lines: Sequence[cst.EmptyLine]) -> Any:
    """A statement with comment and blank lines put before its own."""
    return statement.with_changes(leading_lines=[*lines, *statement.leading_lines])


class _Names:
    """Counts the names that are read at a node and below, and collects those that a plain assignment sets."""

    def __init__(self, node: cst.CSTNode) -> None:
        self.read: Counter[str] = Counter()
        self.assigned: set[str] = set()
        self._look(node)

    def _look(self, node: cst.CSTNode) -> None:
        match node:
            case cst.Name():
                self.read[node.value] += 1
            case cst.Attribute() | cst.Arg():
                self._look(node.value)
            case cst.AssignTarget(target=cst.Name(value=name)):
                self.assigned.add(name)
            case cst.Param() | cst.ImportAlias():
                pass
            case _:  # also a store into x[i] or x.a, which reads x
                for child in below.children(node):
                    self._look(child)


def names_read(node: cst.CSTNode) -> Counter[str]:
    """How often each name is read below `node`."""
    return _Names(node).read


def names_by_side(module: cst.Module) -> tuple[set[str], set[str]]:
    """The names that kernels (decorated functions) read, and those that host functions read."""
    kernels: set[str] = set()
    host: set[str] = set()
    for function in functions(module):
        (kernels if function.decorators else host).update(names_read(function.body))
    return kernels, host


def unused(module: cst.Module, roots: Sequence[str]) -> cst.Module:
    """Drops unread assignments, unused parameters and unreachable functions and imports until nothing changes.
    Raises ValueError when a root is not there."""
    absent = set(roots) - {f.name.value for f in functions(module)}
    if absent:
        raise ValueError(f"roots must be functions of the template, got {', '.join(sorted(absent))}")
    while True:
        before = module
        module = _drop_unreachable(module, roots)
        for function in functions(module):
            module = _drop_unread(module, function)
        module = _drop_unused_params(module)
        if module is before:
            return module


def without_headings(module: cst.Module) -> cst.Module:
    """The module without its section headings (`# --- ...`): what they stand above in a template may be gone."""
    body: list[Any] = []
    for statement in module.body:
        lines = getattr(statement, "leading_lines", ())
        at = [i for i, line in enumerate(lines) if line.comment and line.comment.value.startswith("# ---")]
        # the blank lines behind a heading go with it
        body.append(
            statement.with_changes(leading_lines=[*lines[: at[0]], *_text(lines[at[0] + 1 :])]) if at else statement
        )
    return module.with_changes(body=body)


def _text(lines: Sequence[cst.EmptyLine]) -> Sequence[cst.EmptyLine]:
    first = next((i for i, line in enumerate(lines) if line.comment), len(lines))
    return lines[first:]


def _drop_unread(module: cst.Module, function: cst.FunctionDef) -> cst.Module:
    names = _Names(function.body)
    unread = {name for name in names.assigned if not names.read[name]}
    return _replace(module, function, function.visit(_DropUnread(unread))) if unread else module


def _replace(module: cst.Module, old: cst.CSTNode, new: Any) -> cst.Module:
    return module.with_changes(body=[new if s is old else s for s in module.body])


def _drop_unreachable(module: cst.Module, roots: Sequence[str]) -> cst.Module:
    bodies = {f.name.value: names_read(f) for f in functions(module)}
    reached: set[str] = set()
    queue = list(roots)
    while queue:
        name = queue.pop()
        if name not in reached:
            reached.add(name)
            queue.extend(n for n in bodies[name] if n in bodies)
    read: set[str] = set().union(*(bodies[name] for name in reached))
    body: list[Any] = []
    gap: Sequence[cst.EmptyLine] = ()  # the blank line before a dropped import stays before the next one
    for statement in module.body:
        if not _keeps(statement, reached, read):
            gap = gap or (statement.leading_lines if is_import(statement) else ())  # type: ignore[attr-defined]
            continue
        body.append(with_lines_before(statement, gap) if gap and is_import(statement) else statement)
        gap = ()
    return module if len(body) == len(module.body) else module.with_changes(body=body)


def _keeps(statement: Any, reached: set[str], read: set[str]) -> bool:
    if isinstance(statement, cst.FunctionDef):
        return statement.name.value in reached
    if is_import(statement):
        alias = statement.body[0].names[0]
        bound = alias.asname.name if alias.asname else alias.name
        return cst.Module([]).code_for_node(bound) in read | {"tl"}
    if isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.Assign):
        target = statement.body[0].targets[0].target
        return not isinstance(target, cst.Name) or target.value in read
    return True


class _DropUnread(below.Transformer):
    """Removes `name = expression` lines whose name nothing in the function reads. Template expressions have no
    side effects but in stores and atomics, which are statements of their own."""

    def __init__(self, unread: set[str]) -> None:
        super().__init__(unread)
        self.unread = unread

    def leave_SimpleStatementLine(self, original_node: cst.SimpleStatementLine, updated_node: Any) -> Any:
        statement = updated_node.body[0]
        if isinstance(statement, cst.Assign) and len(statement.targets) == 1:
            target = statement.targets[0].target
            if isinstance(target, cst.Name) and target.value in self.unread:
                return cst.RemoveFromParent()
        return updated_node


def _drop_unused_params(module: cst.Module) -> cst.Module:
    dropped: dict[str, set[str]] = {}
    for function in functions(module):
        read = names_read(function.body)
        # an unbound constant stays, so that the specialiser can name it
        unread = {p.name.value for p in function.params.params if not (read[p.name.value] or p.name.value.isupper())}
        if unread:
            dropped[function.name.value] = unread
    if not dropped:
        return module
    body = [
        _without_params(s, dropped[s.name.value]) if isinstance(s, cst.FunctionDef) and s.name.value in dropped else s
        for s in module.body
    ]
    changed = module.with_changes(body=body).visit(_DropArguments(dropped))
    assert isinstance(changed, cst.Module)
    return changed


def _without_params(function: cst.FunctionDef, dropped: set[str]) -> cst.FunctionDef:
    kept = [p for p in function.params.params if p.name.value not in dropped]
    return function.with_changes(
        params=function.params.with_changes(params=relist(function.params.params, kept)),
        decorators=[d.visit(_DropStrings(dropped)) for d in function.decorators],
    )


class _DropArguments(below.Transformer):
    """Removes keywords from calls `f(...)` and launches `f[grid](...)`: those that `dropped` has for each function."""

    def __init__(self, dropped: dict[str, set[str]]) -> None:
        super().__init__(dropped)
        self.dropped = dropped

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        callee = updated_node.func.value if isinstance(updated_node.func, cst.Subscript) else updated_node.func
        dropped = self.dropped.get(callee.value) if isinstance(callee, cst.Name) else None
        if not dropped:
            return updated_node
        kept = [a for a in updated_node.args if a.keyword is None or a.keyword.value not in dropped]
        return updated_node.with_changes(args=relist(updated_node.args, kept))


class _DropStrings(cst.CSTTransformer):
    """In a decorator: removes dropped parameters from lists of names, and a list left empty with its keyword."""

    def __init__(self, dropped: set[str]) -> None:
        self.dropped = dropped

    def leave_Decorator(self, original_node: cst.Decorator, updated_node: cst.Decorator) -> cst.Decorator:
        call = updated_node.decorator
        if not isinstance(call, cst.Call):
            return updated_node
        args = [a.with_changes(value=self._slim(a.value)) for a in call.args]
        args = [a for a in args if not (isinstance(a.value, cst.List) and not a.value.elements)]
        return updated_node.with_changes(decorator=call.with_changes(args=args) if args else call.func)

    def _slim(self, value: cst.BaseExpression) -> cst.BaseExpression:
        if not isinstance(value, cst.List):
            return value
        kept = [
            e for e in value.elements
            if not (isinstance(e.value, cst.SimpleString) and e.value.evaluated_value in self.dropped)
        ]  # fmt: skip
        if kept:
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return value.with_changes(elements=kept)
