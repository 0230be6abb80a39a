"""What stands below a node of a syntax tree.

libcst rebuilds each node that a transformer visits, every space and comma among them, and a template has 17,000. A
transformer that looks at those parts alone which hold a name that it is about takes a fifth of the time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import libcst as cst

# Fields in which no name stands: white space, brackets, punctuation and operators.
_NAMELESS = {
    "colon", "comma", "default_indent", "default_newline", "dot", "encoding", "equal", "footer", "has_trailing_newline",
    "header", "indent", "lbrace", "lbracket", "leading_lines", "lines_after_decorators", "lpar", "newline", "operator",
    "rbrace", "rbracket", "rpar", "semicolon", "trailing_whitespace",
}  # fmt: skip


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The nodes right below `node` in which a name may stand, in the order of the text."""
    found: list[cst.CSTNode] = []
    for field in _fields(type(node)):
        value = getattr(node, field)
        if isinstance(value, cst.CSTNode):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(value)
    return found


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    assert dataclasses.is_dataclass(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple(name for name in names if name not in _NAMELESS and not name.startswith("whitespace"))


class Transformer(cst.CSTTransformer):
    """Visits a node only where one of `names` stands in it; the rest of the tree stays as it is, and no `leave_`
    method sees it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._holding: set[cst.CSTNode] | None = None

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._holding is None:  # the root
            self._holding = set()
            self._mark(node, self._holding)
        return node in self._holding and super().on_visit(node)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        return updated_node if updated_node is original_node else super().on_leave(original_node, updated_node)

    def _mark(self, node: cst.CSTNode, holding: set[cst.CSTNode]) -> bool:
        """Enters the nodes from `node` down in which one of the names stands; whether it does in `node`."""
        found = isinstance(node, cst.Name) and node.value in self._names
        for child in children(node):
            found |= self._mark(child, holding)
        if found:
            holding.add(node)
        return found
