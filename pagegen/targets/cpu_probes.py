"""What this CPU's memory and arithmetic can give: limits to hold kernels against (templates/probes.hpp).

Three limits: `read` reads memory front to back; `Walk` reads the blocks of a paged cache in the order a decode kernel
takes them, which is slower where runs are short; `peak_gflops` multiplies and adds what lies in registers.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pagegen.codegen import cpp
from pagegen.targets import cpp_build

PEAKS = ("float32", "bfloat16", "int8")
# struct pagegen_walk_args of templates/probes.hpp: K and V, two addresses, sizes.
_WALK_ARGS = struct.Struct("@" + "Q4q" * 2 + "2Q10q")


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled probes. Raises CompileError where no compiler works."""
    found = cpp_build.load(cpp.render_probes(), "probes of memory and arithmetic")
    found.pagegen_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    found.pagegen_read.restype = ctypes.c_uint32
    found.pagegen_walk.argtypes = [ctypes.c_char_p]
    found.pagegen_walk.restype = ctypes.c_uint32
    found.pagegen_peak_flops.argtypes = [ctypes.c_int64]
    found.pagegen_peak_flops.restype = ctypes.c_int64
    found.pagegen_peak.argtypes = [ctypes.c_int64] * 3
    found.pagegen_peak.restype = ctypes.c_double
    return found


def read(memory: Tensor, threads: int | None = None) -> int:
    """Reads a contiguous tensor (whole lines of 64 bytes of it) front to back on `threads` threads, those of torch by
    default, and returns the sum of its 32-bit words modulo 2^32. Raises CompileError where no compiler works."""
    if not memory.is_contiguous():
        raise ValueError(f"memory must be contiguous, got strides {memory.stride()} for shape {tuple(memory.shape)}")
    return int(library().pagegen_read(memory.data_ptr(), memory.nbytes // 64 * 64, _threads(threads)))


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How a cache's blocks are read, as a decode kernel's constants say: `tile` tokens of one head at a time, `streams`
    places of it side by side, `ahead` (tile, head) units asked into L2 before their turn, `heads` heads in turn by one
    item, which covers `split` tokens."""

    tile: int = 64
    streams: int = 4
    ahead: int = 1
    heads: int = 1
    split: int = 2048

    def __post_init__(self) -> None:
        if min(self.tile, self.streams, self.heads, self.split) < 1 or self.tile % self.streams:
            raise ValueError(f"streams must divide tile, and all be at least 1, got {self}")
        if self.split % self.tile:
            raise ValueError(f"split must be a multiple of tile {self.tile}, got {self.split}")
        if not 0 <= self.ahead <= 8:
            raise ValueError(f"ahead must be 0 to 8, got {self.ahead}")

    def arguments(
        self, k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, seq_lens: Tensor, threads: int | None = None
    ) -> bytes:
        """The packed arguments of a walk over caches [num_blocks, block_size, Hkv, D], any strides but a last one of
        1, through `block_table` int32 [num_seqs, max_blocks]. The tensors must outlive them."""
        return _WALK_ARGS.pack(
            *_rows(k_cache),
            *(_rows(v_cache) if v_cache is not None else (0,) * 5),
            block_table.data_ptr(),
            seq_lens.data_ptr(),
            block_table.stride(0),
            seq_lens.shape[0],
            k_cache.shape[2],
            k_cache.shape[1],
            self.tile,
            self.streams,
            self.ahead,
            min(self.heads, k_cache.shape[2]),
            self.split,
            _threads(threads),
        )

    def __call__(
        self, k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, seq_lens: Tensor, threads: int | None = None
    ) -> int:
        """Reads K and V (None: K alone) of all sequences once; returns the sum of their 32-bit words modulo 2^32.
        Raises CompileError where no compiler works."""
        return walk(self.arguments(k_cache, v_cache, block_table, seq_lens, threads))


def walk(arguments: bytes) -> int:
    """Reads what `Walk.arguments` packed and returns the sum of its 32-bit words modulo 2^32, without packing anew: a
    short walk takes as long. Raises CompileError where no compiler works."""
    return int(library().pagegen_walk(arguments))


def peak_gflops(kind: str = "float32", threads: int | None = None, seconds: float = 0.05) -> float:
    """The best rate of several runs of multiply-adds (two operations each) that wait for nothing: "float32", "bfloat16"
    pairs summed in float32, or four "int8" summed in int32; 0 where the CPU has no instruction for those. Raises
    CompileError."""
    if kind not in PEAKS:
        raise ValueError(f"kind must be one of {', '.join(PEAKS)}, got {kind!r}")
    found, code, threads = library(), PEAKS.index(kind), _threads(threads)
    flops = found.pagegen_peak_flops(code)
    if flops == 0:
        return 0.0
    turns, best, end = 1 << 16, 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        start = time.perf_counter()
        found.pagegen_peak(code, turns, threads)
        best = max(best, flops * turns * threads / (time.perf_counter() - start) / 1e9)
    return best


def _rows(cache: Tensor) -> tuple[int, ...]:
    size = cache.element_size()
    row = cache.shape[3] * size
    if row % 4 or cache.stride(3) != 1:
        raise ValueError(f"a cache's rows must be contiguous and whole 32-bit words, got {tuple(cache.shape)}")
    return (cache.data_ptr(), *(stride * size for stride in cache.stride()[:3]), row)


def _threads(threads: int | None) -> int:
    return torch.get_num_threads() if threads is None else threads
