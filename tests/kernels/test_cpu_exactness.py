"""How exact the C++ kernels are, next to PyTorch's own attention, and that nothing around a row changes its bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import Batch
from cpu_cases import SHORT, TOKENS, Case, prebuild, run, same_bits
from torch import Tensor

QUANTISED: dict[str, Any] = {"kv_scale_granularity": "token_head"}
EXACT = [
    Case("bf16", 4, 128, 16),
    Case("bf16-splits", 4, 64, 16, variant=SHORT),
    Case("bf16-tokens", 4, 80, 16, variant=TOKENS, kv_heads=5),
    Case("fp16", 4, 128, 16, "HND", "float16"),
    Case("fp32", 3, 64, 16, dtype="float32"),
    Case("fp32-panel", 16, 128, 24, "HND", "float32"),
]
INVARIANT = [
    Case("plain", 4, 128, 16, variant=SHORT, kv_heads=3),
    Case("tokens", 4, 80, 16, variant=TOKENS, kv_heads=5),
    Case("panel", 16, 96, 24, "HND"),
    Case("features", 4, 64, 16, fields={"window": 90, "logit_softcap": 20.0, "alibi": True, "sinks": True}),
    Case("both-ways", 4, 64, 16, "HND", fields={"causal": False}),
    Case("fp32", 3, 64, 16, dtype="float32"),
    Case("e4m3", 4, 128, 16, variant=SHORT, fields={"kv_dtype": "float8_e4m3fn", **QUANTISED}),
    Case("int4-zero", 8, 128, 16, "HND", fields={"kv_dtype": "int4", "kv_zero_points": True, **QUANTISED}),
    Case("latent", 128, 576, 64, kv_heads=1, fields={"v_head_dim": 512, "shared_kv": True}),
]
SEQUENCES = {
    "decode": [(300, 1), (1, 1), (64, 1), (700, 1), (129, 1)],
    "ragged": [(300, 20), (0, 0), (90, 90), (1000, 3), (7, 1), (129, 64)],
    "tree": [(300, 20), (90, 9), (200, 2)],
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    prebuild([*EXACT, *INVARIANT])


def sdpa(batch: Batch) -> Tensor:
    """The batch's rows by torch's scaled_dot_product_attention, in the batch's dtype."""
    rows, first = [], 0
    for s, (length, queries) in enumerate(batch.sequences):
        blocks = batch.block_table[s, : batch.layout.blocks_for(length)].long()
        assert batch.v_cache is not None
        keys, values = (c[blocks].flatten(0, 1)[:length].transpose(0, 1) for c in (batch.k_cache, batch.v_cache))
        keys, values = (x.repeat_interleave(batch.spec.group, dim=0) for x in (keys, values))
        seen = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
        q = batch.q[first : first + queries].transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=seen, scale=batch.spec.scale
        )
        rows.append(out[0].transpose(0, 1))
        first += queries
    return torch.cat(rows)


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
@pytest.mark.parametrize("sequences", [[(300, 1), (700, 1), (37, 1)], [(300, 20), (200, 200)]], ids=["few", "many"])
def test_error_is_at_most_twice_that_of_torch(case: Case, sequences: list[tuple[int, int]]) -> None:
    ours, theirs = [], []
    for seed in range(5):
        batch = case.batch(sequences, seed=seed, padded_rows=0)
        exact, _ = batch.expected()
        ours.append((run(case.load(), batch)[0].double() - exact).flatten())
        theirs.append((sdpa(batch).double() - exact).flatten())
    own, other = torch.cat(ours), torch.cat(theirs)
    assert own.square().mean().sqrt() <= 2.0 * other.square().mean().sqrt()
    assert own.abs().max() <= 2.0 * other.abs().max()


def alone(batch: Batch, s: int) -> tuple[Batch, slice]:
    """The call with sequence `s` only, and its rows in the whole batch."""
    first = sum(n for _, n in batch.sequences[:s])
    rows = slice(first, first + batch.sequences[s][1])
    starts = None if batch.query_start_loc is None else torch.tensor([0, rows.stop - first], dtype=torch.int32)
    return replace(
        batch, sequences=batch.sequences[s : s + 1], q=batch.q[rows], block_table=batch.block_table[s : s + 1],
        seq_lens=batch.seq_lens[s : s + 1], query_start_loc=starts,
        tree_mask=None if batch.tree_mask is None else batch.tree_mask[rows],
    ), rows  # fmt: skip


@pytest.mark.parametrize("case", INVARIANT, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", SEQUENCES)
def test_row_has_the_same_bits_alone_in_any_place_and_on_any_number_of_threads(case: Case, kind: str) -> None:
    kernel, threads = case.load(), torch.get_num_threads()
    batch = case.batch(SEQUENCES[kind], tree=kind == "tree")
    whole = run(kernel, batch)
    assert same_bits(whole, run(kernel, batch.permuted()))
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert same_bits(whole, run(kernel, batch))
            for s, (_, queries) in enumerate(batch.sequences):
                if queries:
                    single, rows = alone(batch, s)
                    assert same_bits(tuple(x[rows] for x in whole), run(kernel, single))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("case", INVARIANT, ids=lambda case: case.name)
def test_row_has_the_same_bits_in_a_batch_of_another_order(case: Case) -> None:
    batch = case.batch(SEQUENCES["decode"])
    turned = torch.tensor([3, 0, 4, 1, 2])
    other = replace(
        batch, q=batch.q[turned], block_table=batch.block_table[turned], seq_lens=batch.seq_lens[turned],
        sequences=tuple(batch.sequences[i] for i in turned.tolist()),
    )  # fmt: skip
    out, lse = run(case.load(), batch)
    assert same_bits((out[turned], lse[turned]), run(case.load(), other))
