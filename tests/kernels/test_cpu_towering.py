"""Integer caches on CPUs where one weight or one channel of q towers over the others, and bits that must not move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pagegen
from pagegen.modifiers import mask_mod
from pagegen.targets import cpu

LARGEST = {"int8": 127, "int4": 7}
QUERIES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    if cpu.compiler() is None:
        pytest.skip("no compiler")


def stored(values: Tensor, kv_dtype: str) -> Tensor:
    """int8 values [..., D] as a cache holds them: int4 two a byte, the low nibble first."""
    if kv_dtype == "int8":
        return values.to(torch.int8)
    nibbles = values.to(torch.int64) & 15
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).to(torch.uint8)


def relative_error(q: Tensor, k: Tensor, v: Tensor, kv_dtype: str, **options: Any) -> float:
    """Of one sequence over caches [num_blocks, 16, Hkv, D] of integers, against float64, by norms."""
    blocks = k.shape[0]
    operands = (
        stored(k, kv_dtype),
        stored(v, kv_dtype),
        torch.arange(blocks, dtype=torch.int32)[None],
        torch.tensor([16 * blocks], dtype=torch.int32),
    )
    options = {"kv_dtype": kv_dtype, "scale": 1.0, "v_scale": torch.tensor(0.01), **options}
    out = pagegen.paged_attention(q, *operands, **options)
    exact = pagegen.reference_attention(q.double(), *operands, **options)
    assert isinstance(out, Tensor) and isinstance(exact, Tensor)
    return float((out.double() - exact).norm() / exact.norm())


def test_a_score_of_small_keys_keeps_its_digits_where_all_of_q_has_one_sign() -> None:
    """What making keys unsigned adds is then a thousand times the score: float32 would keep three digits of it."""
    torch.manual_seed(0)
    q, k_scale = 0.9 + 0.1 * torch.rand(1, 4, 256), 10.0
    k = torch.zeros(32, 16, 1, 256, dtype=torch.int8)
    tokens = k.view(512, 256)
    tokens[torch.arange(512), torch.randint(0, 256, (512,))] = (torch.randint(0, 2, (512,)) * 2 - 1).to(torch.int8)
    operands = (k, k, torch.arange(32, dtype=torch.int32)[None], torch.tensor([512], dtype=torch.int32))
    options = {"kv_dtype": "int8", "scale": 1.0, "k_scale": torch.tensor(k_scale), "v_scale": torch.tensor(1.0)}
    _, lse = pagegen.paged_attention(q.bfloat16(), *operands, return_lse=True, **options)
    _, exact = pagegen.reference_attention(q.bfloat16().double(), *operands, return_lse=True, **options)
    assert (lse - exact).abs().max() < 2 * k_scale / 65024  # the bound of templates/bytes.hpp, and what float32 rounds


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("q_dtype", QUERIES)
@pytest.mark.parametrize("blocks", [4, 40])
def test_small_weights_beside_an_attention_sink_without_a_value_keep_their_digits(
    kv_dtype: str, q_dtype: torch.dtype, blocks: int
) -> None:
    largest = LARGEST[kv_dtype]
    torch.manual_seed(0)
    q = torch.zeros(1, 8, 128, dtype=q_dtype)
    q[..., 0] = 1
    k = torch.zeros(blocks, 16, 2, 128)
    k[0, 0, :, 0] = largest  # the first token has a logit of 10, all others 0, and its value is 0
    v = torch.randint(-largest, largest + 1, k.shape)
    v[0, 0] = 0
    assert relative_error(q, k, v, kv_dtype, k_scale=torch.tensor(10 / largest)) < 0.01


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("every", [4, 9, 32])
@pytest.mark.parametrize("gap", [6.0, 8.0, 10.0, 12.0])
def test_so_do_small_weights_beside_several(kv_dtype: str, every: int, gap: float) -> None:
    largest = LARGEST[kv_dtype]
    torch.manual_seed(0)
    q = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    q[..., 0] = 1
    k = torch.zeros(8, 16, 2, 128)
    k.view(128, 2, 128)[::every, :, 0] = largest
    v = torch.randint(-largest, largest + 1, k.shape)
    v.view(128, 2, 128)[::every] = 0
    assert relative_error(q, k, v, kv_dtype, k_scale=torch.tensor(gap / largest)) < 0.01


@pytest.mark.parametrize("zeros_scale", [1e2, 1e3, 1e4, 1e5])
def test_rows_of_zeros_with_a_scale_of_their_own_cost_the_others_no_digits(zeros_scale: float) -> None:
    torch.manual_seed(0)
    v = torch.randint(-127, 128, (8, 16, 1, 128))
    v_scale = torch.ones(8, 16, 1)
    v.view(128, 128)[::8], v_scale.view(128)[::8] = 0, zeros_scale
    options = {"k_scale": torch.ones(8, 16, 1), "v_scale": v_scale}
    q = torch.randn(1, 4, 128).bfloat16()
    assert relative_error(q, torch.zeros(8, 16, 1, 128), v, "int8", **options) < 0.01


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("q_dtype", QUERIES)
@pytest.mark.parametrize("outlier", [300.0, 30000.0])
def test_channels_of_q_beside_a_towering_one_keep_their_digits(
    kv_dtype: str, q_dtype: torch.dtype, outlier: float
) -> None:
    largest = LARGEST[kv_dtype]
    torch.manual_seed(1)
    q = 2 * torch.randn(1, 8, 128)
    q[..., 5] = outlier
    k = torch.randint(-largest, largest + 1, (20, 16, 2, 128))
    k[..., 5] = 0
    v = torch.randint(-largest, largest + 1, k.shape)
    scale = torch.tensor(0.1 / largest)
    assert relative_error(q.to(q_dtype), k, v, kv_dtype, k_scale=scale) < 0.01


def test_tiny_and_huge_scales_do_not_overflow() -> None:
    torch.manual_seed(2)
    k, v = (torch.randint(-127, 128, (6, 16, 2, 128)) for _ in range(2))
    q = torch.randn(1, 8, 128).bfloat16()
    for v_scale in (1e-33, -1e-30, 1e30):
        options = {"k_scale": torch.tensor(1e-3), "v_scale": torch.full((6, 16, 2), v_scale)}
        assert relative_error(q, k, v, "int8", **options) < 0.01


@mask_mod
def odd_heads_skip(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return (head % 2 == 0) | (k_pos % 3 != 0)


def test_a_mask_that_differs_by_head_gives_the_same_bits_on_any_number_of_threads_and_in_any_batch() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(1, 4, 128), torch.randn(188, 16, 4, 128), torch.randn(188, 16, 4, 128)
    table, lengths = torch.arange(188, dtype=torch.int32)[None], torch.tensor([3000], dtype=torch.int32)

    def attend(copies: int) -> Tensor:
        operands = (q.repeat(copies, 1, 1), k, v, table.repeat(copies, 1), lengths.repeat(copies))
        out = pagegen.paged_attention(*operands, mask_mod=odd_heads_skip, batch_invariant=True)
        assert isinstance(out, Tensor)
        return out

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = attend(1)
        torch.set_num_threads(2)
        assert torch.equal(attend(1), alone)
        assert torch.equal(attend(8)[7:], alone)
    finally:
        torch.set_num_threads(threads)
