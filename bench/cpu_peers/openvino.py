"""OpenVINO's PagedAttention operation alone, as its model runtime builds it into language models.

The call also stores one token's keys and values a sequence, as its interface demands, which is nothing beside reading
the cache. Blocks are of 32 tokens, the only size its CPU plugin takes.
"""

from __future__ import annotations

from typing import Any

import torch

from cpu_peers.cell import Cell, Given, Prepared, Unsupported, memory, paged, queries, tables

BLOCK = 32
_PRECISION = {"bfloat16": "bf16", "float32": "f32"}


def version() -> str:
    import openvino

    return str(openvino.__version__)


def prepare(cell: Cell, sets: int, content: Given | None) -> Prepared:
    import openvino as ov

    if cell.dtype not in _PRECISION:
        raise Unsupported(f"not driven in {cell.dtype}")
    table = tables(cell, sets, BLOCK)
    shape = (table.numel(), cell.num_kv_heads, BLOCK, cell.head_dim)
    tokens = cell.batch * cell.new
    if content is None:
        k_cache, v_cache = memory(shape, cell.torch_dtype), memory(shape, cell.torch_dtype)
        k_new, v_new = (torch.randn(tokens, cell.num_kv_heads * cell.head_dim) for _ in range(2))
    else:
        k_cache, v_cache = (t.transpose(1, 2).contiguous() for t in paged(cell, content, table[0], BLOCK))
        k_new, v_new = (t[:, -cell.new :].float().reshape(tokens, -1) for t in (content.k, content.v))
    request = ov.Core().compile_model(
        _model(cell), "CPU",
        {
            "INFERENCE_PRECISION_HINT": _PRECISION[cell.dtype], "KV_CACHE_PRECISION": _PRECISION[cell.dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(), "ENABLE_CPU_PINNING": False,
        },
    ).create_infer_request()  # fmt: skip
    starts = torch.arange(cell.batch + 1, dtype=torch.int32)
    inputs = {
        "query": queries(cell, content).float().reshape(tokens, -1), "key": k_new, "value": v_new, "key_cache": k_cache,
        "value_cache": v_cache, "past_lens": torch.full((cell.batch,), cell.context - cell.new, dtype=torch.int32),
        "subsequence_begins": starts * cell.new, "block_indices_begins": starts * table.shape[2],
    }  # fmt: skip
    owners = {name: _tensor(ov, t.contiguous()) for name, t in inputs.items()}
    blocks = [_tensor(ov, t.flatten().contiguous()) for t in table]
    owners["max_context_len"] = _tensor(ov, torch.tensor(cell.context, dtype=torch.int32))
    for name, (tensor, _) in owners.items():
        request.set_tensor(name, tensor)

    def run(i: int) -> None:
        request.set_tensor("block_indices", blocks[i % sets][0])
        request.infer()

    def output() -> torch.Tensor:
        return torch.from_numpy(request.get_output_tensor(0).data.copy()).view(cell.batch, cell.new, -1, cell.head_dim)

    return Prepared(run, output, f"blocks of {BLOCK}", (owners, blocks))


def _tensor(ov: Any, t: torch.Tensor) -> tuple[Any, Any]:
    """The operation's view of a tensor, and what it is a view of."""
    if t.dtype == torch.bfloat16:
        array = t.view(torch.uint16).numpy()
        return ov.Tensor(array, ov.Shape(list(t.shape)), ov.Type.bf16), (array, t)
    array = t.numpy()
    return ov.Tensor(array, shared_memory=True), (array, t)


def _model(cell: Cell) -> Any:
    """The operation with its 28 inputs, of which attention without compression, windows or rotation uses ten."""
    import numpy as np
    import openvino as ov
    import openvino.opset13 as ops
    from openvino.op import _PagedAttentionExtension

    def parameter(name: str, shape: list[int], kind: Any) -> Any:
        made = ops.parameter(ov.PartialShape(shape), kind)
        made.set_friendly_name(name)
        made.output(0).get_tensor().set_names({name})
        return made

    def nothing(kind: Any) -> Any:
        return ops.constant(np.zeros(0, kind))

    f32, i32 = ov.Type.f32, ov.Type.i32
    heads, d = cell.num_kv_heads, cell.head_dim
    parameters = [
        parameter("query", [-1, cell.num_q_heads * d], f32), parameter("key", [-1, heads * d], f32),
        parameter("value", [-1, heads * d], f32), parameter("key_cache", [-1, heads, -1, d], ov.Type.dynamic),
        parameter("value_cache", [-1, heads, -1, d], ov.Type.dynamic), parameter("past_lens", [-1], i32),
        parameter("subsequence_begins", [-1], i32), parameter("block_indices", [-1], i32),
        parameter("block_indices_begins", [-1], i32),
    ]  # fmt: skip
    longest = parameter("max_context_len", [], i32)
    one, zero = np.float32(d**-0.5), np.int32(0)
    inputs = [
        *parameters, ops.constant(one), ops.constant(zero), nothing(np.float32), longest, nothing(np.int32),
        nothing(np.int32), nothing(np.int32), nothing(np.float32), nothing(np.float32), ops.constant(np.int32(64)),
        ops.constant(np.int32(8)), nothing(np.float32), ops.constant(zero), nothing(np.int32), nothing(np.int32),
        nothing(np.int32), nothing(np.int32), nothing(np.uint8), nothing(np.int32),
    ]  # fmt: skip
    operation = _PagedAttentionExtension([node.output(0) for node in inputs])
    info = operation.get_rt_info()
    for name, value in (("k_head_size", d), ("num_k_heads", heads), ("v_head_size", d), ("num_v_heads", heads)):
        info[name] = value
    return ov.Model([ops.result(operation.output(0))], [*parameters, longest], "attention")
