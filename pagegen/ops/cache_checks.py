"""What the operators that write and copy accept: every check names the argument, what was expected and what came."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagegen import settings
from pagegen.ops.checks import (
    EIGHT_BIT,
    FLOATS,
    STORED,
    caches,
    describe,
    held,
    own_memory,
    sizes,
    slots,
    tensor,
)
from pagegen.ops.memory import share_elements
from pagegen.spec.dtypes import INT4, INTEGER_RANGES, dtype_name, parse_dtype

QUANTISED = (*EIGHT_BIT, INT4)


def write(
    k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor, kv_dtype: str | None
) -> torch.dtype:
    """The operands of `write_kv`. Returns what the caches hold."""
    tensor("k", k, "[num_tokens, num_kv_heads, head_dim]", FLOATS, None)
    _together("v", v, "v_cache", v_cache)
    _written_caches(k_cache, v_cache, k.device)
    stored = held("k_cache", k_cache, kv_dtype)
    _rows_fit("k", k, k.shape[0], k_cache, stored)
    if v is not None and v_cache is not None:
        tensor("v", v, "[num_tokens, num_kv_heads, v_head_dim]", (k.dtype,), k.device)
        _rows_fit("v", v, k.shape[0], v_cache, stored)
    _slot_mapping(slot_mapping, k, k_cache)
    return stored


def _rows_fit(name: str, rows: Tensor, num_tokens: int, cache: Tensor, stored: torch.dtype) -> None:
    """Rows must have the cache's heads and columns; of int4, two columns a byte."""
    columns = cache.shape[3] * (2 if stored == INT4 else 1)
    shape = "[num_tokens, num_kv_heads, head_dim]"
    if stored == INT4 and rows.shape[2] % 2:
        raise ValueError(f"{name} must have an even head_dim for an int4 cache, got {describe(rows)}")
    if stored == INT4 and rows.shape[2] == cache.shape[3]:
        raise ValueError(
            f"{name}_cache must be half as wide as {name} for int4, two values a byte, got {cache.shape[3]} columns "
            f"for {rows.shape[2]}"
        )
    sizes(name, rows, (num_tokens, cache.shape[2], columns), shape)


def _written_caches(k_cache: Tensor, v_cache: Tensor | None, device: torch.device) -> None:
    """Caches that are written: no two elements may share memory."""
    caches(k_cache, v_cache, STORED, device)
    own_memory("k_cache", k_cache)
    if v_cache is not None:
        own_memory("v_cache", v_cache)
        same = v_cache.numel() and v_cache.data_ptr() == k_cache.data_ptr()
        if same or share_elements(k_cache, v_cache):
            raise ValueError(
                "v_cache must have memory of its own, got k_cache's (None says that V is the first columns of K)"
            )


def _together(name: str, value: Any, partner: str, other: Any) -> None:
    if (value is None) != (other is None):
        given, absent = (name, partner) if other is None else (partner, name)
        raise ValueError(f"{name} and {partner} must both be given or both be None, got {given} without {absent}")


def _slot_mapping(slot_mapping: Tensor, k: Tensor, cache: Tensor) -> None:
    tensor("slot_mapping", slot_mapping, "[num_tokens]", (torch.int64,), k.device)
    sizes("slot_mapping", slot_mapping, (k.shape[0],), "[num_tokens]")
    if settings.check_values():
        slots(slot_mapping, cache)


def _integer_cache(name: str, value: Tensor, stored: torch.dtype) -> None:
    if stored not in INTEGER_RANGES:
        kinds = " or ".join(map(dtype_name, INTEGER_RANGES))
        raise ValueError(f"{name} must be None for a cache that is not {kinds}, got {describe(value)}")


