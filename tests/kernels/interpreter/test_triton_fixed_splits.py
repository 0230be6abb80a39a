"""The one-variant kernel that bench/gpu_check.py measures pagegen beside, in Triton's interpreter.

Run with TRITON_INTERPRET=1, in a process of its own: the interpreter replaces triton.jit for the whole process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "bench"))

from gpu_check_bench import fixed_splits, operands  # noqa: E402
from gpu_check_bench.operands import TOLERANCE, Cell  # noqa: E402

from pagegen.spec import AttentionSpec  # noqa: E402


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("group", "dim", "window", "context"), [(4, 32, None, 150), (3, 64, 48, 200), (1, 32, None, 1)]
)
def test_the_kernel_that_engines_ship_gives_the_reference_result(group, dim, window, context, kv_dtype):
    spec = AttentionSpec(num_q_heads=2 * group, num_kv_heads=2, head_dim=dim, window=window, kv_dtype=kv_dtype)
    given = operands.make(Cell(spec=spec, batch=2, context=context), 16, on="cpu", cold_bytes=1 << 18)
    assert len(given.caches) > 1
    k, v = given.caches[0]
    space = fixed_splits.workspace(given.q)
    space[0].fill_(float("nan"))
    fixed_splits.decode(
        given.q, k, v, given.block_table, given.seq_lens, given.out, space, scale=spec.scale, window=window or 0,
        upcast=True,
    )  # fmt: skip
    assert given.error(given.out) < TOLERANCE


def test_caches_of_two_layouts_are_refused():
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32)
    given = operands.make(Cell(spec=spec, batch=1, context=20), 16, on="cpu", cold_bytes=1)
    k, v = given.caches[0]
    other = torch.empty(v.shape[0], v.shape[2], v.shape[1], v.shape[3], dtype=v.dtype).transpose(1, 2)
    with pytest.raises(ValueError, match="one layout"):
        fixed_splits.decode(
            given.q, k, other, given.block_table, given.seq_lens, given.out, fixed_splits.workspace(given.q), scale=1.0
        )
