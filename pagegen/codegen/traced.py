"""What the templates of both families are told about a spec's score and mask functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pagegen.modifiers import Capture, find, find_both
from pagegen.spec import AttentionSpec


def captures(spec: AttentionSpec) -> tuple[tuple[str, Capture], ...]:
    """The captured tensors under the names that generated code gives them ("mask_starts"), in the order in which a
    call hands them over."""
    found = find_both(spec.score_mod, spec.mask_mod)
    return tuple((f"{modifier.kind}_{capture.name}", capture) for modifier in found for capture in modifier.captures)


def mask_bounds(spec: AttentionSpec) -> tuple[Any, Any]:
    """The first key that the spec's mask function may allow a query and the one after the last, as expressions; None
    where there is no such bound. Raises Untraceable."""
    modifier = find(spec.mask_mod, "mask")
    if modifier is None:
        return None, None
    from pagegen.modifiers import mask_range, trace

    low, high = mask_range(trace(modifier).expression)
    return low, high


@functools.cache
def printed(spec: AttentionSpec, printer: Callable[[Any, str], str]) -> dict[str, str]:
    """What the functions of a template are to return, as `print_triton` or `print_cpp` say it: "score", "mask", and the
    mask's "low" and "high", those that there are. Raises Untraceable."""
    from pagegen.modifiers import trace

    found = find_both(spec.score_mod, spec.mask_mod)
    texts = {modifier.kind: printer(trace(modifier).expression, modifier.kind) for modifier in found}
    bounds = zip(("low", "high"), mask_bounds(spec), strict=True)
    return texts | {side: printer(bound, "mask") for side, bound in bounds if bound is not None}
