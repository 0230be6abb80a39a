"""What options take: each refuses a bad value as a usage error that says what was expected."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from pagegen.spec import Target, check

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}


def count(*, at_least: int = 1) -> click.IntRange:
    """A number that a value of pagegen can count to."""
    return click.IntRange(min=at_least, max=check.MAX_COUNT)


class BytesType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """Bytes as a number with a binary unit: 40GiB, 512MiB, 1.5TiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB|TiB)", str(value), re.ASCII)
        size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
        if size < 1:
            self.fail(
                f"must be a positive number with a unit of {', '.join(_UNITS)}, such as 40GiB, got {value!r}",
                param,
                ctx,
            )
        return size


class DurationType(click.ParamType):  # type: ignore[type-arg]  # as above
    """Seconds as 90s, 5m, 1h or 1h30m."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        number = r"(\d+(?:\.\d+)?)"
        found = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", str(value), re.ASCII)
        parts = zip(found.groups(), _SECONDS.values(), strict=True) if found else ()
        seconds = math.fsum(float(count) * unit for count, unit in parts if count)
        if not 0 < seconds < math.inf:
            self.fail(f"must be a positive time such as 90s, 5m or 1h30m, got {value!r}", param, ctx)
        return seconds


class BlockSizesType(click.ParamType):  # type: ignore[type-arg]  # as above
    """Block sizes by commas: 16,32,64."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(re.fullmatch(r"[1-9]\d{0,5}", part, re.ASCII) for part in parts):
            expected = "positive whole numbers by commas, below 1000000, such as 16,32,64"
            self.fail(f"must be {expected}, got {value!r}", param, ctx)
        return tuple(dict.fromkeys(map(int, parts)))


class TargetType(click.ParamType):  # type: ignore[type-arg]  # as above
    """ "sm_90", "gfx942", "cpu" or "interpreter"."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        try:
            return Target.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
