"""Operators that write and move: `write_kv`, `rope_write_kv`, `update_scales`, `copy_blocks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagegen import settings
from pagegen.ops import cache_checks, checks, gradients, operands, plans, repeated
from pagegen.ops.schemas import LIBRARY
from pagegen.spec.dtypes import INTEGER_RANGES
from pagegen.targets.cache_call import Rotation, WriteCall

# A zero point beyond 2^16 levels would itself be rounded by more than 1/256 of a level in float32.
_FARTHEST_ZERO = 2.0**16
# What the checks of a write look at, of calls that passed them -> what the caches hold; no tensor is kept.
_PASSED: dict[tuple[Any, ...], torch.dtype] = {}
_MOST_PASSED = 4096  # of 2 KiB each; then they are forgotten
_RECENT: repeated.Recent[torch.dtype] = repeated.Recent()  # the last of them, in 1 us in place of 4


def write_kv(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    kv_dtype: str | None = None,
) -> None:
    """`torch.ops.pagegen.write_kv`; see `pagegen.write_kv`."""
    stored = _checked(k, v, k_cache, v_cache, slot_mapping, kv_dtype)
    scales = operands.NO_SCALES
    if not (k_scale is v_scale is None and k_zero is v_zero is None):
        scales = _scales(k_cache, v_cache, kv_dtype, k_scale=k_scale, v_scale=v_scale, k_zero=k_zero, v_zero=v_zero)
    _write(WriteCall(k, v, k_cache, v_cache, slot_mapping, stored, *scales))


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    kv_dtype: str | None = None,
) -> Tensor:
    """`torch.ops.pagegen.rope_write_kv`; see `pagegen.rope_write_kv`."""
    gradients.refuse(q=q, cos=cos, sin=sin)
    stored = _checked(k, v, k_cache, v_cache, slot_mapping, kv_dtype)
    cache_checks.rope(q, k, positions, cos, sin)
    scales = _scales(k_cache, v_cache, kv_dtype, k_scale=k_scale, v_scale=v_scale, k_zero=k_zero, v_zero=v_zero)
    rotated = q.new_empty(q.shape)
    rotation = Rotation(q, rotated, positions, cos, sin, interleaved)
    _write(WriteCall(k, v, k_cache, v_cache, slot_mapping, stored, *scales, rotation=rotation))
    return rotated


def _checked(
    k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, slots: Tensor, kv_dtype: str | None
) -> torch.dtype:
    """What `cache_checks.write` says, which takes 12 us, looked up for what passed it already: it looks at no address
    but how far V lies from K, and at values only when asked to."""
    tensors = [k, k_cache, slots]
    values: list[Any] = [kv_dtype]
    if v is not None and v_cache is not None:
        tensors += v, v_cache
        values.append(v_cache.data_ptr() - k_cache.data_ptr())
    elif v is not None or v_cache is not None:
        values.append(None)
    stored = _RECENT.find(tensors, values)
    if stored is not None and not settings.check_values():
        return stored
    seen = (repeated.form(tensors), *values)
    stored = _PASSED.get(seen)
    if stored is None or settings.check_values():
        gradients.refuse(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
        stored = cache_checks.write(k, v, k_cache, v_cache, slots, kv_dtype)
        if len(_PASSED) >= _MOST_PASSED:
            _PASSED.clear()
        _PASSED[seen] = stored
    _RECENT.keep(tensors, values, stored)
    return stored


def _scales(k_cache: Tensor, v_cache: Tensor | None, kv_dtype: str | None, **given: Tensor | None) -> operands.Scales:
    """Scales and zero points, checked, in the order in which a `WriteCall` has them."""
    gradients.refuse(**given)
    checks.scales(k_cache, v_cache, kv_dtype, given)
    return operands.scales(k_cache, given, shared_kv=v_cache is None)


def _write(call: WriteCall) -> None:
    if call.k.shape[0]:  # len: 0.3 us more
        from pagegen import targets

        targets.cache_writer(plans.target_of(call.k.device))(call)


def update_scales(
    k: Tensor,
    v: Tensor | None,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor | None,
    *,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    kv_dtype: str,
) -> None:
    """`torch.ops.pagegen.update_scales`; see `pagegen.update_scales`."""
    gradients.refuse(k=k, v=v, k_scale=k_scale, v_scale=v_scale, k_zero=k_zero, v_zero=v_zero)
    stored = cache_checks.scale_update(k, v, slot_mapping, k_scale, v_scale, k_zero, v_zero, kv_dtype)
    if not len(k):
        return
    for rows, scale, zero in ((k, k_scale, k_zero), (v, v_scale, v_zero)):
        if rows is None or scale is None:
            continue
        if zero is None:
            _assign(scale, slot_mapping, _symmetric(rows, stored))
        else:
            new_scale, new_zero = _asymmetric(rows, stored)
            _assign(scale, slot_mapping, new_scale)
            _assign(zero, slot_mapping, new_zero)


def _symmetric(rows: Tensor, stored: torch.dtype) -> Tensor:
    """Scales [num_tokens, Hkv] that map each row's largest magnitude to the largest value of `stored`."""
    top = INTEGER_RANGES[stored][1] if stored in INTEGER_RANGES else torch.finfo(stored).max
    values = rows.float()
    return _usable(values.abs().masked_fill(~values.isfinite(), 0.0).amax(dim=-1) / top)


def _asymmetric(rows: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and zero points [num_tokens, Hkv] that map each row's least and largest value to the ends of `stored`."""
    first, last = INTEGER_RANGES[stored]
    values = rows.float()
    ignored = ~values.isfinite()
    low, high = (
        values.masked_fill(ignored, torch.inf).amin(dim=-1),
        values.masked_fill(ignored, -torch.inf).amax(dim=-1),
    )
    nothing = low > high
    low, high = low.masked_fill(nothing, 0.0), high.masked_fill(nothing, 0.0)
    levels = last - first
    scale = high / levels - low / levels  # their difference could overflow
    scale = _usable(torch.maximum(scale, torch.maximum(low.abs(), high.abs()) / _FARTHEST_ZERO))
    return scale, first - low / scale


def _usable(scale: Tensor) -> Tensor:
    """1 in place of scales too small to divide by: those of rows that are 0, or as good as."""
    return scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 1.0)


def _assign(target: Tensor, slots: Tensor, values: Tensor) -> None:
    """target[slot] = values [num_tokens, Hkv] for slots that are not negative, without a look at the device: a CUDA
    graph can capture it. A token to skip repeats another one's assignment; if all are, slot 0 keeps its value."""
    kept = slots >= 0
    token = torch.where(kept, torch.arange(len(slots), device=slots.device), kept.int().argmax())
    chosen, some = slots[token].clamp(min=0), kept.any()
    block, place = chosen // target.shape[1], chosen % target.shape[1]
    target[block, place] = torch.where(some, values[token], target[block, place])


def copy_blocks(k_cache: Tensor, v_cache: Tensor | None, pairs: Tensor) -> None:
    """`torch.ops.pagegen.copy_blocks`; see `pagegen.copy_blocks`."""
    gradients.refuse(k_cache=k_cache, v_cache=v_cache)
    cache_checks.copies(k_cache, v_cache, pairs)
    if len(pairs):
        from pagegen import targets

        targets.block_copier(plans.target_of(k_cache.device))(k_cache, v_cache, pairs)


_IMPLEMENTATIONS: dict[str, Any] = {
    "write_kv": write_kv,
    "rope_write_kv": rope_write_kv,
    "update_scales": update_scales,
    "copy_blocks": copy_blocks,
}
for _name, _function in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _function, _key)
