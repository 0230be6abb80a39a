"""What the code of a Hugging Face model hands on to its attention, as far as its source says."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import nn


def drops_window(attention: nn.Module) -> bool:
    """Whether the attention's class never calls anything with a sliding window, so that a window of the config is in
    masks alone, or nowhere. False where there is no source to read."""
    kind: Any = type(attention)
    text = _source(kind)
    return text is not None and not any(
        isinstance(node, ast.keyword) and node.arg == "sliding_window" for node in ast.walk(ast.parse(text))
    )


def caller_dropping_keywords(model: nn.Module, attention: nn.Module) -> str | None:
    """The name of the class that calls `attention` without the keyword arguments that it got itself, the paged cache
    among them, or None."""
    for owner in model.modules():
        for name, child in owner.named_children():
            if child is attention:
                caller: Any = type(owner)  # a class can be hashed, which mypy doubts
                return type(owner).__name__ if _drops_keywords(caller, name) else None
    return None


@functools.lru_cache(maxsize=256)
def _drops_keywords(owner: Any, name: str) -> bool:
    """Whether `owner` calls its `self.<name>(...)`, and no such call has a `**`."""
    text = _source(owner)
    calls = [
        node
        for node in ast.walk(ast.parse(text or ""))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{name}"
    ]
    return bool(calls) and not any(keyword.arg is None for call in calls for keyword in call.keywords)


@functools.lru_cache(maxsize=256)
def _source(cls: Any) -> str | None:
    """A class as it stands in its file."""
    try:
        return textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # made in a prompt, or shipped without its source
        return None
