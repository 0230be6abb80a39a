"""What a kernel receives of a call: caches by their meaning, scales of one shape, the modifiers' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagegen.modifiers import Capture, Modifier, captured_tensors, find_both
from pagegen.ops import gradients
from pagegen.ops.checks import SCALES, describe
from pagegen.spec import AttentionSpec
from pagegen.spec.dtypes import INT4
from pagegen.targets.call import values_in_keys


def captures(q: Tensor, options: dict[str, Any], given: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """The captured tensors of a call, the score function's first: those `given`, or else those that the modifiers were
    registered with. Raises ValueError for an unknown modifier, and for tensors that are not what the
    modifiers were traced with."""
    score_mod, mask_mod = options.get("score_mod"), options.get("mask_mod")
    found = find_both(score_mod, mask_mod)
    if not found and not given:
        return ()
    expected = [(modifier, capture) for modifier in found for capture in modifier.captures]
    given = given or captured_tensors(score_mod, mask_mod)
    if len(given) != len(expected):
        names = ", ".join(capture.name for _, capture in expected) or "none"
        raise ValueError(
            f"captures must be the {len(expected)} tensors that the modifiers read ({names}), got {len(given)}"
        )
    for (modifier, capture), tensor in zip(expected, given, strict=True):
        _check_capture(modifier, capture, tensor, q)
    return tuple(given)


def _check_capture(modifier: Modifier, capture: Capture, tensor: Tensor, q: Tensor) -> None:
    named = f"tensor {capture.name} captured by {modifier.name}"
    gradients.refuse(**{named: tensor})
    if tensor.dtype != capture.dtype or tensor.dim() != capture.rank:
        dtype = str(capture.dtype).removeprefix("torch.")
        raise ValueError(f"{named} must be {dtype} of {capture.rank} dimensions, got {describe(tensor)}")
    if not tensor.is_contiguous() or tensor.numel() == 0:
        raise ValueError(
            f"{named} must be contiguous and not empty, got {describe(tensor)} with strides {tensor.stride()}"
        )
    if tensor.device != q.device:
        raise ValueError(f"{named} must be on {q.device} like q, got {tensor.device}")


def caches(k_cache: Tensor, v_cache: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """K and V with their meaning as dtype (uint8 where int4 is packed): views, never copies."""
    if v_cache is not None and k_cache.dtype is spec.kv_dtype:  # most calls: 0.3 us less
        return k_cache, v_cache
    if v_cache is None:
        k_cache = stored(k_cache, spec)
        return k_cache, values_in_keys(k_cache, spec)
    return stored(k_cache, spec), stored(v_cache, spec)


def stored(cache: Tensor, spec: AttentionSpec) -> Tensor:
    """A cache as its spec reads it."""
    if cache.dtype == spec.kv_dtype:
        return cache
    dtype = torch.uint8 if spec.kv_dtype == INT4 else spec.kv_dtype
    return cache if cache.dtype == dtype else cache.view(dtype)


Scales = tuple["Tensor | None", "Tensor | None", "Tensor | None", "Tensor | None"]  # in the order of SCALES
NO_SCALES: Scales = (None, None, None, None)


def scales(k_cache: Tensor, given: dict[str, Any], *, shared_kv: bool) -> Scales:
    """`k_scale`, `v_scale`, `k_zero` and `v_zero` of those `given`, as float32 [num_blocks, block_size, Hkv] views:
    what only one of K and V was given is 1, respectively 0, for the other, and V has K's where both are one cache."""
    k_scale, v_scale, k_zero, v_zero = map(given.get, SCALES)
    if shared_kv:
        v_scale, v_zero = k_scale, k_zero
    shape = k_cache.shape[:3]
    return (*_expanded(k_scale, v_scale, 1.0, shape), *_expanded(k_zero, v_zero, 0.0, shape))


def _expanded(
    k: Tensor | None, v: Tensor | None, neutral: float, shape: Sequence[int]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Both (numbers, [1], [Hkv] or of the whole `shape`) as float32 views of `shape`; None where neither is given."""
    some = v if k is None else k
    if some is None:
        return None, None
    k, v = (some.new_full((), neutral) if value is None else value for value in (k, v))
    return k.to(torch.float32).expand(*shape), v.to(torch.float32).expand(*shape)
