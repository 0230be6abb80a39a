"""Score and mask functions: plain Python functions that change what attention computes.

A modifier is known to the operator by name, since a compiled graph can carry a string but not a function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PARAMETERS = {
    "score": ("score", "batch", "head", "q_pos", "k_pos"),
    "mask": ("batch", "head", "q_pos", "k_pos"),
}
_REGISTERED: dict[str, Modifier] = {}


@dataclass(frozen=True)
class Modifier:
    """A registered score or mask function. `kind` is "score" or "mask"; call it like the function itself."""

    name: str
    kind: str
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def _register(kind: str, function: Callable[..., Any]) -> Modifier:
    wanted = _PARAMETERS[kind]
    found = tuple(inspect.signature(function).parameters)
    if len(found) != len(wanted):
        raise TypeError(f"a {kind}_mod takes ({', '.join(wanted)}), got ({', '.join(found)})")
    modifier = Modifier(f"{function.__module__}.{function.__qualname__}", kind, function)
    _REGISTERED[modifier.name] = modifier
    return modifier


def score_mod(function: Callable[..., Any]) -> Modifier:
    """Registers `function(score, batch, head, q_pos, k_pos) -> score`, applied to the scaled score before the
    masks. The arguments are tensors that broadcast against each other."""
    return _register("score", function)


def mask_mod(function: Callable[..., Any]) -> Modifier:
    """Registers `function(batch, head, q_pos, k_pos) -> bool`: whether the query may attend the key, on top of
    `causal` and `window`. The arguments are tensors that broadcast against each other."""
    return _register("mask", function)


def find(value: str | Modifier | None, kind: str) -> Modifier | None:
    """The modifier for a name or a modifier. Raises ValueError for an unknown name or the wrong kind."""
    if value is None:
        return None
    modifier = _REGISTERED.get(value) if isinstance(value, str) else value
    if not isinstance(modifier, Modifier):
        raise ValueError(f"{kind}_mod must be a function decorated with @pagegen.{kind}_mod, got {value!r}")
    if modifier.kind != kind:
        raise ValueError(f"{kind}_mod must be a {kind} function, got the {modifier.kind} function {modifier.name}")
    return modifier
