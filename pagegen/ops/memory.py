"""Which memory tensors take: whether two of them share some. Reads addresses and strides, never the device."""

from __future__ import annotations

import functools

from torch import Tensor


def ranges_meet(one: Tensor, other: Tensor) -> bool:
    """Whether the ranges from the first to the last byte of two tensors have a byte in common."""
    first, second = one.data_ptr(), other.data_ptr()
    low, distance = (one, second - first) if first <= second else (other, first - second)
    if distance >= _extent(low.shape, low.stride()) * low.dtype.itemsize:
        return False
    return bool(one.numel() and other.numel())


def share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype, each without overlaps of its own, have an element in common. Of different
    strides only tensors whose ranges meet nowhere are known to have none: those are trusted to interleave."""
    if not ranges_meet(one, other) or one.stride() != other.stride():
        return False
    distance = (other.data_ptr() - one.data_ptr()) // one.element_size()
    return _meet(distance, one.stride(), tuple(one.shape), tuple(other.shape))


@functools.lru_cache(maxsize=256)
def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to behind the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@functools.lru_cache(maxsize=256)
def _meet(distance: int, strides: tuple[int, ...], shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether some i in `shape` and j in `other` have sum((i - j) * stride) == distance."""
    dims = sorted(zip(strides, shape, other, strict=True), reverse=True)
    return _reached(distance, tuple((stride, 1 - b, a - 1) for stride, a, b in dims))


def _reached(distance: int, dims: tuple[tuple[int, int, int], ...]) -> bool:
    """Whether steps low..high of each (stride, low, high), the largest stride first, add up to `distance`. The smaller
    strides reach less far than a larger one, so that few steps of each can lead there."""
    if not dims:
        return distance == 0
    (stride, low, high), rest = dims[0], dims[1:]
    if stride == 0 or low == high:  # of sizes 1
        return _reached(distance, rest)
    below, above = (sum(step * s for s, *ends in rest for step in (ends[end],)) for end in (0, 1))
    steps = range(max(low, -((above - distance) // stride)), min(high, (distance - below) // stride) + 1)
    return any(_reached(distance - step * stride, rest) for step in steps)
