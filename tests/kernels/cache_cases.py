"""What writing to a cache must store, in float64 and by comparing with every value of a type; caches to write to."""

from __future__ import annotations

import torch
from torch import Tensor

INT4 = torch.int4  # type: ignore[attr-defined]
STORED = (
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, INT4,
)  # fmt: skip
FLOATS = STORED[:3]
INTEGERS = {torch.int8: (-128, 127), INT4: (-8, 7)}
ORDERS = ("NHD", "HND", "pool", "packed")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def caches(
    order: str, stored: torch.dtype, *, blocks: int = 4, size: int = 6, heads: int = 3, dims: int = 20, v_dims: int = 18
) -> tuple[Tensor, Tensor]:
    """K and V caches of random bytes, so that a write beside its slot shows. int4 is uint8 of half the columns."""
    dtype, pack = (torch.uint8, 2) if stored == INT4 else (stored, 1)
    k_width, v_width = dims // pack, v_dims // pack
    if order == "packed":  # one [num_blocks, Hkv, block_size, D + Dv + 8] tensor
        whole = _noise(dtype, blocks, heads, size, k_width + v_width + 8).transpose(1, 2)
        return whole[..., :k_width], whole[..., k_width : k_width + v_width]
    if order == "pool":  # one tensor of K and V blocks by turns
        whole = _noise(dtype, blocks, 2, size, heads, max(k_width, v_width))
        return whole[:, 0, ..., :k_width], whole[:, 1, ..., :v_width]
    if order == "HND":
        made = (_noise(dtype, blocks, heads, size, width).transpose(1, 2) for width in (k_width, v_width))
    else:
        made = (_noise(dtype, blocks, size, heads, width) for width in (k_width, v_width))
    k_cache, v_cache = made
    return k_cache, v_cache


def _noise(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    bytes_wide = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, bytes_wide, dtype=torch.uint8, generator=generator).view(dtype)


def nearest(values: Tensor, stored: torch.dtype) -> Tensor:
    """float64 values as float8 bits (uint8) or integers (int64): the nearest of all that the type has, of two equally
    near the even one, by comparing with each. NaN is 0x7f, in integers 0."""
    if stored in INTEGERS:
        first, last = INTEGERS[stored]
        codes = torch.arange(first, last + 1)
        return _closest(values, codes.double(), codes).masked_fill(values.isnan(), 0)
    codes = torch.arange(128, dtype=torch.uint8)
    found = codes.view(stored).double()
    codes, found = codes[found.isfinite()], found[found.isfinite()]
    size = _closest(values.abs(), found, codes.long())
    sign = torch.signbit(values).long() << 7
    return (size | sign).masked_fill(values.isnan(), 0x7F).to(torch.uint8)


def _closest(values: Tensor, table: Tensor, codes: Tensor) -> Tensor:
    finite = values.nan_to_num(0.0).clamp(-1e6, 1e6)  # further out than any type, near enough to tell distances
    apart = (finite[..., None] - table).abs()
    tied = apart == apart.amin(dim=-1, keepdim=True)
    best = torch.where(tied, torch.where(codes % 2 == 0, 2, 1), 0).argmax(dim=-1)
    return codes[best]


def reference_write(
    rows: Tensor,
    cache: Tensor,
    slots: Tensor,
    stored: torch.dtype,
    scale: Tensor | float | None = None,
    zero: Tensor | float | None = None,
) -> Tensor:
    """A copy of `cache` with rows [num_tokens, Hkv, D] written: value / scale and then + zero are rounded to float32,
    the sum to the nearest value of `stored`."""
    result = cache.clone()
    size = cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, place = slot // size, slot % size
        values = rows[token].double()
        if scale is not None:
            values = (values / _of_slot(scale, block, place)).float().double()
        if zero is not None:
            values = (values + _of_slot(zero, block, place)).float().double()
        result[block, place] = _encode(values, stored).view(cache.dtype)
    return result


def _of_slot(value: Tensor | float, block: int, place: int) -> Tensor:
    tensor = torch.as_tensor(value, dtype=torch.float32).double()
    return tensor[block, place][:, None] if tensor.dim() == 3 else tensor.reshape(-1, 1)


def _encode(values: Tensor, stored: torch.dtype) -> Tensor:
    if stored in FLOATS:
        return values.float().to(stored)
    codes = nearest(values, stored)
    if stored == INT4:
        low, high = codes[..., 0::2] & 15, codes[..., 1::2] & 15
        return (low | high << 4).to(torch.uint8)
    return codes.to(torch.int8) if stored == torch.int8 else codes


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal bits, or NaN in both."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    equal = found.view(integers) == expected.view(integers)
    if found.is_floating_point():
        equal |= found.float().isnan() & expected.float().isnan()
    return bool(equal.all())


def hard_values(count: int, seed: int = 0) -> Tensor:
    """float32: ordinary ones, huge and tiny ones, ties of float8 and of integers, infinities and NaN; shuffled."""
    generator = torch.Generator().manual_seed(seed)
    special = [
        0.0, -0.0, 1e4, -1e4, 448.0, 463.9, 464.0, 465.0, 57344.0, 61440.0, 1e30, -1e30, 1e-30, 2.0**-10, 2.0**-17,
        3 * 2.0**-10, 0.5, 1.5, 2.5, -0.5, -7.5, -8.5, 127.5, -128.5, float("inf"), -float("inf"), float("nan"),
    ]  # fmt: skip
    exact = torch.arange(120, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middles = ((exact[1:] + exact[:-1]) / 2).float()
    sizes = torch.tensor([1e-3, 1.0, 30.0, 3e3]).repeat(-(-count // 4))[:count]
    ordinary = torch.randn(count, generator=generator) * sizes
    pool = torch.cat([torch.tensor(special), middles, -middles, ordinary])
    chosen = torch.randint(0, len(pool), (count,), generator=generator)
    chosen[: len(special)] = torch.arange(len(special))[:count]
    return pool[chosen[torch.randperm(count, generator=generator)]]
