"""Paged decode attention as engines ship it: one Triton kernel with one set of tiles and a fixed number of splits,
whatever the model, the batch and the GPU. What pagegen's tuned variants are compared with.

The shape of the algorithm is flash decoding's (https://pytorch.org/blog/flash-decoding/): a program owns one sequence,
one KV head and one of NUM_SPLITS equal parts of its keys, keeps a running softmax in float32, and a second kernel
merges the parts.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
# (kernels are compiled by Triton, which takes no annotation but tl.constexpr)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_SPLITS, TILE_KV, TILE_HEADS, NUM_WARPS, NUM_STAGES = 8, 64, 16, 4, 2


@triton.jit(do_not_specialize=["stride_table"])
def attend_part(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, part_ptr, sum_ptr, scale_log2,
    stride_q, stride_block, stride_slot, stride_head, stride_table,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """part_ptr float32 [batch, HEADS, SPLITS, DIM]: the part's result; sum_ptr float32 [batch, HEADS, SPLITS]: the
    base-2 logarithm of its denominator, -inf for a part without keys. K and V have the same strides, q's last two
    dimensions are contiguous."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lens_ptr + seq)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    heads = kv_head * GROUP + rows
    own = rows < GROUP
    q = tl.load(q_ptr + seq * stride_q + heads[:, None] * DIM + dims[None, :], mask=own[:, None], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        inside = keys < end
        block = tl.load(table_ptr + seq * stride_table + keys // BLOCK, mask=inside, other=0).to(tl.int64)
        place = block * stride_block + (keys % BLOCK) * stride_slot + kv_head * stride_head
        k = tl.load(k_ptr + place[None, :] + dims[:, None], mask=inside[None, :], other=0.0).to(q.dtype)
        scores = tl.where(inside[None, :], tl.dot(q, k) * scale_log2, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        kept = tl.exp2(largest - now)
        weights = tl.exp2(scores - now[:, None])
        v = tl.load(v_ptr + place[:, None] + dims[None, :], mask=inside[:, None], other=0.0).to(q.dtype)
        acc = acc * kept[:, None] + tl.dot(weights.to(q.dtype), v)
        total = total * kept + tl.sum(weights, 1)
        largest = now
    row = (seq * HEADS + heads) * SPLITS + split
    some = total > 0.0
    result = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(part_ptr + row[:, None] * DIM + dims[None, :], result, mask=own[:, None])
    tl.store(sum_ptr + row, tl.where(some, largest + tl.log2(total), float("-inf")), mask=own)


@triton.jit
def merge_parts(part_ptr, sum_ptr, out_ptr, SPLITS: tl.constexpr, DIM: tl.constexpr):
    """out_ptr [batch, heads, DIM], contiguous; a program a head of a sequence."""
    row = tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    sums = tl.load(sum_ptr + row * SPLITS + splits)
    weights = tl.exp2(sums - tl.max(sums, 0))
    parts = tl.load(part_ptr + (row * SPLITS + splits)[:, None] * DIM + dims[None, :])
    merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + row * DIM + dims, merged.to(out_ptr.dtype.element_ty))


LOG2_E = 1.4426950408889634


def workspace(q: Tensor) -> tuple[Tensor, Tensor]:
    """(parts, sums) for queries [batch, heads, DIM]."""
    batch, heads, dim = q.shape
    parts = torch.empty(batch, heads, NUM_SPLITS, dim, dtype=torch.float32, device=q.device)
    return parts, torch.empty(batch, heads, NUM_SPLITS, dtype=torch.float32, device=q.device)


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    space: tuple[Tensor, Tensor], *, scale: float, window: int = 0, upcast: bool = False,
) -> None:  # fmt: skip
    """q and out [batch, heads, DIM]; caches [num_blocks, block_size, KV heads, DIM], of one shape and strides; every
    sequence has a key. `upcast` computes in float32: what Triton's interpreter needs for bfloat16."""
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    if heads // kv_heads > TILE_HEADS or k_cache.stride() != v_cache.stride() or not q.is_contiguous():
        raise ValueError(f"expected up to {TILE_HEADS} heads a group and caches of one layout, got {heads}/{kv_heads}")
    parts, sums = space
    attend_part[(batch, kv_heads, NUM_SPLITS)](
        q, k_cache, v_cache, block_table, seq_lens, parts, sums, scale * LOG2_E,
        q.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK=k_cache.shape[1], SPLITS=NUM_SPLITS, TILE=TILE_KV,
        ROWS=TILE_HEADS, WINDOW=window, UPCAST=upcast, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    merge_parts[(batch * heads,)](parts, sums, out, SPLITS=NUM_SPLITS, DIM=dim, num_warps=4)
