"""The variants that serve where nothing was tuned."""

from __future__ import annotations

import torch

from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant
from pagegen.spec.dtypes import QUERY_DTYPES
from pagegen.spec.variant import cheapest_walk, next_power_of_two, pieces

# Rows of the accumulator, the scores and q that 4 warps hold without spilling; see `_warps`.
MAX_VALUES = 120
# Keys of a part, where a row's result must not depend on the batch: long enough that its launch is worth it.
INVARIANT_SPLIT_TOKENS = 1024


def default_variant(spec: AttentionSpec, layout: CacheLayout, target: Target, *, decode: bool) -> TritonVariant:
    """A variant that compiles without spills from sm_80 on, on gfx942 and gfx950, and leaves registers for two programs
    a multiprocessor in decode (tests/kernels/test_offline.py; exceptions are named there)."""
    widest = max(spec.head_dim, spec.v_head_dim)
    tile_kv = 64 if widest <= 128 else 32
    if decode:
        rows = 16 if widest > 256 else min(64, max(16, next_power_of_two(spec.group)))
    else:
        tile_kv //= 2
        rows = 16 if widest > 256 else 64 if widest <= 128 else 32
    if spec.q_dtype == torch.float32:
        # multiply-adds in place of matrix instructions keep whole columns of both operands in registers
        rows, tile_kv = min(rows, 32), 16
    elif widest > 256 and spec.kv_dtype not in QUERY_DTYPES:
        tile_kv = 16  # and numbers beside the bits that they come from
    invariant = spec.batch_invariant
    return TritonVariant(
        tile_rows=rows,
        tile_kv=tile_kv,
        page_walk=cheapest_walk(layout.block_size, tile_kv),
        num_splits=8 if decode and not invariant else 1,
        split_tokens=INVARIANT_SPLIT_TOKENS if invariant else 0,
        head_pieces="split" if sum(pieces(spec.head_dim, "split")) < sum(pieces(spec.head_dim, "padded")) else "padded",
        num_warps=_warps(spec, rows, tile_kv),
        num_stages=_stages(spec, target, tile_kv),
    )


def _warps(spec: AttentionSpec, rows: int, tile_kv: int) -> int:
    """4 warps, or 8 where 4 would need more registers than there are for the accumulator, scores and half of q."""
    values = rows * (sum(pieces(spec.v_head_dim, "split")) + 1.25 * tile_kv + sum(pieces(spec.head_dim, "split")) / 2)
    return 4 if values / (32 * 4) <= MAX_VALUES and spec.head_dim <= 256 else 8


def _stages(spec: AttentionSpec, target: Target, tile_kv: int) -> int:
    """3 where two programs with two K and two V tiles each fit the shared memory of a multiprocessor: 160 KiB or more
    on sm_80, sm_90 and sm_100. AMD's compute units have 64 KiB (gfx950: 160), sm_86, sm_89 and sm_120 have 99."""
    large = target.kind == "cuda" and target.capability in (80, 90, 100, 103)
    return 3 if large and max(spec.head_dim, spec.v_head_dim) <= 256 else 2
