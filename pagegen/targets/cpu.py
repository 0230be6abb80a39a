"""The CPU target: generated C++ behind a plain C interface."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading

import torch
from torch import Tensor

from pagegen.codegen import cpp
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device, dtype_name
from pagegen.spec.dtypes import QUERY_DTYPES
from pagegen.targets import cpp_build
from pagegen.targets.call import AttentionCall, AttentionKernel
from pagegen.targets.errors import CompileError

# The structs of templates/attention.hpp and templates/cache_ops.hpp: pointers, 64-bit integers, then a double.
_ATTENTION_ARGS = struct.Struct("@11Q15qd")
_WRITE_ARGS = struct.Struct("@5Q18q")
_COPY_ARGS = struct.Struct("@3Q13q")
_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Workspaces(threading.local):
    """Scratch memory of the calling thread, shared by all kernels and only ever grown."""

    def __init__(self) -> None:
        self.address = 0
        self.size = 0
        self._memory: Tensor | None = None

    def grow(self, size: int) -> None:
        self._memory = torch.empty(size + size // 4, dtype=torch.uint8)
        self.address = self._memory.data_ptr()
        self.size = self._memory.numel()


_workspaces = _Workspaces()


class CpuAttention:
    """A compiled attention kernel. Calling it computes one `AttentionCall` on `torch.get_num_threads()` threads."""

    __slots__ = ("_expected", "_function", "_library")

    def __init__(self, library: ctypes.CDLL, spec: AttentionSpec, layout: CacheLayout) -> None:
        self._library = library  # keeps the code mapped
        self._function = library.pagegen_attention
        self._function.argtypes = [ctypes.c_char_p]
        self._function.restype = ctypes.c_int64
        self._expected = (
            (spec.num_q_heads, spec.head_dim),
            (layout.block_size, spec.num_kv_heads, spec.head_dim),
            spec.v_head_dim,
            spec.q_dtype,
            spec.kv_dtype,
            spec.alibi,
            spec.sinks,
        )

    def __call__(self, call: AttentionCall) -> None:
        q, k, v, out, lse = call.q, call.k_cache, call.v_cache, call.out, call.lse
        slopes, sinks, starts = call.alibi_slopes, call.sinks, call.query_start_loc
        given = (q.shape[1:], k.shape[1:], v.shape[3], q.dtype, k.dtype, slopes is not None, sinks is not None)
        if given != self._expected:
            raise ValueError(
                f"the call must match the kernel's (q, k_cache, v_head_dim, ...) {self._expected}, got {given}"
            )
        pointers = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            call.block_table.data_ptr(),
            call.seq_lens.data_ptr(),
            0 if starts is None else starts.data_ptr(),
            0 if slopes is None else slopes.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
        )
        sizes = (
            *q.stride()[:2],
            *out.stride()[:2],
            0 if lse is None else lse.stride(0),
            *k.stride()[:3],
            *v.stride()[:3],
            call.block_table.stride(0),
            call.seq_lens.shape[0],
            torch.get_num_threads(),
        )
        space = _workspaces
        needed = self._function(_ATTENTION_ARGS.pack(*pointers, space.address, space.size, *sizes, call.scale))
        if needed:
            space.grow(needed)
            self._function(_ATTENTION_ARGS.pack(*pointers, space.address, space.size, *sizes, call.scale))


def load_attention(
    spec: AttentionSpec, layout: CacheLayout, variant: CppVariant, *, machine: tuple[str, ...] = cpp_build.NATIVE
) -> AttentionKernel:
    """Compiles (or finds compiled) and loads one kernel. `machine` are the compiler's instruction-set flags.

    Raises CompileError. The kernel's results depend on a sequence and its own queries alone, so it serves
    `batch_invariant` specs as well: splits have a fixed size and are merged in a fixed order.
    """
    source = cpp.render_attention(spec, layout, variant)
    return CpuAttention(cpp_build.load(source, variant.name, machine=machine), spec, layout)


def unsupported(spec: AttentionSpec) -> str | None:
    """Why the C++ templates do not serve `spec` here (a sentence), or None when they do."""
    if spec.kv_dtype not in QUERY_DTYPES:
        return f"the C++ templates read float caches, not {dtype_name(spec.kv_dtype)}"
    if spec.kv_scale_granularity != "none":
        return "the C++ templates read caches without scales"
    if spec.shared_kv:
        return "the C++ templates read separate K and V, not a shared latent cache"
    if spec.score_mod or spec.mask_mod:
        return "the C++ templates take no score or mask functions"
    if abs(spec.scale) > 1e30:
        return f"the C++ templates take a scale of at most 1e30 (float32), not {spec.scale}"
    if spec.logit_softcap is not None and not 1e-30 <= spec.logit_softcap <= 1e30:
        return f"the C++ templates take a logit_softcap of 1e-30 to 1e30 (float32), not {spec.logit_softcap}"
    toolchain = _toolchain()
    if isinstance(toolchain, CompileError):
        return f"no C++ compiler works here: {toolchain.detail}"
    return None


def default_variant(spec: AttentionSpec, layout: CacheLayout, *, decode: bool) -> CppVariant:
    """A variant that serves every batch, and is usually good for decode, or for longer queries."""
    # The same tiles serve both. In NHD order 8 heads of a tile are taken in turn (see codegen.cpp), so 4 units ahead
    # is half a tile ahead; in HND order a unit is a tile.
    ahead = 4 if layout.order == "NHD" and spec.num_kv_heads > 1 else 1
    return CppVariant(tile_kv=64, streams=4, prefetch_tiles=ahead if decode else 1, split_tokens=2048)


def code_hash() -> str:
    """The hash of the templates behind the CPU kernels."""
    return cpp.template_hash()


def current_device() -> Device:
    """This machine's CPU; see `cpu_device.current_device`."""
    from pagegen.targets import cpu_device

    return cpu_device.current_device()


