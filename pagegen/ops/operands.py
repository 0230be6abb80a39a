"""What a kernel receives of a call: caches by their meaning, scales of one shape, the modifiers' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagegen.modifiers import Capture, Modifier, find
from pagegen.ops.checks import describe
from pagegen.spec import AttentionSpec
from pagegen.spec.dtypes import INT4

Modifiers = tuple[Modifier | None, Modifier | None]
NO_MODIFIERS: Modifiers = (None, None)


def modifiers(score_mod: str | None, mask_mod: str | None) -> Modifiers:
    """The registered modifiers. Raises ValueError for an unknown name."""
    if score_mod is None and mask_mod is None:
        return NO_MODIFIERS
    return find(score_mod, "score"), find(mask_mod, "mask")


def captures(found: Modifiers, given: Sequence[Tensor] | None, q: Tensor) -> tuple[Tensor, ...]:
    """The captured tensors of a call, the score function's first: those `given`, or else those that the modifiers were
    registered with. Raises ValueError for tensors that are not what the modifiers were traced with."""
    if found is NO_MODIFIERS and not given:  # every other call
        return ()
    expected = [(m, capture) for m in found if m is not None for capture in m.captures]
    if not given:
        given = [tensor for m in found if m is not None for tensor in m.tensors.values()]
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
    if v_cache is None:
        k_cache = stored(k_cache, spec)
        return k_cache, k_cache if spec.kv_dtype == INT4 else k_cache[..., : spec.v_head_dim]
    return stored(k_cache, spec), stored(v_cache, spec)


def stored(cache: Tensor, spec: AttentionSpec) -> Tensor:
    """A cache as its spec reads it."""
    if cache.dtype == spec.kv_dtype:
        return cache
    dtype = torch.uint8 if spec.kv_dtype == INT4 else spec.kv_dtype
    return cache if cache.dtype == dtype else cache.view(dtype)


def scales(k_cache: Tensor, spec: AttentionSpec, options: dict[str, Any]) -> dict[str, Tensor]:
    """`k_scale`, `v_scale`, `k_zero` and `v_zero` as float32 [num_blocks, block_size, Hkv] views, for those that the
    spec has: what only one of K and V was given is 1, respectively 0, for the other. A shared cache has those of K."""
    found: dict[str, Tensor] = {}
    if spec.kv_scale_granularity != "none":
        found |= _pair("scale", 1.0, k_cache, spec, options)
    if spec.kv_zero_points:
        found |= _pair("zero", 0.0, k_cache, spec, options)
    return found


def _pair(
    name: str, neutral: float, k_cache: Tensor, spec: AttentionSpec, options: dict[str, Any]
) -> dict[str, Tensor]:
    k, v = options.get(f"k_{name}"), options.get(f"v_{name}")
    if spec.shared_kv:
        v = k
    some: Tensor = k if v is None else v  # type: ignore[assignment]  # the spec says that one is there
    shape = k_cache.shape[:3]
    return {
        f"{side}_{name}": _expanded(some.new_full((), neutral) if value is None else value, shape)
        for side, value in (("k", k), ("v", v))
    }


def _expanded(value: Tensor, shape: Sequence[int]) -> Tensor:
    return value.to(torch.float32).expand(*shape)  # a number, [1], [Hkv] or the whole shape
