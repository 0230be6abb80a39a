"""What the search space loses to which rule, before anything is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pagegen.costs.rules import broken_rules, contradictions
from pagegen.spec import AttentionSpec, CacheLayout, Device, Variant
from pagegen_autotune.space import space_around


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A rule, how many points of the space break it (one may break several), and the reason of one of them. `stage` is
    when it is known: by the "fields" alone, before compiling ("symbols"), by the code ("compiled"), or by running it
    ("tried")."""

    rule: str
    stage: str
    variants: int
    reason: str
    example: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The points of a search space, how many of them are legal, and what rules out the others, most first."""

    points: int
    legal: int
    rejections: tuple[Rejection, ...]


def pruned(start: Variant, spec: AttentionSpec, layout: CacheLayout, device: Device) -> Pruned:
    """Holds every point of the space around `start` (the grid along its axes, and each other way to do the work)
    against every rule."""
    counts: dict[tuple[str, str], list[Any]] = {}
    points = legal = 0
    for changes in _points(start, spec, layout, device):
        points += 1
        name, broken = _judged(start, changes, spec, layout, device)
        legal += not broken
        for stage, rule, reason in broken:
            counts.setdefault((stage, rule), [0, reason, name])[0] += 1
    found = [
        Rejection(rule=rule, stage=stage, variants=count, reason=reason, example=name)
        for (stage, rule), (count, reason, name) in counts.items()
    ]
    return Pruned(
        points=points, legal=legal, rejections=tuple(sorted(found, key=lambda r: (-r.variants, r.stage, r.rule)))
    )


def _points(start: Variant, spec: AttentionSpec, layout: CacheLayout, device: Device) -> Iterator[dict[str, Any]]:
    space = space_around(start, spec, layout, device)
    names = list(space.axes)
    for values in itertools.product(*space.axes.values()):
        yield dict(zip(names, values, strict=True))
    yield from space.ways


def _judged(
    start: Variant, changes: dict[str, Any], spec: AttentionSpec, layout: CacheLayout, device: Device
) -> tuple[str, list[tuple[str, str, str]]]:
    """A point's name, and (stage, rule, reason) of all that it breaks."""
    try:
        variant = replace(start, **changes)
    except ValueError as error:
        fields = {**start.to_dict(), **changes}
        known = contradictions(fields) if start.family == "triton" else []
        name = f"{start.name} with " + ",".join(f"{k}={v}" for k, v in changes.items())
        return name, [("fields", rule, reason) for rule, reason in known or [("variant", str(error))]]
    if variant == start:
        return variant.name, []
    return variant.name, [("symbols", rule, reason) for rule, reason in broken_rules(spec, layout, variant, device)]
