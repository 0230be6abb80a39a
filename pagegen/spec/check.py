"""Checks shared by the frozen values: each raises naming the field, what was expected and what came."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any


def instance(name: str, value: Any, kind: type) -> None:
    """`value` must be a `kind`. Raises TypeError."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, got {type(value).__name__} {value!r}")


def integer(name: str, value: Any, *, at_least: int = 1) -> int:
    """`value` as an int of at least `at_least`. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return value


def integers(name: str, values: Any, *, at_least: int = 1) -> tuple[int, ...]:
    """`values`, each an int of at least `at_least`, as a tuple. Raises TypeError or ValueError."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__} {values!r}")
    found = tuple(values)
    if {*map(type, found)} == {int} and min(found) >= at_least:  # a profile holds thousands of them
        return found
    return tuple(integer(name, value, at_least=at_least) for value in found)


def number(name: str, value: Any) -> float:
    """`value` as a finite float. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


def boolean(name: str, value: Any) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__} {value!r}")
    return value


def name_or_none(name: str, value: Any) -> str | None:
    """`value`, which must be a string that is not empty, or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a name or None, got {type(value).__name__} {value!r}")
    if value == "":
        raise ValueError(f"{name} must be a name or None, got an empty one")
    return value


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """`value`, which must be among `allowed`."""
    choices = tuple(allowed)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value
