"""A handful of variants for the cost model to choose among where nothing was measured."""

from __future__ import annotations

from dataclasses import replace

from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Target, TritonVariant, Variant
from pagegen.spec.variant import all_heads, cheapest_walk, fewest_columns, next_power_of_two, pieces

TILE_KVS = (32, 64, 128)
NUM_SPLITS = (1, 2, 4, 8, 16, 32)
NUM_STAGES = (2, 3)
# Values a thread, by the weights of `_warps`: at 116 (64 rows, 32 keys, head dim 128, 4 warps) kernels compile without
# spills on sm_80, at 128 (64 rows, 128 keys, head dim 64) they spill.
MAX_VALUES = 120


def candidates(spec: AttentionSpec, layout: CacheLayout, target: Target, *, decode: bool) -> tuple[Variant, ...]:
    """Variants worth a prediction for decode, or for batches with longer queries, smaller ones first; whether each is
    legal is for `legal` to say. Decode takes no more rows than the group needs, and longer queries no splits."""
    if target.family == "cpp":
        heads = all_heads(spec.num_kv_heads) if layout.order == "NHD" else 8
        return tuple(
            CppVariant(tile_kv=tile_kv, streams=8, heads_together=heads, prefetch_ahead=1, split_tokens=split_tokens)
            for tile_kv in ((32, 128) if decode else (64, 256))
            for split_tokens in (512, 2048, 8192)
        )
    heads = max(16, next_power_of_two(spec.group))
    rows: tuple[int, ...] = (min(64, heads),) if decode else (64, 128)
    if max(spec.head_dim, spec.v_head_dim) > 256:  # a latent cache: a few of its many heads fill a tile
        rows = (16, 32)
    found = []
    for tile_rows in rows:
        for tile_kv in TILE_KVS:
            num_warps = _warps(spec, tile_rows, tile_kv)
            if num_warps is None:
                continue
            one = TritonVariant(
                tile_rows=tile_rows,
                tile_kv=tile_kv,
                page_walk=cheapest_walk(layout.block_size, tile_kv),
                head_pieces=fewest_columns(spec.head_dim),
                num_warps=num_warps,
            )
            found += [
                replace(one, num_splits=n, num_stages=stages)
                for stages in NUM_STAGES
                for n in (NUM_SPLITS if decode else (1,))
            ]
    return tuple(found)


def _warps(spec: AttentionSpec, tile_rows: int, tile_kv: int) -> int | None:
    """Warps that hold the accumulator, the scores and half of q in registers without spilling; None for too many."""
    widths = sum(pieces(spec.v_head_dim, "split")) + 1.25 * tile_kv + sum(pieces(spec.head_dim, "split")) / 2
    return next((warps for warps in (4, 8) if tile_rows * widths / (32 * warps) <= MAX_VALUES), None)
