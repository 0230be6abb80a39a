"""Which C++ variant serves where nothing was tuned: the choices, so that none changes by accident."""

from __future__ import annotations

import pytest
import torch

from pagegen.spec import AttentionSpec, CacheLayout
from pagegen.targets import cpu

# heads, group, head_dim, cache, block size, order -> tile, streams, heads and rows together, order of reading
CHOSEN = {
    (8, 4, 128, "bfloat16", 16, "HND"): (128, 8, 8, 2, "head"),
    (8, 4, 128, "bfloat16", 8, "HND"): (64, 8, 8, 2, "head"),
    (8, 4, 128, "bfloat16", 12, "HND"): (128, 8, 8, 2, "head"),
    (8, 4, 128, "float32", 2, "HND"): (16, 8, 8, 2, "head"),
    (8, 4, 128, "bfloat16", 1, "HND"): (128, 8, 8, 2, "head"),
    (8, 4, 128, "int8", 8, "HND"): (128, 8, 8, 2, "head"),
    (8, 4, 128, "int4", 16, "HND"): (256, 8, 8, 2, "head"),
    (4, 8, 128, "bfloat16", 8, "HND"): (128, 4, 8, 8, "head"),
    (8, 4, 64, "bfloat16", 16, "HND"): (128, 8, 8, 2, "head"),
    (8, 4, 64, "bfloat16", 32, "HND"): (256, 8, 8, 2, "head"),
    (8, 4, 64, "int8", 16, "HND"): (256, 8, 8, 2, "head"),
    (4, 8, 64, "bfloat16", 32, "HND"): (128, 4, 8, 8, "head"),
    (1, 4, 128, "bfloat16", 8, "NHD"): (128, 8, 8, 2, "head"),
    (8, 4, 128, "bfloat16", 16, "NHD"): (128, 8, 8, 4, "token"),
    (32, 1, 128, "float32", 16, "NHD"): (128, 8, 32, 4, "token"),
    (4, 8, 128, "bfloat16", 16, "NHD"): (64, 4, 8, 8, "head"),
    (8, 4, 64, "bfloat16", 16, "NHD"): (128, 8, 8, 4, "token"),
    (2, 4, 64, "bfloat16", 16, "NHD"): (64, 4, 8, 2, "head"),
    (8, 4, 128, "float8_e4m3fn", 16, "NHD"): (128, 4, 8, 2, "head"),
    (8, 4, 128, "int8", 16, "NHD"): (128, 8, 8, 2, "head"),
}


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: "-".join(map(str, case)))
def test_the_variant_chosen_without_tuning(case: tuple[int, int, int, str, int, str]) -> None:
    heads, group, dim, stored, block_size, order = case
    q_dtype = torch.float32 if stored == "float32" else torch.bfloat16
    spec = AttentionSpec(
        num_q_heads=heads * group, num_kv_heads=heads, head_dim=dim, q_dtype=q_dtype, kv_dtype=stored,  # type: ignore[arg-type]
    )  # fmt: skip
    layout = CacheLayout(block_size=block_size, order=order)
    decode, mixed = (cpu.default_variant(spec, layout, decode=each) for each in (True, False))
    found = decode.tile_kv, decode.streams, decode.heads_together, decode.rows_together, decode.read_order
    assert found == CHOSEN[case]
    # a mixed batch's sequences of one query are read as in decode, in the tiles that prompts want
    assert (mixed.tile_kv, mixed.split_tokens) == (256, 2048)
    assert (mixed.streams, mixed.heads_together, mixed.rows_together, mixed.read_order) == found[1:]


@pytest.mark.parametrize(("heads", "dim", "ahead"), [(8, 128, 1), (12, 64, 2), (8, 64, 2), (4, 64, 4), (3, 64, 4)])
def test_by_token_16_kib_ahead_are_prefetched(heads: int, dim: int, ahead: int) -> None:
    spec = AttentionSpec(num_q_heads=heads, num_kv_heads=heads, head_dim=dim)
    chosen = cpu.default_variant(spec, CacheLayout(block_size=16), decode=True)
    assert (chosen.read_order, chosen.prefetch_ahead) == ("token", ahead)


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("decode", [True, False])
def test_every_block_size_has_a_variant(order: str, decode: bool) -> None:
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    for block_size in range(1, 301):
        cpu.default_variant(spec, CacheLayout(block_size=block_size, order=order), decode=decode)