@functools.cache
def _toolchain() -> tuple[ctypes.CDLL, str] | CompileError:
    """The library of cache operations and the compiler's version, or why there is none. Compiling it (once a
    machine) shows that the compiler knows C++20 and OpenMP and makes something that loads."""
    try:
        library = cpp_build.load(cpp.render_cache_ops(), "write_kv and copy_blocks")
    except CompileError as error:
        return error
    for function in (library.pagegen_write_kv, library.pagegen_copy_blocks):
        function.argtypes = [ctypes.c_char_p]
        function.restype = None
    library.pagegen_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.pagegen_read.restype = ctypes.c_int64
    return library, cpp_build.find_compiler().version


def cache_library() -> ctypes.CDLL | None:
    """The compiled cache operations, or None where no C++ compiler works."""
    toolchain = _toolchain()
    return None if isinstance(toolchain, CompileError) else toolchain[0]


def compiler() -> str | None:
    """The version of the C++ compiler that compiles the kernels, or None when none works."""
    toolchain = _toolchain()
    return None if isinstance(toolchain, CompileError) else toolchain[1]


def _library() -> ctypes.CDLL:
    toolchain = _toolchain()
    if isinstance(toolchain, CompileError):
        raise toolchain
    return toolchain[0]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores [num_tokens, Hkv, D] keys and values at their slots (block * block_size + place); a negative slot is
    skipped. Float tensors and caches of any strides with a unit last one; a cache of another dtype gets rounded
    values. Raises CompileError where no compiler works."""
    args = _WRITE_ARGS.pack(
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        k.shape[0],
        *k_cache.shape[2:],
        v_cache.shape[3],
        k_cache.shape[1],
        _DTYPE_CODES[k.dtype],
        _DTYPE_CODES[k_cache.dtype],
        torch.get_num_threads(),
    )
    _library().pagegen_write_kv(args)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, pairs: Tensor) -> None:
    """Copies whole blocks of both caches: `pairs` int64 [num_pairs, 2] of (source, target), as if all sources were
    read before any target is written. Raises CompileError where no compiler works."""
    pairs = pairs.contiguous()
    if torch.isin(pairs[:, 1], pairs[:, 0]).any():
        # a chain: copy the sources aside first; copy-on-write never makes one, since its targets are new blocks
        for cache in (k_cache, v_cache):
            cache[pairs[:, 1]] = cache[pairs[:, 0]]
        return
    args = _COPY_ARGS.pack(
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        pairs.data_ptr(),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        pairs.shape[0],
        *k_cache.shape[2:],
        v_cache.shape[3],
        k_cache.shape[1],
        k_cache.element_size(),
        torch.get_num_threads(),
    )
    _library().pagegen_copy_blocks(args)
