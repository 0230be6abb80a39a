"""What caches of every dtype hold: random numbers as they are stored, and what scales and zero points go with them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagegen.spec import AttentionSpec, CacheLayout
from pagegen.spec.dtypes import INT4
from pagegen.targets.torch_cache import encode

# Steps a standard deviation: integers use most of their range, and few saturate.
STEPS = {torch.int8: 40.0, INT4: 2.5}
# Zero points are drawn from -2 .. 2.
ZERO_SPREAD = 4.0


def columns(spec: AttentionSpec, width: int) -> int:
    """Stored elements of a row of `width` values."""
    return width // 2 if spec.kv_dtype == INT4 else width


def stored(spec: AttentionSpec, values: Tensor) -> Tensor:
    """Unit normal `values` [..., width] as the cache holds them, NaN where they are NaN and the dtype has one."""
    steps = STEPS.get(spec.kv_dtype)
    # an integer cannot be NaN: the largest one shows best where it must not be read
    return encode(values if steps is None else (values * steps).nan_to_num(math.inf), spec.kv_dtype)


def factors(
    spec: AttentionSpec, num_blocks: int, layout: CacheLayout, generator: torch.Generator, *, used: Tensor | None = None
) -> dict[str, Tensor]:
    """Scales and zero points as a call carries them, float32 [num_blocks, block_size, Hkv], those that the spec has.
    Where each token has its own, they are NaN but in the `used` slots (bool [num_blocks, block_size]; None: all)."""
    shape = (num_blocks, layout.block_size, spec.num_kv_heads)

    def of_tokens(values: Tensor) -> Tensor:
        return values if used is None else values.masked_fill_(~used[..., None], math.nan)

    found = {}
    sides = ("k", "v")
    for side in sides if spec.kv_scale_granularity != "none" else ():
        own = {"tensor": (1, 1, 1), "head": (1, 1, spec.num_kv_heads), "token_head": shape}[spec.kv_scale_granularity]
        scale = (0.5 + torch.rand(own, generator=generator)) / STEPS.get(spec.kv_dtype, 1.0)
        found[f"{side}_scale"] = of_tokens(scale) if own == shape else scale.expand(shape)
    for side in sides if spec.kv_zero_points else ():
        found[f"{side}_zero"] = of_tokens((torch.rand(shape, generator=generator) - 0.5) * ZERO_SPREAD)
    if spec.shared_kv:  # values are columns of the keys, and dequantised as they are
        found |= {f"v_{name[2:]}": tensor for name, tensor in found.items() if name.startswith("k_")}
    return found
