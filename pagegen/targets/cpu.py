"""The CPU target: generated C++ behind a plain C interface."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
import threading

import torch
from torch import Tensor

from pagegen.codegen import cpp, traced
from pagegen.modifiers.closures import MAX_RANK
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant
from pagegen.spec.dtypes import INT4, bytes_per_element
from pagegen.spec.variant import all_heads
from pagegen.targets import artefacts, cpp_build
from pagegen.targets.call import AttentionCall, AttentionKernel
from pagegen.targets.errors import CompileError

# The structs of templates/call.hpp: pointers, 64-bit integers, the factors of K and V, then a double.
_ATTENTION_ARGS = struct.Struct("@13Q16q" + "Q3q" * 4 + "d")
_CAPTURE = struct.Struct(f"@Q{2 * MAX_RANK}q")
_NO_FACTORS = (0,) * 8


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
        packed = bytes_per_element(spec.kv_dtype) < 1
        columns = (spec.head_dim if packed and spec.shared_kv else spec.v_head_dim) // (2 if packed else 1)
        self._expected = (
            (spec.num_q_heads, spec.head_dim),
            (layout.block_size, spec.num_kv_heads, spec.head_dim // (2 if packed else 1), columns),
            spec.q_dtype,
            torch.uint8 if packed else spec.kv_dtype,
            spec.alibi,
            spec.sinks,
            *(spec.kv_scale_granularity != "none",) * 2,
            *(spec.kv_zero_points,) * 2,
            tuple((capture.dtype, capture.rank) for _, capture in traced.captures(spec)),
        )

    def __call__(self, call: AttentionCall) -> None:
        # Each attribute of a tensor costs 0.1 us, and all of a short call 10: none is asked for twice.
        q, k, v, table, lengths, lse = call.q, call.k_cache, call.v_cache, call.block_table, call.seq_lens, call.lse
        slopes, sinks, tree = call.alibi_slopes, call.sinks, call.tree_mask
        k_scale, v_scale, k_zero, v_zero = call.k_scale, call.v_scale, call.k_zero, call.v_zero
        _, heads, width = q.shape
        _, block_size, kv_heads, columns = k.shape
        given = (
            (heads, width), (block_size, kv_heads, columns, v.shape[3]), q.dtype, k.dtype, slopes is not None,
            sinks is not None, k_scale is not None, v_scale is not None, k_zero is not None, v_zero is not None,
            tuple((capture.dtype, capture.dim()) for capture in call.captures) if call.captures else (),
        )  # fmt: skip
        if given != self._expected:
            raise ValueError(
                "the call must match the kernel's (q, k_cache and the columns of v_cache, ...) "
                f"{self._expected}, got {given}"
            )
        captures = _packed_captures(call.captures)  # kept until the call is over
        starts = call.query_start_loc
        pointers = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            table.data_ptr(),
            lengths.data_ptr(),
            0 if starts is None else starts.data_ptr(),
            0 if slopes is None else slopes.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            0 if tree is None else tree.data_ptr(),
            0 if captures is None else captures.data_ptr(),
            call.out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
        )
        q_token, q_head, _ = q.stride()
        out_token, out_head, _ = call.out.stride()
        k_block, k_slot, k_head, _ = k.stride()
        v_block, v_slot, v_head, _ = v.stride()
        strides = (
            q_token, q_head, out_token, out_head, 0 if lse is None else lse.stride()[0], k_block, k_slot, k_head,
            v_block, v_slot, v_head, table.stride()[0], 0 if tree is None else tree.stride()[0],
        )  # fmt: skip
        sizes = (lengths.shape[0], torch.get_num_threads())
        factors = (*_factors(k_scale, v_scale), *_factors(k_zero, v_zero), call.scale)
        space = _workspaces
        needed = self._function(_ATTENTION_ARGS.pack(*pointers, space.address, space.size, *strides, *sizes, *factors))
        if needed:
            space.grow(needed)
            self._function(_ATTENTION_ARGS.pack(*pointers, space.address, space.size, *strides, *sizes, *factors))


def _factors(k: Tensor | None, v: Tensor | None) -> tuple[int, ...]:
    """Two structs pagegen_factors: scales or zero points [num_blocks, block_size, Hkv] of K and of V."""
    if k is None or v is None:
        return _NO_FACTORS
    return (k.data_ptr(), *k.stride(), v.data_ptr(), *v.stride())


def _packed_captures(captures: tuple[Tensor, ...]) -> Tensor | None:
    """An array of struct pagegen_capture: where a captured tensor lies, its sizes and strides."""
    if not captures:
        return None
    packed = bytearray()
    for tensor in captures:
        rest = (0,) * (MAX_RANK - tensor.dim())
        packed += _CAPTURE.pack(tensor.data_ptr(), *tensor.shape, *rest, *tensor.stride(), *rest)
    return torch.frombuffer(packed, dtype=torch.uint8)


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
    """Why no C++ kernel serves `spec` here (a sentence), beyond what `pagegen.targets.unsupported` refuses on every
    target, or None when one does."""
    if abs(spec.scale) > 1e30:
        return f"the C++ templates take a scale of at most 1e30 (float32), not {spec.scale}"
    if spec.logit_softcap is not None and not 1e-30 <= spec.logit_softcap <= 1e30:
        return f"the C++ templates take a logit_softcap of 1e-30 to 1e30 (float32), not {spec.logit_softcap}"
    fault = compiler_fault()
    return None if fault is None else f"no C++ compiler works here: {fault}"


def default_variant(spec: AttentionSpec, layout: CacheLayout, *, decode: bool) -> CppVariant:
    """A variant that serves every batch, and is usually good where each sequence has one query (`decode`), or many.

    Chosen on a Zen 4 CPU, 2 threads; each ratio below is of speeds there."""
    found = _decode_variant(spec, layout)
    # Many queries: 0.84 of the multiply-add peak; tiles of 64 tokens are at 0.95 of that. The sequences of one query
    # among them are read as in decode: in NHD order 1.25 to 1.4 times as fast by token as by head, where those of 2 to
    # 8 queries are at 0.91 to 0.97.
    return found if decode else dataclasses.replace(found, tile_kv=256, split_tokens=2048)


def _decode_variant(spec: AttentionSpec, layout: CacheLayout) -> CppVariant:
    # Groups of more than 4 are bound by arithmetic: a row of V is loaded once for them all, 1.05 (MLA 1.15). A group of
    # 4 would be at 0.93 and float32 at 0.97, since memory waits.
    many = spec.group > 4 and spec.kv_dtype != torch.float32
    rows = 8 if many else 2
    if layout.order == "HND" or spec.num_kv_heads == 1:
        # 8 streams of 128 tokens, heads in turn: 1.2 over 4 of 64 by one head. int4, which waits less, in 256: 1.03 to
        # 1.08, and rows of 64 elements, as many bytes as 128 of 128: 1.0 to 1.07. Large groups have 4 streams, 1.0 to
        # 1.25, most in blocks of 256.
        tile_kv = 256 if spec.kv_dtype == INT4 or (spec.head_dim <= 64 and not many) else 128
        # Small blocks have a stream each: 1.03 to 1.1 of 2 to 8 tokens. Blocks of one token are strewn anyway; larger
        # groups and single heads mind the many tiles (0.8 to 1).
        if not many and spec.num_kv_heads > 1 and spec.kv_dtype.itemsize > 1 and layout.block_size > 1:
            tile_kv = min(tile_kv, 1 << (8 * layout.block_size - 1).bit_length())
        return CppVariant(tile_kv=tile_kv, streams=4 if many else 8, heads_together=8, rows_together=rows)
    heads = all_heads(spec.num_kv_heads)  # 32 KV heads together: 1.1 to 1.5 over 8 at a time
    if spec.kv_dtype in (torch.bfloat16, torch.float32):
        token_bytes = min(spec.num_kv_heads, heads) * spec.head_dim * spec.kv_dtype.itemsize
        # By head are faster: large groups, whose sums would leave the L1 by token (1.1 to 1.3), and tokens of few bytes
        # (2 heads of 64: 1.0 to 1.2). 8 streams that lie in one block are at 0.55 to 0.7, 4 are not.
        if many or token_bytes < 384:
            return CppVariant(tile_kv=64, streams=4, heads_together=heads, rows_together=rows, prefetch_ahead=2)
        # A head's rows are strewn: by token 1.3, 1.0 to 1.4 in rows of 64 elements. Items of 1024 tokens, so that one
        # sequence of 2048 has one for each of 2 threads with all its heads (where memory is fast 1.7 over half of the
        # heads each); an item costs 4 us, and large batches are 1.01 to 1.07 over items of 512. A row of V is loaded
        # once here as well, 1.0 to 1.08. What is 16 KiB ahead is prefetched: of 4 heads of 128 1.07 over half of it,
        # of 2 1.15 over a quarter.
        return CppVariant(
            tile_kv=128, streams=8, heads_together=heads, rows_together=4, read_order="token", split_tokens=1024,
            prefetch_ahead=min(4, 1 << max(0, -(-2048 // token_bytes) - 1).bit_length()),
        )  # fmt: skip
    # What must be converted wants a head's whole tiles. int8 is multiplied as it is: 8 streams are 1.01 to 1.36 over 4
    # (0.88 for one sequence of 512 tokens).
    streams = 8 if spec.kv_dtype == torch.int8 else 4
    return CppVariant(tile_kv=128, streams=streams, heads_together=heads, rows_together=rows, prefetch_ahead=2)


@functools.cache
def _toolchain() -> tuple[ctypes.CDLL, str] | CompileError:
    """The library of cache operations and the compiler's version, or why there is none. Compiling it (once a
    machine) shows that the compiler knows C++20 and OpenMP and makes something that loads."""
    try:
        library = cpp_build.load(cpp.render_cache_ops(), "write_kv, copy_blocks and merge_states")
        version = _maker()
    except CompileError as error:
        return error
    for function in (library.pagegen_write_kv, library.pagegen_copy_blocks, library.pagegen_merge_states):
        function.argtypes = [ctypes.c_char_p]
        function.restype = None
    return library, version


def _maker() -> str:
    """The version of the compiler here, or where none runs of the one that made the artefacts in use."""
    try:
        return cpp_build.find_compiler().version
    except CompileError:
        made_by = artefacts.compiler()
        if made_by is None:
            raise
        return made_by


def forget() -> None:
    """Asks for the compiler and the library of cache operations again when next needed: artefacts came or went."""
    _toolchain.cache_clear()


def compiler() -> str | None:
    """The version of the C++ compiler that compiles the kernels, or compiled those that were shipped to a machine
    without one; None when there is neither."""
    toolchain = _toolchain()
    return None if isinstance(toolchain, CompileError) else toolchain[1]


def compiler_fault() -> str | None:
    """Why no C++ compiler works here and what to install, or None when one does, or artefacts serve in its place."""
    toolchain = _toolchain()
    return toolchain.detail if isinstance(toolchain, CompileError) else None


def library() -> ctypes.CDLL:
    """The compiled cache operations. Raises CompileError where no compiler works."""
    toolchain = _toolchain()
    if isinstance(toolchain, CompileError):
        raise toolchain
    return toolchain[0]
