"""Writing traced score and mask functions into the C++ templates."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from pagegen.modifiers import Modifier, find
from pagegen.spec import AttentionSpec

# What a captured tensor holds, and what an element of it is to an expression.
_ELEMENTS = {
    torch.float32: ("float", "float"),
    torch.int32: ("int32_t", "int64_t"),
    torch.int64: ("int64_t", "int64_t"),
    torch.bool: ("bool", "bool"),
}


def modifiers_of(spec: AttentionSpec) -> tuple[tuple[str, Modifier], ...]:
    """The spec's ("score", ...) and ("mask", ...) functions, in the order in which a call hands over their tensors."""
    named = (("score", spec.score_mod), ("mask", spec.mask_mod))
    return tuple((kind, modifier) for kind, name in named if (modifier := find(name, kind)) is not None)


def untraceable(spec: AttentionSpec) -> str | None:
    """Why a function of the spec cannot be printed (a sentence), or None when all can."""
    if spec.score_mod is None and spec.mask_mod is None:
        return None
    from pagegen.modifiers import Untraceable

    try:
        _results(spec)
    except Untraceable as error:
        return str(error)
    return None


def flags(spec: AttentionSpec) -> dict[str, bool]:
    """The template's constants that say which functions there are."""
    low, high = _bounds(spec)
    by_head = any("head" in (symbol.name for symbol in b.free_symbols) for b in (low, high) if b is not None)
    return {
        "score_mod": spec.score_mod is not None,
        "mask_mod": spec.mask_mod is not None,
        "mask_range": low is not None or high is not None,
        "mask_range_by_head": by_head,
    }


def write(text: str, spec: AttentionSpec) -> str:
    """The template's text with the captured tensors as members of struct Captured and the functions' results in struct
    Modifiers. Raises ValueError when the template does not have them, and Untraceable."""
    for name, expression in _results(spec).items():
        body = re.compile(rf"(static PAGEGEN_INLINE \w+ {name}\([^)]*\) {{\n\s+return )[^;]*;")
        if not body.search(text):
            raise ValueError(f"the template must have a function {name} in struct Modifiers, got none")
        text = body.sub(lambda match, e=expression: f"{match[1]}{e};", text, count=1)  # type: ignore[misc]
    return text.replace("  const pagegen_capture* tensor;\n", f"  const pagegen_capture* tensor;\n{_members(spec)}", 1)


def _members(spec: AttentionSpec) -> str:
    lines: list[str] = []
    for kind, modifier in modifiers_of(spec):
        for capture in modifier.captures:
            held, given = _ELEMENTS[capture.dtype]
            indices = [f"i{axis}" for axis in range(capture.rank)]
            taken = ", ".join(f"int64_t {i}" for i in indices)
            place = f"tensor[{len(lines)}], {', '.join(indices)}"
            body = f"{{ return element<{held}>({place}); }}"
            lines.append(f"  PAGEGEN_INLINE {given} {kind}_{capture.name}({taken}) const {body}\n")
    return "".join(lines)


@functools.cache
def _results(spec: AttentionSpec) -> dict[str, str]:
    """What each function of struct Modifiers is to return."""
    if spec.score_mod is None and spec.mask_mod is None:
        return {}
    from pagegen.modifiers import print_cpp, trace

    results = {kind: print_cpp(trace(modifier)) for kind, modifier in modifiers_of(spec)}
    for side, bound in zip(("low", "high"), _bounds(spec), strict=True):
        if bound is not None:
            results[side] = print_cpp(bound, "mask")
    return results


def _bounds(spec: AttentionSpec) -> tuple[Any, Any]:
    """(low, high) of the keys that the spec's mask function can allow, as expressions; None for no bound."""
    modifier = find(spec.mask_mod, "mask")
    if modifier is None:
        return None, None
    from pagegen.modifiers import mask_range, trace

    low, high = mask_range(trace(modifier).expression)
    return low, high
