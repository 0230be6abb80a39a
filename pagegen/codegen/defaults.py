"""The variants that serve where nothing was tuned."""

from __future__ import annotations

import torch

from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant
from pagegen.spec.dtypes import QUERY_DTYPES
from pagegen.spec.variant import cheapest_walk, fewest_columns, next_power_of_two, pieces

# Rows of the accumulator, the scores and q that 4 warps hold without spilling; see `_warps`.
MAX_VALUES = 120
# Keys of a part, where a row's result must not depend on the batch: long enough that its launch is worth it.
INVARIANT_SPLIT_TOKENS = 1024


def default_variant(spec: AttentionSpec, layout: CacheLayout, target: Target, *, decode: bool) -> TritonVariant:
    """A variant that compiles without spills from sm_80 on, on gfx942 and on gfx950 (docs/coverage.md, which names the
    exceptions), and that leaves room for two programs a multiprocessor in decode with heads of up to 256 columns."""
    widest = max(spec.head_dim, spec.v_head_dim)
    tile_kv = 64 if widest <= 128 else 32
    if decode:
        rows = 16 if widest > 256 else min(64, max(16, next_power_of_two(spec.group)))
        if rows == 64 and widest > 64:
            tile_kv = 32  # or q and the tiles of one program fill half of the shared memory
        if pieces(spec.head_dim, "split")[1] == 16:
            tile_kv = 32  # a piece of 16 columns (80 = 64 + 16) makes the compiler hold both tiles in registers
    else:
        tile_kv //= 2
        rows = 16 if widest > 256 else 64 if widest <= 128 else 32
    if widest > 64 and (spec.head_dim % 16 or spec.v_head_dim % 16):
        # strides that are no multiple of 16: elements are loaded one by one, and each has an address in registers
        rows, tile_kv = min(rows, 32), tile_kv // 2
    mixed = spec.kv_dtype in QUERY_DTYPES and spec.kv_dtype != spec.q_dtype  # computed in float32
    if spec.q_dtype == torch.float32 or mixed:
        # multiply-adds in place of matrix instructions keep whole columns of both operands in registers
        rows, tile_kv = min(rows, 16 if mixed else 32), 16
    elif widest > 256 and spec.kv_dtype not in QUERY_DTYPES:
        tile_kv = 16  # and numbers beside the bits that they come from
    elif spec.kv_zero_points:
        rows, tile_kv = min(rows, 32), min(tile_kv, 32)  # zero points and scales of K and V, one of each a key
    invariant = spec.batch_invariant
    return TritonVariant(
        tile_rows=rows,
        tile_kv=tile_kv,
        page_walk=cheapest_walk(layout.block_size, tile_kv),
        num_splits=8 if decode and not invariant else 1,
        split_tokens=INVARIANT_SPLIT_TOKENS if invariant else 0,
        # two accumulators of many rows spill on sm_120 (192 = 128 + 64)
        head_pieces="padded"
        if not decode and 128 < min(spec.head_dim, spec.v_head_dim) <= 256
        else fewest_columns(spec.head_dim),
        num_warps=8 if mixed else _warps(spec, layout, rows, tile_kv),
        num_stages=_stages(spec, target, tile_kv),
    )


def _warps(spec: AttentionSpec, layout: CacheLayout, rows: int, tile_kv: int) -> int:
    """4 warps, or 8 where 4 would need more registers than there are for the accumulator, scores and half of q."""
    columns = sum(pieces(spec.head_dim, "split"))
    values = rows * (sum(pieces(spec.v_head_dim, "split")) + 1.25 * tile_kv + columns / 2)
    # of heads that are padded also the masks of columns: of wide ones, and where every key has a block to look up
    padded = rows > 16 and spec.head_dim < columns and (spec.head_dim > 128 or layout.block_size % tile_kv > 0)
    few = values / (32 * 4) <= MAX_VALUES and spec.head_dim <= 256
    return 4 if few and not padded else 8


def _stages(spec: AttentionSpec, target: Target, tile_kv: int) -> int:
    """3 where two programs with two K and two V tiles each fit the shared memory of a multiprocessor: 160 KiB or more
    on sm_80, sm_90 and sm_100. AMD's compute units have 64 KiB (gfx950: 160), sm_86, sm_89 and sm_120 have 99."""
    large = target.kind == "cuda" and target.capability in (80, 90, 100, 103)
    return 3 if large and max(spec.head_dim, spec.v_head_dim) <= 256 else 2
