"""Checks shared by the frozen values: each raises naming the field, what was expected and what came."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Kernels, and the columns of a database, count in 32 bits.
MAX_COUNT = 2**31 - 1
# Deeper than anything that is written, and far from where Python's own recursion ends.
MAX_DEPTH = 64
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_DATE = re.compile(
    r"[0-9]{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12][0-9]|3[01])"
    r"([T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{1,9})?)?(Z|[+]00:?00)?)?)?)?"
)


def instance(name: str, value: Any, kind: type) -> None:
    """`value` must be a `kind`. Raises TypeError."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOUi" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, got {type(value).__name__} {value!r}")


def instances(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    """`values`, a tuple or list of `kind` only, as a tuple. Raises TypeError."""
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"{name} must be a tuple, got {type(values).__name__} {values!r}")
    for value in values:
        instance(f"each of {name}", value, kind)
    return tuple(values)


def integer(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    """`value` as an int within the bounds. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {_digits(value)}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name} must be at most {at_most}, got {_digits(value)}")
    return value


def _digits(value: int) -> str:
    return str(value) if abs(value) < 10**30 else "a number of over 30 digits"


def count(name: str, value: Any, *, at_least: int = 1) -> int:
    """`value` as an int of at least `at_least` that 32 bits hold. Raises TypeError or ValueError."""
    return integer(name, value, at_least=at_least, at_most=MAX_COUNT)


def integers(name: str, values: Any, *, at_least: int = 1) -> tuple[int, ...]:
    """`values`, each a `count`, as a tuple. Raises TypeError or ValueError."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__} {values!r}")
    found = tuple(values)
    # a profile holds thousands of them
    if {*map(type, found)} == {int} and min(found) >= at_least and max(found) <= MAX_COUNT:
        return found
    return tuple(count(name, value, at_least=at_least) for value in found)


def number(name: str, value: Any, *, at_least: float = -math.inf) -> float:
    """`value` as a finite float of at least `at_least`. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    try:
        found = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer that no float holds") from None
    if not math.isfinite(found):
        raise ValueError(f"{name} must be finite, got {value!r}")
    if found < at_least:
        raise ValueError(f"{name} must be at least {at_least:g}, got {value!r}")
    return found


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
    return None if value is None else text(name, value)


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """`value`, which must be among `allowed`."""
    choices = tuple(allowed)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def text(name: str, value: Any, *, empty: bool = True, printable: bool = True) -> str:
    """`value`, which must be text; `printable` refuses lone surrogates and control characters other than tab and new
    line, which drivers and compilers do put into what they say. Raises TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {type(value).__name__} {value!r}")
    if not empty and not value.strip():
        raise ValueError(f"{name} must not be empty, got {value!r}")
    if printable and not (value.isascii() and value.isprintable()) and _UNPRINTABLE.search(value):
        raise ValueError(f"{name} must be text without surrogates and control characters, got {value!r}")
    return value


def texts(name: str, value: Any) -> dict[str, str]:
    """`value`, a mapping of names to text, as a dict of its own. Raises TypeError or ValueError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map names to text, got {type(value).__name__} {value!r}")
    for key, one in value.items():
        if not (isinstance(key, str) and isinstance(one, str)):
            raise TypeError(f"{name}[{key!r}] must be text, got {type(one).__name__} {one!r}")
    return dict(value)


def timestamp(name: str, value: Any, *, empty: bool = True) -> str:
    """`value`, which must be a date or a time in ISO 8601, in UTC where it says a zone, so that texts sort as times do;
    or "" where it is not known. Raises TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be an ISO 8601 date, got {type(value).__name__} {value!r}")
    if not (_DATE.fullmatch(value) or (empty and not value)):
        raise ValueError(f"{name} must be an ISO 8601 date in UTC (2026-01-31T12:00:00+00:00), got {value[:60]!r}")
    return value


def json_object(name: str, value: Any) -> dict[str, Any]:
    """`value`, which must be a dict that JSON can hold, not nested absurdly. Raises TypeError or ValueError."""
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be a dict, got {type(value).__name__} {value!r}")
    json_value(name, value)
    return value


def json_value(name: str, value: Any, depth: int = 0) -> None:
    """`value` must be what JSON can hold: names of fields are text, numbers are finite, at most MAX_DEPTH levels."""
    if value is None or isinstance(value, (str, bool, int)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} must hold finite numbers, got {value!r}")
    elif depth >= MAX_DEPTH:
        raise ValueError(f"{name} must be nested at most {MAX_DEPTH} deep")
    elif isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} must have text for names, got {type(key).__name__} {key!r}")
            json_value(name, one, depth + 1)
    elif isinstance(value, (list, tuple)):
        for one in value:
            json_value(name, one, depth + 1)
    else:
        raise TypeError(f"{name} must hold JSON values, got {type(value).__name__} {value!r}")


def shown(name: Any) -> str:
    """A name that came from outside, as it may be printed: what would move a terminal's cursor is escaped."""
    return name if isinstance(name, str) and name.isprintable() else repr(name)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its class where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def class_and_line(error: BaseException) -> str:
    """An error's class, and the first line of what it says."""
    return f"{type(error).__name__}: {first_line(error) if str(error).strip() else 'no message'}"


def fields(what: str, data: Any, known: Iterable[str], needed: Iterable[str] = ()) -> dict[str, Any]:
    """`data`, which must be a dict with the needed fields and no unknown one: what a newer pagegen says must not be
    taken for less. Raises TypeError or ValueError naming them."""
    if not isinstance(data, dict):
        raise TypeError(f"{what} must be an object with fields, got {type(data).__name__} {data!r}")
    unknown = sorted(data.keys() - {*known}, key=str)
    if unknown:
        raise ValueError(f"{what} has no field {', '.join(map(shown, unknown))}")
    missing = sorted({*needed} - data.keys())
    if missing:
        there = ", ".join(map(shown, sorted(data, key=str)))
        raise ValueError(f"{what} needs {', '.join(missing)}, got {there or 'none'}")
    return data
