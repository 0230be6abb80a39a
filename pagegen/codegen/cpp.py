"""Which constants the C++ kernels are specialised to, and the specialised source as one file."""

from __future__ import annotations

import re

from pagegen.codegen import cpp_modifiers, templates
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, dtype_name
from pagegen.spec.variant import PREFETCH_HINTS

ATTENTION = "attention.hpp"
CACHE_OPS = "cache_ops.hpp"
# Limits to hold kernels against: of its own, since no kernel changes when it does.
PROBES = "probes.hpp"
# Every C++ template: what the hash is over.
TEMPLATES = templates.CPP
# Positions are 32-bit integers in the template; nothing is this far from anything.
_FAR = 2**30


def bindings(spec: AttentionSpec, layout: CacheLayout, variant: CppVariant) -> dict[str, str]:
    """The C++ text of every constant of templates/attention.hpp."""
    return {
        "q_dtype": f"Dtype::{dtype_name(spec.q_dtype)}",
        "kv_dtype": f"Dtype::{dtype_name(spec.kv_dtype)}",
        "num_kv_heads": str(spec.num_kv_heads),
        "group": str(spec.group),
        "head_dim": str(spec.head_dim),
        "v_head_dim": str(spec.v_head_dim),
        "block_size": str(layout.block_size),
        "shared_kv": _boolean(spec.shared_kv),
        "kv_scales": f"Scales::{templates.SCALES[spec.kv_scale_granularity]}",
        "zero_points": _boolean(spec.kv_zero_points),
        "causal": _boolean(spec.causal),
        "window": str(min(spec.window or 0, _FAR)),
        "logit_softcap": f"{spec.logit_softcap or 0.0!r}f",
        "alibi": _boolean(spec.alibi),
        "sinks": _boolean(spec.sinks),
        **{name: _boolean(value) for name, value in cpp_modifiers.flags(spec).items()},
        "tile_kv": str(variant.tile_kv),
        "streams": str(variant.streams),
        "rows_together": str(variant.rows_together),
        "prefetch_ahead": str(variant.prefetch_ahead),
        "read_tokens": _boolean(variant.read_order == "token"),
        "prefetch_hint": str(PREFETCH_HINTS[variant.prefetch_hint]),
        "dot": _boolean(variant.accumulate == "dot"),
        "split_tokens": str(min(variant.split_tokens, _FAR)),
        "num_splits": str(variant.num_splits),
        "balanced": _boolean(variant.schedule == "balanced"),
        "heads_together": str(min(variant.heads_together, spec.num_kv_heads)),
    }


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def render_attention(spec: AttentionSpec, layout: CacheLayout, variant: CppVariant) -> str:
    """The specialised source of one attention kernel: a single file that a C++20 compiler takes as it is.

    Raises ValueError when the template does not hold exactly the constants that are to be bound, and Untraceable for
    a score or mask function that has no expression (see `pagegen.targets.unsupported`).
    """
    body = cpp_modifiers.write(bind(_inlined(ATTENTION), bindings(spec, layout, variant)), spec)
    what = f"paged attention, {templates.shape(spec, layout)} {layout.order}"
    return _header(ATTENTION, what, variant.name) + body


def render_cache_ops() -> str:
    """The source of `write_kv`, `copy_blocks` and `merge_states`: one file, nothing to specialise."""
    return _header(CACHE_OPS, "write_kv, copy_blocks and merge_states") + _inlined(CACHE_OPS)


def render_probes() -> str:
    """The source of the probes of `pagegen.targets.cpu_probes`: one file, nothing to specialise."""
    digest = templates.digest((PROBES, "vectors.hpp"))
    return f"// {templates.origin(PROBES, digest)}\n\n" + _inlined(PROBES)


def bind(template: str, values: dict[str, str]) -> str:
    """`template` with the initialisers of its struct `Constants` replaced by name.

    Raises ValueError for a constant that is missing on either side.
    """
    struct = re.search(r"struct Constants \{\n(.*?)\n\};", template, re.DOTALL)
    if struct is None:
        raise ValueError("the template must have a struct Constants, got none")
    pattern = re.compile(r"(?P<head>static constexpr \w+ (?P<name>\w+) = )[^;]+;")
    found = [match["name"] for match in pattern.finditer(struct[1])]
    if sorted(found) != sorted(values):
        unlike = sorted(set(found) ^ set(values))
        raise ValueError(f"the template's constants must be {sorted(values)}, got a difference in {unlike}")
    bound = pattern.sub(lambda match: f"{match['head']}{values[match['name']]};", struct[1])
    return template[: struct.start(1)] + bound + template[struct.end(1) :]


def _header(template: str, *lines: str) -> str:
    first = templates.origin(template, template_hash())
    return "".join(f"// {line}".rstrip() + "\n" for line in (first, *lines, ""))


def _inlined(name: str) -> str:
    """A template with the others' text in place of its includes, each once."""
    seen: set[str] = set()

    def text(name: str) -> str:
        seen.add(name)
        return re.sub(r'#include "(\w+\.hpp)"\n', included, templates.read(name).replace("#pragma once\n", ""))

    def included(match: re.Match[str]) -> str:
        return "" if match[1] in seen else text(match[1])

    return text(name)


def template_hash() -> str:
    """sha256 over the C++ templates' text."""
    return templates.digest(TEMPLATES)
