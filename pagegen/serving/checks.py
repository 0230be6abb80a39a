"""What may be given as a time, an id and a set of token ids."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any


def moment(name: str, value: Any, at_least: float | None = None) -> float:
    """A time in seconds, not before `at_least`. Raises TypeError for what is no real number, else ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a time in seconds, got {type(value).__name__} {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise ValueError(f"{name} must be a time in seconds, got {value}")
    if at_least is not None and seconds < at_least:
        raise ValueError(f"{name} must not be before the last time given ({at_least}), got {seconds}: time goes on")
    return seconds


def hashable(name: str, value: Any) -> None:
    """Raises TypeError for what can be no key of a dictionary."""
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(f"{name} must be hashable, got {type(value).__name__} {value!r} ({error})") from None


def token_ids(name: str, given: Any) -> frozenset[int]:
    """One token id, or each of several: Python's, numpy's and tensors alike. Raises TypeError for anything else."""
    try:
        values = list(given)
    except TypeError:  # a single one
        values = [given]
    if isinstance(given, (bytes, bytearray, memoryview)) or any(map(_is_bool, values)):
        raise TypeError(f"{name} must be a token id or several, got {type(given).__name__} {given!r}")
    try:
        return frozenset(map(operator.index, values))
    except TypeError:
        raise TypeError(f"{name} must be a token id or several, got {type(given).__name__} {given!r}") from None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
