"""Writing to and copying within a paged cache on the CPU target, through templates/cache_ops.hpp."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from pagegen.spec.dtypes import INT4
from pagegen.targets import cpu
from pagegen.targets.cache_call import Rotation, WriteCall

# The structs of templates/cache_ops.hpp: pointers and 64-bit integers. A write's: K's rows, V's rows, where they
# go, and the rotation.
_WRITE_ARGS = struct.Struct("@4Q12q 4Q12q Q6q 5Q12q")
_COPY_ARGS = struct.Struct("@3Q13q")
# As templates/cache_ops.hpp and merge.hpp number them.
DTYPE_CODES = {
    dtype: code
    for code, dtype in enumerate(
        (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, INT4)
    )
}
_NO_ROWS = (0,) * 16
_NO_ROTATION = (0,) * 17
_NO_STRIDES = (0, 0, 0)


def write(call: WriteCall) -> None:
    """Rotates, quantises and stores the rows of one call, on `torch.get_num_threads()` threads. Raises CompileError
    where no compiler works."""
    k, v, rotation = call.k, call.v, call.rotation
    v_rows: tuple[int, ...] = _NO_ROWS
    if v is not None and call.v_cache is not None:
        v_rows = _rows(v, call.v_cache, call.v_scale, call.v_zero)
    args = _WRITE_ARGS.pack(
        *_rows(k, call.k_cache, call.k_scale, call.k_zero),
        *v_rows,
        call.slots.data_ptr(),
        *k.shape[:2],
        call.k_cache.shape[1],
        DTYPE_CODES[k.dtype],
        DTYPE_CODES[call.stored],
        torch.get_num_threads(),
        *(_NO_ROTATION if rotation is None else _rotation(rotation)),
    )
    cpu.library().pagegen_write_kv(args)


def _rows(rows: Tensor, cache: Tensor, scale: Tensor | None, zero: Tensor | None) -> tuple[int, ...]:
    """A `pagegen_rows`."""
    return (
        rows.data_ptr(),
        cache.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if zero is None else zero.data_ptr(),
        *rows.stride()[:2],
        *cache.stride()[:3],
        *(_NO_STRIDES if scale is None else scale.stride()),
        *(_NO_STRIDES if zero is None else zero.stride()),
        rows.shape[2],
    )


def _rotation(rotation: Rotation) -> tuple[int, ...]:
    """The last part of a `pagegen_write_args`."""
    q, cos = rotation.q, rotation.cos
    return (
        q.data_ptr(),
        rotation.rotated.data_ptr(),
        rotation.positions.data_ptr(),
        cos.data_ptr(),
        rotation.sin.data_ptr(),
        *q.stride()[:2],
        *rotation.rotated.stride()[:2],
        cos.stride(0),
        rotation.sin.stride(0),
        q.shape[1],
        *cos.shape,
        rotation.interleaved,
        DTYPE_CODES[q.dtype],
        DTYPE_CODES[cos.dtype],
    )


def copy_blocks(k_cache: Tensor, v_cache: Tensor | None, pairs: Tensor) -> None:
    """Copies whole blocks of both caches, of any dtype: `pairs` int64 [num_pairs, 2] of (source, target), as if all
    sources were read before any target is written. Raises CompileError where no compiler works."""
    pairs = pairs.contiguous()
    if torch.isin(pairs[:, 1], pairs[:, 0]).any():
        # a chain: copy the sources aside first; copy-on-write never makes one, since its targets are new blocks
        for cache in (k_cache, v_cache):
            if cache is not None:
                cache[pairs[:, 1]] = cache[pairs[:, 0]]
        return
    args = _COPY_ARGS.pack(
        k_cache.data_ptr(),
        0 if v_cache is None else v_cache.data_ptr(),
        pairs.data_ptr(),
        *k_cache.stride()[:3],
        *(_NO_STRIDES if v_cache is None else v_cache.stride()[:3]),
        pairs.shape[0],
        *k_cache.shape[2:],
        0 if v_cache is None else v_cache.shape[3],
        k_cache.shape[1],
        k_cache.element_size(),
        torch.get_num_threads(),
    )
    cpu.library().pagegen_copy_blocks(args)
