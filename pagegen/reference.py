"""What every kernel must compute: paged attention in float64, one sequence at a time, by the definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagegen import modifiers
from pagegen.spec.dtypes import INT4, parse_dtype


def reference_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    logit_softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    tree_mask: Tensor | None = None,
    score_mod: str | modifiers.Modifier | None = None,
    mask_mod: str | modifiers.Modifier | None = None,
    captures: Sequence[Tensor] | None = None,
    kv_dtype: str | torch.dtype | None = None,
    v_head_dim: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
    variant: object = None,
    compute_dtype: torch.dtype = torch.float64,
) -> Tensor | tuple[Tensor, Tensor]:
    """The meaning of `pagegen.paged_attention`: same arguments, same shapes, computed in `compute_dtype`.

    Returns [total_q, Hq, Dv] in q's dtype and, with `return_lse`, float32 [total_q, Hq]. `max_query_len`,
    `max_seq_len`, `batch_invariant` and `variant` change no result and are ignored, but that a `tree_mask` must be as
    wide as `max_query_len` and as the longest query. Rows past
    query_start_loc[-1] belong to no sequence: output 0, lse -inf. `captures` are tensors for the modifiers to read
    instead of those that they captured, the score function's first. Raises ValueError for such a `tree_mask` and for an
    unknown modifier; else it trusts its arguments, which `paged_attention` checks.
    """
    total_q, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    v_dim = value_width(v_cache, v_head_dim, kv_dtype)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    change_score, change_mask = _modifiers(score_mod, mask_mod, captures)
    result = torch.zeros(total_q, num_q_heads, v_dim, dtype=compute_dtype, device=q.device)
    lse = torch.full((total_q, num_q_heads), -math.inf, dtype=compute_dtype, device=q.device)
    starts = list(range(len(seq_lens) + 1)) if query_start_loc is None else query_start_loc.tolist()
    longest = max([max_query_len or 0, *(last - first for first, last in itertools.pairwise(starts))])
    if tree_mask is not None and tree_mask.shape[1] < longest:
        raise ValueError(f"tree_mask must have at least {longest} columns (max_query_len), got {tree_mask.shape[1]}")
    batch = torch.arange(len(seq_lens), device=q.device)
    heads = torch.arange(num_q_heads, device=q.device)[:, None, None]

    for s, length in enumerate(seq_lens.tolist()):
        first, last = starts[s], starts[s + 1]
        q_len = last - first
        if q_len == 0:
            continue
        keys = _gather(k_cache, block_table[s], length, kv_dtype, k_scale, k_zero, compute_dtype)
        if v_cache is None:
            values = keys[..., :v_dim]
        else:
            values = _gather(v_cache, block_table[s], length, kv_dtype, v_scale, v_zero, compute_dtype)
        group = num_q_heads // num_kv_heads
        queries = q[first:last].to(compute_dtype).reshape(q_len, num_kv_heads, group, head_dim)
        # [Hq, q_len, length]
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys).reshape(num_q_heads, q_len, length) * scale
        q_pos = torch.arange(length - q_len, length, device=q.device)[None, :, None]
        k_pos = torch.arange(length, device=q.device)[None, None, :]
        if logit_softcap is not None:
            scores = logit_softcap * torch.tanh(scores / logit_softcap)
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(compute_dtype)[:, None, None] * (k_pos - q_pos)
        if change_score is not None:
            changed = change_score(scores, batch[s], heads, q_pos, k_pos)
            scores = torch.as_tensor(changed, dtype=compute_dtype, device=q.device).broadcast_to(scores.shape)
        allowed = torch.ones(1, q_len, length, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed & (k_pos <= q_pos)
        if window is not None:
            allowed = allowed & (k_pos > q_pos - window)
        if tree_mask is not None:
            allowed = allowed & _tree(tree_mask[first:last], q_len, length)
        if change_mask is not None:
            allowed = allowed & change_mask(batch[s], heads, q_pos, k_pos)
        scores = scores.masked_fill(~allowed, -math.inf)
        seen = allowed.expand(num_q_heads, q_len, length).any(dim=0).any(dim=0)
        values = values.masked_fill(~seen[:, None, None], 0.0)  # 0 * NaN: what no query may see must not matter
        rows_out, rows_lse = _attend(scores, values, sinks, compute_dtype)
        result[first:last] = rows_out
        lse[first:last] = rows_lse

    final = result.to(q.dtype)
    if out is not None:
        final = out.copy_(final)
    return (final, lse.to(torch.float32)) if return_lse else final


def _modifiers(
    score_mod: str | modifiers.Modifier | None,
    mask_mod: str | modifiers.Modifier | None,
    captures: Sequence[Tensor] | None,
) -> list[Callable[..., Any] | None]:
    """The score and the mask function over the tensors that they are to read."""
    functions: list[Callable[..., Any] | None] = []
    left = list(captures or ())
    for modifier in (modifiers.find(score_mod, "score"), modifiers.find(mask_mod, "mask")):
        count = len(modifier.captures) if modifier else 0
        functions.append(modifier.over(left[:count] if captures else None) if modifier else None)
        left = left[count:]
    return functions


def _attend(scores: Tensor, values: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Softmax over [Hq, q_len, length] scores with an optional extra logit a head; values [length, Hkv, Dv]."""
    num_q_heads, q_len, length = scores.shape
    if sinks is not None:
        extra = sinks.to(dtype)[:, None, None].expand(num_q_heads, q_len, 1)
        lse = torch.logsumexp(torch.cat([scores, extra], dim=-1), dim=-1)
    elif length:
        lse = torch.logsumexp(scores, dim=-1)
    else:
        lse = torch.full((num_q_heads, q_len), -math.inf, dtype=dtype, device=scores.device)
    weights = torch.exp(scores - lse[..., None].clamp(min=torch.finfo(dtype).min))
    weights = weights.masked_fill(scores == -math.inf, 0.0)
    num_kv_heads, v_dim = values.shape[1:]
    grouped = weights.reshape(num_kv_heads, num_q_heads // num_kv_heads, q_len, length)
    rows = torch.einsum("hgqk,khd->qhgd", grouped, values).reshape(q_len, num_q_heads, v_dim)
    return rows, lse.transpose(0, 1)


def _tree(mask: Tensor, q_len: int, length: int) -> Tensor:
    """[q_len, max_query_len] over this step's own tokens, widened to [1, q_len, length]: older keys are open."""
    wide = torch.ones(q_len, length, dtype=torch.bool, device=mask.device)
    before = max(q_len - length, 0)  # own tokens at negative positions are not in the cache
    wide[:, length - q_len + before :] = mask[:, before:q_len]
    return wide[None]


def value_width(v_cache: Tensor | None, v_head_dim: int | None, kv_dtype: str | torch.dtype | None) -> int:
    """The columns of a value. Raises ValueError where neither a cache nor `v_head_dim` tells them."""
    packed = kv_dtype is not None and parse_dtype(kv_dtype, "kv_dtype") == INT4
    if v_cache is not None:
        return v_cache.shape[-1] * (2 if packed else 1)
    if v_head_dim is None:
        raise ValueError("v_head_dim is required when v_cache is None, got None")
    return v_head_dim


def _gather(
    cache: Tensor,
    table: Tensor,
    length: int,
    kv_dtype: str | torch.dtype | None,
    scale: Tensor | float | None,
    zero: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The first `length` tokens of one sequence as [length, Hkv, D], dequantised: (stored - zero) * scale."""
    block_size = cache.shape[1]
    blocks = table[: -(-length // block_size)].long()
    flat = _decode(cache[blocks].flatten(0, 1)[:length], kv_dtype).to(dtype)
    if zero is not None:
        flat = flat - _per_token(zero, blocks, length, dtype)
    if scale is not None:
        flat = flat * _per_token(scale, blocks, length, dtype)
    return flat


def _per_token(scale: Tensor | float, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor | float:
    """A scale (a number, [Hkv] or [num_blocks, block_size, Hkv]) so that it broadcasts over [length, Hkv, D]."""
    if not isinstance(scale, Tensor):
        return scale
    if scale.dim() == 3:
        return scale[blocks].flatten(0, 1)[:length].to(dtype)[..., None]
    return scale.to(dtype)[:, None] if scale.dim() == 1 and len(scale) > 1 else scale.to(dtype)


def _decode(stored: Tensor, kv_dtype: str | torch.dtype | None) -> Tensor:
    """Reinterprets storage: uint8 holding fp8, or two int4 values a byte, low nibble first."""
    if kv_dtype is None:
        return stored
    dtype = parse_dtype(kv_dtype, "kv_dtype")
    if dtype == INT4:
        byte = stored.view(torch.uint8).to(torch.int16)
        nibbles = torch.stack([byte & 0xF, byte >> 4], dim=-1).flatten(-2)
        return torch.where(nibbles > 7, nibbles - 16, nibbles)
    if stored.dtype == torch.uint8 and dtype.itemsize == 1:
        return stored.contiguous().view(dtype)
    return stored
