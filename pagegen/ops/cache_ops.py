"""Operators that write, move and merge: `write_kv`, `rope_write_kv`, `copy_blocks`, `merge_states`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagegen.ops import checks, plans
from pagegen.ops.schemas import LIBRARY


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`torch.ops.pagegen.write_kv`; see `pagegen.write_kv`."""
    checks.write(k, v, k_cache, v_cache, slot_mapping)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        checks.scale(name, scale, k_cache)
    if not len(k):
        return
    plain = k_cache.dtype in checks.FLOATS and k_scale is None and v_scale is None
    if plain:
        from pagegen import targets

        writer = targets.write_kv(plans.target_of(k.device))
        if writer is not None:
            writer(k, v, k_cache, v_cache, slot_mapping)
            return
    _store(k, k_cache, slot_mapping, k_scale)
    _store(v, v_cache, slot_mapping, v_scale)


def _store(rows: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    """Writes [num_tokens, Hkv, D] rows to their slots, quantising for an 8-bit cache. A slot of -1 is skipped."""
    block_size = cache.shape[1]
    kept = slots >= 0
    rows, slots = rows[kept], slots[kept]
    block, offset = slots // block_size, slots % block_size
    if scale is not None:
        rows = rows.float() / _row_scale(scale, block, offset)
    cache[block, offset] = _saturate(rows, cache.dtype)


def _row_scale(scale: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    if scale.dim() == 3:
        return scale[block, offset][..., None]
    return scale[:, None] if scale.numel() > 1 else scale.reshape(())


def _saturate(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts with saturation, rounding to nearest even; a plain cast of 1e4 to float8_e4m3fn would not saturate."""
    if dtype in checks.FLOATS:
        return rows.to(dtype)
    if dtype == torch.int8:
        return rows.float().round().clamp(-128, 127).to(dtype)
    limit = torch.finfo(dtype).max
    return rows.float().clamp(-limit, limit).to(dtype)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`torch.ops.pagegen.rope_write_kv`; see `pagegen.rope_write_kv`."""
    checks.write(k, v, k_cache, v_cache, slot_mapping)
    checks.rope(q, k, positions, cos, sin)
    rotated = _rotate(q, positions, cos, sin, interleaved)
    write_kv(
        _rotate(k, positions, cos, sin, interleaved), v, k_cache, v_cache, slot_mapping,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return rotated


def _rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first 2 * cos.shape[1] columns of [num_tokens, heads, D] by the angles of `positions`
    (RoFormer, arXiv 2104.09864): pairs (i, i + half), or (2i, 2i + 1) when interleaved."""
    half = cos.shape[1]
    angle_cos, angle_sin = cos[positions].float()[:, None], sin[positions].float()[:, None]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    a = first * angle_cos - second * angle_sin
    b = second * angle_cos + first * angle_sin
    turned = torch.stack([a, b], dim=-1).flatten(-2) if interleaved else torch.cat([a, b], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, pairs: Tensor) -> None:
    """`torch.ops.pagegen.copy_blocks`; see `pagegen.copy_blocks`."""
    checks.copies(k_cache, v_cache, pairs)
    if not len(pairs):
        return
    from pagegen import targets

    copier = targets.copy_blocks(plans.target_of(k_cache.device))
    if copier is not None and k_cache.dtype in checks.FLOATS:
        copier(k_cache, v_cache, pairs)
        return
    for cache in (k_cache, v_cache):
        cache[pairs[:, 1]] = cache[pairs[:, 0]]


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.ops.pagegen.merge_states`; see `pagegen.merge_states`."""
    checks.tensor("outs", outs, "[num_states, total_q, num_q_heads, v_head_dim]", checks.FLOATS, None)
    checks.tensor("lses", lses, "[num_states, total_q, num_q_heads]", (torch.float32,), outs.device)
    checks.sizes("lses", lses, tuple(outs.shape[:3]), "[num_states, total_q, num_q_heads]")
    if not len(outs):
        raise ValueError(f"outs must hold at least one state, got {checks.describe(outs)}")
    top = lses.amax(dim=0)
    # an empty state has lse -inf: weigh it 0 without ever computing -inf - -inf
    weights = torch.exp(lses - top.masked_fill(top == -torch.inf, 0.0))
    total = weights.sum(dim=0)
    shares = weights / total.masked_fill(total == 0, 1.0)
    merged = (outs.float().masked_fill((weights == 0)[..., None], 0.0) * shares[..., None]).sum(dim=0)
    return merged.to(outs.dtype), top + torch.log(total.masked_fill(total == 0, 1.0))


_IMPLEMENTATIONS: dict[str, Any] = {
    "write_kv": write_kv,
    "rope_write_kv": rope_write_kv,
    "copy_blocks": copy_blocks,
    "merge_states": merge_states,
}
for _name, _function in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _function, _key)
