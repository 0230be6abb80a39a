"""Which candidates are worth a compiler's second: batches that stand for all, and kernels that are alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagegen.spec import AttentionSpec, TritonVariant, Variant, Workload
from pagegen.spec.variant import pieces
from pagegen_autotune.objective import Loads

# Batches are taken at these quantiles of their size.
SPREAD = (0.1, 0.5, 0.9)


def spread(loads: Loads) -> list[tuple[Workload, float]]:
    """A small, a middling and a large batch of a cell."""
    by_size = sorted(loads, key=lambda load: (load[0].total_context + load[0].total_q, load[0].context_lens))
    places = {round(q * (len(by_size) - 1)) for q in SPREAD}
    return [by_size[i] for i in sorted(places)]


def shape(variant: Variant) -> tuple[Any, ...]:
    """What makes kernels differ in kind: their tiles and warps."""
    assert isinstance(variant, TritonVariant)  # the family of every GPU target
    return (variant.tile_rows, variant.tile_kv, variant.num_warps, variant.dot, variant.loads, variant.programs > 0)


def plain(spec: AttentionSpec, variant: Variant) -> Variant:
    """The variant with fields that make no difference to the code as they are by default."""
    assert isinstance(variant, TritonVariant)  # the family of every GPU target
    same = all(pieces(width, "split") == pieces(width, "padded") for width in (spec.head_dim, spec.v_head_dim))
    return replace(
        variant,
        head_pieces="padded" if same else variant.head_pieces,
        reduce=variant.reduce if variant.splits else "kernel",
    )