def scale_update(
    k: Tensor,
    v: Tensor | None,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor | None,
    k_zero: Tensor | None,
    v_zero: Tensor | None,
    kv_dtype: str,
) -> torch.dtype:
    """The operands of `update_scales`. Returns what the scaled caches hold."""
    stored = parse_dtype(kv_dtype, "kv_dtype")
    if stored not in QUANTISED:
        raise ValueError(f"kv_dtype must be one of {', '.join(map(dtype_name, QUANTISED))}, got {kv_dtype}")
    tensor("k", k, "[num_tokens, num_kv_heads, head_dim]", FLOATS, None)
    _together("v", v, "v_scale", v_scale)
    if v is not None:
        tensor("v", v, "[num_tokens, num_kv_heads, v_head_dim]", FLOATS, k.device)
        sizes("v", v, (*k.shape[:2], None), "[num_tokens, num_kv_heads, v_head_dim]")
    elif v_zero is not None:
        raise ValueError(f"v_zero must be None where v is None, got {describe(v_zero)}")
    shape = "[num_blocks, block_size, num_kv_heads]"
    tensor("k_scale", k_scale, shape, (torch.float32,), k.device)
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale), ("k_zero", k_zero), ("v_zero", v_zero)):
        if value is None:
            continue
        tensor(name, value, shape, (torch.float32,), k.device)
        sizes(name, value, (*k_scale.shape[:2], k.shape[1]), shape)
        own_memory(name, value)
        if name.endswith("zero"):
            _integer_cache(name, value, stored)
    _slot_mapping(slot_mapping, k, k_scale)
    return stored


def copies(k_cache: Tensor, v_cache: Tensor | None, pairs: Tensor) -> None:
    """The operands of `copy_blocks`."""
    _written_caches(k_cache, v_cache, k_cache.device)
    tensor("pairs", pairs, "[num_pairs, 2]", (torch.int64,), k_cache.device)
    sizes("pairs", pairs, (None, 2), "[num_pairs, 2]")
    if settings.check_values():
        block_pairs(pairs.tolist(), k_cache.shape[0])


def block_pairs(pairs: Iterable[Sequence[int]], num_blocks: int) -> list[tuple[int, int]]:
    """`pairs` as a list: block ids within the cache, each target named once, and no block both read and written."""
    listed: Any = pairs
    try:
        listed = list(pairs)
        found = [(operator.index(source), operator.index(target)) for source, target in listed]
    except (TypeError, ValueError):
        raise TypeError(f"pairs must hold (source, target) pairs of block ids, got {listed}") from None
    targets = [target for _, target in found]
    for source, target in found:
        if not (0 <= source < num_blocks and 0 <= target < num_blocks):
            raise ValueError(f"pairs must hold blocks in 0..{num_blocks - 1}, got ({source}, {target})")
    if len(set(targets)) != len(targets) or set(targets) & {source for source, _ in found}:
        raise ValueError(f"pairs must name each target once and no block as source and target, got {found}")
    return found


def rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The operands of a rotation: one position a token, cos and sin [max_position, rotary_dim / 2]."""
    tensor("q", q, "[num_tokens, num_q_heads, head_dim]", FLOATS, k.device)
    sizes("q", q, (k.shape[0], None, k.shape[2]), "[num_tokens, num_q_heads, head_dim]")
    tensor("positions", positions, "[num_tokens]", (torch.int64,), k.device)
    sizes("positions", positions, (k.shape[0],), "[num_tokens]")
    tensor("cos", cos, "[max_position, rotary_dim / 2]", FLOATS, k.device)
    tensor("sin", sin, "[max_position, rotary_dim / 2]", (cos.dtype,), k.device)
    sizes("sin", sin, tuple(cos.shape), "[max_position, rotary_dim / 2]")
    if not 1 <= cos.shape[1] <= k.shape[2] // 2:
        raise ValueError(f"cos must have 1..{k.shape[2] // 2} columns (half the rotary dims), got {cos.shape[1]}")
    if not len(cos):
        raise ValueError(f"cos must have a row a position, at least one, got {describe(cos)}")
    if settings.check_values():
        for token, position in enumerate(positions.tolist()):
            if not 0 <= position < len(cos):
                raise ValueError(f"positions[{token}] must be in 0..{len(cos) - 1}, got {position}")
