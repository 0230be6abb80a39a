"""ggml's flash attention over contiguous keys and values; the ggml-python sdist, built here for this CPU.

A bfloat16 cell keeps K and V in float16, which ggml is faster with and which llama.cpp's cache holds by default.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from typing import Any

import torch

from cpu_peers.cell import Cell, Given, Prepared, causal, dense, queries


def version() -> str:
    import ggml  # noqa: F401

    return f"{importlib.metadata.version('ggml-python')} (ggml-python, built for this CPU)"


def prepare(cell: Cell, sets: int, content: Given | None) -> Prepared:
    import ggml

    dtype = torch.float32 if cell.dtype == "float32" else torch.float16
    k, v = dense(cell, sets, content, dtype)
    q = queries(cell, content).float().transpose(1, 2).contiguous()
    out = torch.empty(cell.batch, cell.new, cell.num_q_heads, cell.head_dim)
    mask = None
    if cell.new > 1:
        seen = causal(cell)
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf")).to(torch.float16)
    graphs = [_Graph(ggml, cell, q, k[i], v[i], mask, out) for i in range(sets)]
    pool = _threads(ggml)

    def run(i: int) -> None:
        graphs[i % sets].compute(pool)

    return Prepared(run, lambda: out, "float16" if cell.dtype == "bfloat16" else "", (q, k, v, mask))


def _threads(ggml: Any) -> Any:
    """Threads that wait asleep, kept from call to call."""
    params = ggml.ggml_threadpool_params_default(torch.get_num_threads())
    params.poll = 0
    return ggml.ggml_threadpool_new(ctypes.byref(params))


class _Graph:
    """One operation over tensors that torch owns."""

    def __init__(self, ggml: Any, cell: Cell, q: Any, k: Any, v: Any, mask: Any, out: Any) -> None:
        self._ggml = ggml
        overhead = ggml.ggml_tensor_overhead() * 16 + ggml.ggml_graph_overhead()
        self._context = ggml.ggml_init(ggml.ggml_init_params(mem_size=overhead, mem_buffer=None, no_alloc=True))
        kind = ggml.GGML_TYPE_F32 if k.dtype == torch.float32 else ggml.GGML_TYPE_F16
        d, heads = cell.head_dim, cell.num_kv_heads
        tensors = (
            self._tensor(q, ggml.GGML_TYPE_F32, d, cell.new, cell.num_q_heads, cell.batch),
            self._tensor(k, kind, d, cell.context, heads, cell.batch),
            self._tensor(v, kind, d, cell.context, heads, cell.batch),
            None if mask is None else self._tensor(mask, ggml.GGML_TYPE_F16, cell.context, cell.new, 1, 1),
        )
        result = ggml.ggml_flash_attn_ext(self._context, *tensors, d**-0.5, 0.0, 0.0)
        result.contents.data = out.data_ptr()
        self._graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(self._graph, result)
        self._work: Any = None
        self._plan: Any = None

    def _tensor(self, t: torch.Tensor, kind: int, *sizes: int) -> Any:
        made = self._ggml.ggml_new_tensor_4d(self._context, kind, *sizes)
        made.contents.data = t.data_ptr()
        return made

    def compute(self, pool: Any) -> None:
        if self._plan is None:
            self._plan = self._ggml.ggml_graph_plan(self._graph, torch.get_num_threads(), pool)
            self._work = (ctypes.c_uint8 * max(1, self._plan.work_size))()
            self._plan.work_data = ctypes.cast(self._work, ctypes.POINTER(ctypes.c_uint8))
        status = self._ggml.ggml_graph_compute(self._graph, ctypes.byref(self._plan))
        if status:
            raise RuntimeError(f"ggml_graph_compute returned {status}")

    def __del__(self) -> None:
        self._ggml.ggml_free(self._context)
