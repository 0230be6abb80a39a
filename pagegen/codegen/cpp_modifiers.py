"""Writing traced score and mask functions into the C++ templates."""

from __future__ import annotations

import re
from typing import Any

import torch

from pagegen.codegen import traced
from pagegen.spec import AttentionSpec

# What a captured tensor holds, and what an element of it is to an expression.
_ELEMENTS = {
    torch.float32: ("float", "float"),
    torch.int32: ("int32_t", "int64_t"),
    torch.int64: ("int64_t", "int64_t"),
    torch.bool: ("bool", "bool"),
}


def flags(spec: AttentionSpec) -> dict[str, bool]:
    """The template's constants that say which functions there are."""
    from pagegen.modifiers import find, trace

    mask, (low, high) = find(spec.mask_mod, "mask"), traced.mask_bounds(spec)
    return {
        "score_mod": spec.score_mod is not None,
        "mask_mod": spec.mask_mod is not None,
        "mask_range": low is not None or high is not None,
        "mask_by_head": mask is not None and _by_head(trace(mask).expression),
        "mask_range_by_head": any(_by_head(bound) for bound in (low, high) if bound is not None),
    }


def _by_head(expression: Any) -> bool:
    return "head" in (symbol.name for symbol in expression.free_symbols)


def write(text: str, spec: AttentionSpec) -> str:
    """The template's text with the captured tensors as members of struct Captured and the functions' results in struct
    Modifiers. Raises ValueError when the template does not have them, and Untraceable."""
    from pagegen.modifiers import print_cpp

    for name, expression in traced.printed(spec, print_cpp).items():
        body = re.compile(rf"(static PAGEGEN_INLINE \w+ {name}\([^)]*\) {{\n\s+return )[^;]*;")
        if not body.search(text):
            raise ValueError(f"the template must have a function {name} in struct Modifiers, got none")
        text = body.sub(lambda match, e=expression: f"{match[1]}{e};", text, count=1)  # type: ignore[misc]
    return text.replace("  const pagegen_capture* tensor;\n", f"  const pagegen_capture* tensor;\n{_members(spec)}", 1)


def _members(spec: AttentionSpec) -> str:
    lines: list[str] = []
    for name, capture in traced.captures(spec):
        held, given = _ELEMENTS[capture.dtype]
        indices = [f"i{axis}" for axis in range(capture.rank)]
        taken = ", ".join(f"int64_t {i}" for i in indices)
        place = f"tensor[{len(lines)}], {', '.join(indices)}"
        body = f"{{ return element<{held}>({place}); }}"
        lines.append(f"  PAGEGEN_INLINE {given} {name}({taken}) const {body}\n")
    return "".join(lines)
