"""Writing to and copying within a paged cache by torch's own operators: what serves a CPU without a compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from pagegen.spec.dtypes import INT4, INTEGER_RANGES, QUERY_DTYPES
from pagegen.targets.cache_call import Rotation, WriteCall


def write(call: WriteCall) -> None:
    """Rotates, quantises and stores the rows of one call; the same bits as the C++ writer's."""
    k = call.k
    if call.rotation is not None:
        call.rotation.rotated.copy_(rotate(call.rotation.q, call.rotation))
        k = rotate(k, call.rotation)
    _store(k, call.k_cache, call.slots, call.stored, call.k_scale, call.k_zero)
    if call.v is not None and call.v_cache is not None:
        _store(call.v, call.v_cache, call.slots, call.stored, call.v_scale, call.v_zero)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the first 2 * cos.shape[1] columns of [num_tokens, heads, D] by the angles of the positions
    (RoFormer, arXiv 2104.09864), in float32, rounded once to x's dtype."""
    half = rotation.cos.shape[1]
    positions = rotation.positions.clamp(0, len(rotation.cos) - 1)
    cos, sin = (table[positions].float()[:, None] for table in (rotation.cos, rotation.sin))
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if rotation.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    a = first * cos - second * sin
    b = second * cos + first * sin
    turned = torch.stack([a, b], dim=-1).flatten(-2) if rotation.interleaved else torch.cat([a, b], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _store(
    rows: Tensor, cache: Tensor, slots: Tensor, stored: torch.dtype, scale: Tensor | None, zero: Tensor | None
) -> None:
    kept = slots >= 0
    block, place = slots[kept] // cache.shape[1], slots[kept] % cache.shape[1]
    values = rows[kept]
    if scale is not None:
        values = values.float() / scale[block, place][..., None]
    if zero is not None:
        values = values.float() + zero[block, place][..., None]
    cache[block, place] = encode(values, stored).view(cache.dtype)


def encode(values: Tensor, stored: torch.dtype) -> Tensor:
    """Values [.., D] as a cache of `stored` holds them, to nearest even; types of 8 and 4 bits saturate, NaN is 0 in
    integers, int4 is packed as uint8 [.., D / 2]."""
    if stored in QUERY_DTYPES:
        return values.to(stored)
    values = values.float()
    if stored.is_floating_point:
        limit = torch.finfo(stored).max
        return values.clamp(-limit, limit).to(stored)
    rounded = values.round().nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf).clamp(*INTEGER_RANGES[stored])
    if stored != INT4:
        return rounded.to(stored)
    nibbles = rounded.to(torch.int8).view(torch.uint8) & 0xF
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def copy_blocks(k_cache: Tensor, v_cache: Tensor | None, pairs: Tensor) -> None:
    """Copies whole blocks of both caches: `pairs` int64 [num_pairs, 2] of (source, target)."""
    for cache in (k_cache, v_cache):
        if cache is not None:
            cache[pairs[:, 1]] = cache[pairs[:, 0]]
