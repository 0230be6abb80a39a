"""ONNX Runtime's GroupQueryAttention over contiguous keys and values.

It appends the step's own tokens in place, as its interface demands. There is no bfloat16 kernel for CPUs: a bfloat16
cell runs in float16, of the same size.
"""

from __future__ import annotations

from typing import Any

import torch

from cpu_peers.cell import Cell, Given, Prepared, Unsupported, dense, queries


def version() -> str:
    import onnx
    import onnxruntime

    return f"{onnxruntime.__version__} (onnx {onnx.__version__})"


def prepare(cell: Cell, sets: int, content: Given | None) -> Prepared:
    import numpy as np

    if cell.new > 1 and cell.new != cell.context and cell.batch > 1:
        raise Unsupported("its kernel takes a prompt's later parts for one sequence at a time")
    dtype = torch.float32 if cell.dtype == "float32" else torch.float16
    session = _session(cell, dtype)
    k, v = dense(cell, sets, content, dtype)
    q = queries(cell, content).to(dtype).reshape(cell.batch, cell.new, -1)
    # the tokens that it appends: those that are there already
    news = [t[0, :, :, -cell.new :].transpose(1, 2).reshape(cell.batch, cell.new, -1).contiguous() for t in (k, v)]
    out = torch.empty_like(q)
    lens = torch.full((cell.batch,), cell.context - 1, dtype=torch.int32)
    total = torch.tensor([cell.context], dtype=torch.int32)
    numbers = np.float32 if dtype == torch.float32 else np.float16
    bindings = []
    for i in range(sets):
        io = session.io_binding()
        inputs = {"query": q, "key": news[0], "value": news[1], "past_key": k[i], "past_value": v[i]}
        for name, t in inputs.items():
            io.bind_input(name, "cpu", 0, numbers, list(t.shape), t.data_ptr())
        for name, t in (("seqlens_k", lens), ("total_seq", total)):
            io.bind_input(name, "cpu", 0, np.int32, list(t.shape), t.data_ptr())
        for name, t in (("out", out), ("present_key", k[i]), ("present_value", v[i])):
            io.bind_output(name, "cpu", 0, numbers, list(t.shape), t.data_ptr())
        bindings.append(io)

    def run(i: int) -> None:
        session.run_with_iobinding(bindings[i % sets])

    note = "float16" if cell.dtype == "bfloat16" else ""
    owners = (q, k, v, news, lens, total)
    return Prepared(run, lambda: out.view(cell.batch, cell.new, cell.num_q_heads, -1), note, owners)


def _session(cell: Cell, dtype: torch.dtype) -> Any:
    import onnxruntime as ort
    from onnx import TensorProto, helper

    kind = TensorProto.FLOAT if dtype == torch.float32 else TensorProto.FLOAT16
    inputs = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_seq"]
    outputs = ["out", "present_key", "present_value"]
    node = helper.make_node(
        "GroupQueryAttention", inputs, outputs, domain="com.microsoft", num_heads=cell.num_q_heads,
        kv_num_heads=cell.num_kv_heads,
    )  # fmt: skip
    d, heads = cell.head_dim, cell.num_kv_heads
    rows = {"query": cell.num_q_heads * d, "key": heads * d, "value": heads * d, "out": cell.num_q_heads * d}
    shapes: dict[str, list[Any]] = {name: ["batch", "new", width] for name, width in rows.items()}
    shapes |= {name: ["batch", heads, "context", d] for name in ("past_key", "past_value", *outputs[1:])}
    shapes |= {"seqlens_k": ["batch"], "total_seq": [1]}

    def info(name: str) -> Any:
        return helper.make_tensor_value_info(
            name, TensorProto.INT32 if name in ("seqlens_k", "total_seq") else kind, shapes[name]
        )

    graph = helper.make_graph([node], "attention", [info(n) for n in inputs], [info(n) for n in outputs])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # others' samples come between
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
