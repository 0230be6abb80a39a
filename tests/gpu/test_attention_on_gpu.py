"""The generated kernels on a real GPU against the float64 reference, through the operator and in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import compare, make_batch

import pagegen
from pagegen.spec import AttentionSpec, CacheLayout

pytestmark = pytest.mark.gpu
DECODE = [(0, 1), (1, 1), (37, 1), (1500, 1), (4096, 1)]
RAGGED = [(200, 200), (0, 0), (33, 1), (800, 90), (5, 7)]
SPECS: dict[str, dict[str, Any]] = {
    "llama": {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "smollm": {"num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64, "q_dtype": "float16"},
    "head-80": {"num_q_heads": 7, "num_kv_heads": 1, "head_dim": 80, "q_dtype": "float32"},
    "everything": {
        "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 256, "window": 300, "logit_softcap": 30.0, "alibi": True,
        "sinks": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("block_size", [1, 16, 24, 64, 256])
@pytest.mark.parametrize("sequences", [DECODE, RAGGED], ids=["decode", "ragged"])
@pytest.mark.parametrize("name", SPECS)
def test_the_operator_equals_the_reference_on_the_gpu(
    name: str, sequences: list[tuple[int, int]], block_size: int
) -> None:
    spec = AttentionSpec(**SPECS[name])
    batch = make_batch(spec, sequences, block_size=block_size, device="cuda")
    out, lse = pagegen.paged_attention(**batch.kwargs(), return_lse=True)
    compare(out, lse, *batch.expected(), spec.q_dtype)


def test_a_captured_decode_step_replays_on_new_lengths() -> None:
    spec = AttentionSpec(**SPECS["llama"])
    pagegen.prepare(spec, CacheLayout(block_size=16))
    batch = make_batch(spec, DECODE, block_size=16, device="cuda")
    expected, _ = batch.expected()
    lengths = batch.seq_lens.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pagegen.paged_attention(**batch.kwargs())
    batch.seq_lens.zero_()
    graph.replay()
    assert not out.any()
    batch.seq_lens.copy_(lengths)
    graph.replay()
    compare(out, None, expected, expected, spec.q_dtype)
