"""What a call fixes about the Triton kernel that serves it: offsets of 32 or 64 bits, float8 as numbers or bits."""

from __future__ import annotations

import pytest
import torch

from pagegen.codegen import triton
from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant
from pagegen.targets.call import AttentionCall
from pagegen.targets.triton_launch import form_of

SM_90 = Target.parse("sm_90")


def call(
    *, num_blocks: int = 100, block_size: int = 16, dim: int = 128, total_q: int = 4, q_stride: int | None = None,
    block_stride: int | None = None, max_seq_len: int = 64,
) -> AttentionCall:  # fmt: skip
    """A call of 8 query heads on one KV head, without memory."""
    block = block_stride or block_size * dim
    k = torch.empty_strided((num_blocks, block_size, 1, dim), (block, dim, dim, 1), device="meta")
    q = torch.empty_strided((total_q, 8, dim), (q_stride or 8 * dim, dim, 1), device="meta")
    table = torch.empty((total_q, 4), dtype=torch.int32, device="meta")
    return AttentionCall(
        q=q, k_cache=k, v_cache=k, block_table=table, seq_lens=table[:, 0], query_start_loc=None, max_query_len=1,
        max_seq_len=max_seq_len, scale=1.0, alibi_slopes=None, sinks=None, out=torch.empty_like(q), lse=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "variant", "wide"),
    [
        ({}, TritonVariant(), False),
        ({"num_blocks": 7767, "block_size": 480, "dim": 576}, TritonVariant(), True),
        ({"num_blocks": 7000, "block_size": 480, "dim": 576}, TritonVariant(), False),
        ({"total_q": 262_145, "q_stride": 8192}, TritonVariant(), True),
        ({"num_blocks": 4564, "block_stride": 1_435_968}, TritonVariant(), True),
        ({"num_blocks": 20_000, "block_stride": 133_120}, TritonVariant(), True),
        ({"total_q": 300_000}, TritonVariant(num_splits=8), True),  # partial results
        ({"total_q": 10_000, "max_seq_len": 131_072}, TritonVariant(tile_kv=64, split_tokens=256), True),
        ({"total_q": 10_000, "max_seq_len": 1024}, TritonVariant(tile_kv=64, split_tokens=256), False),
    ],
)
def test_offsets_are_of_64_bits_exactly_where_some_tensor_may_need_them(
    given: dict[str, int], variant: TritonVariant, wide: bool
) -> None:
    assert form_of(call(**given), variant, SM_90).wide is wide


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "ragged"])
def test_a_small_caches_kernel_has_no_64_bit_arithmetic(decode: bool) -> None:
    spec, layout = AttentionSpec.from_model("llama-3.1-8b"), CacheLayout(block_size=16)
    small, large = (
        triton.render_attention(spec, layout, TritonVariant(num_splits=4), triton.Form(decode=decode, wide=wide))
        for wide in (False, True)
    )
    assert "int64" not in small
    for widened in ("blocks.to(tl.int64)", "token.to(tl.int64)", "seq.to(tl.int64) * stride_table_seq"):
        assert widened in large


@pytest.mark.parametrize(("target", "storage"), [("sm_80", "e4m3"), ("sm_89", "convert"), ("gfx942", "e4m3")])
def test_float8_is_decoded_from_bits_where_the_hardware_lacks_it(target: str, storage: str) -> None:
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=1, head_dim=128, kv_dtype="float8_e4m3fn")
    form = form_of(call(), TritonVariant(), Target.parse(target))
    assert triton.bindings(spec, CacheLayout(block_size=16), TritonVariant(), form)["STORAGE"] == storage
