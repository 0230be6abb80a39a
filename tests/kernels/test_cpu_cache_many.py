"""Writes and copies large enough to go past the CPU's caches, and those of few tokens that threads divide by heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cache_cases import FLOATS, INT4, STORED, caches, name_of, reference_write, same

import pagegen
from pagegen.targets import cpu

pytestmark = pytest.mark.skipif(cpu.compiler() is None, reason="needs a C++ compiler")
# 64 bytes a row in every type from float32 (32 columns) to int4 (128)
SHAPE: dict[str, Any] = {"blocks": 24, "size": 16, "heads": 4, "dims": 128, "v_dims": 64}


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def slots_of(kind: str, count: int) -> torch.Tensor:
    """Slots of 24 blocks of 16: in order from the middle of a block on, strewn, or in order with gaps and holes."""
    if kind == "in order":
        return torch.arange(5, 5 + count)
    if kind == "strewn":
        return torch.randperm(24 * 16, generator=torch.Generator().manual_seed(1))[:count]
    slots = torch.arange(count) + torch.arange(count) // 7
    slots[::11] = -1
    return slots


@pytest.mark.by_pairs
@pytest.mark.parametrize("kind", ["in order", "strewn", "gaps"])
@pytest.mark.parametrize("order", ["NHD", "HND", "pool", "packed"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_runs_of_tokens_are_copied_whole_to_where_each_token_belongs(
    dtype: torch.dtype, order: str, kind: str, threads: int
) -> None:
    # a slice of a wider product, as projections give it, and rows that follow each other
    for wide in (128 + 64, 300):
        product = torch.randn(300, 4, wide).to(dtype)
        k, v = product[..., :128], product[..., 128:192]
        if wide == 192:
            k, v = k.contiguous(), v.contiguous()
        made, slots = caches(order, dtype, **SHAPE), slots_of(kind, 300)
        wanted = [reference_write(rows, cache, slots, dtype) for rows, cache in zip((k, v), made, strict=True)]
        pagegen.write_kv(k, v, *made, slots)
        assert same(made[0], wanted[0])
        assert same(made[1], wanted[1])


@pytest.mark.by_pairs
@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("stored", STORED, ids=name_of)
def test_converted_rows_are_the_same_whatever_the_number_of_tokens_and_threads(
    stored: torch.dtype, order: str, tokens: int, threads: int
) -> None:
    k, v = torch.randn(tokens, 4, 128).bfloat16(), torch.randn(tokens, 4, 64).bfloat16()
    made, slots = caches(order, stored, **SHAPE), slots_of("strewn", tokens)
    scale = 0.05 + torch.rand(24, 16, 4, generator=torch.Generator().manual_seed(2))
    wanted = [reference_write(rows, cache, slots, stored, scale) for rows, cache in zip((k, v), made, strict=True)]
    kv_dtype = "int4" if stored == INT4 else None
    pagegen.write_kv(k, v, *made, slots, k_scale=scale, v_scale=scale, kv_dtype=kv_dtype)
    assert same(made[0], wanted[0])
    assert same(made[1], wanted[1])


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=name_of)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotated_rows_are_the_same_whatever_the_number_of_tokens_and_threads(
    interleaved: bool, stored: torch.dtype, tokens: int, threads: int
) -> None:
    q, k, v = (torch.randn(tokens, heads, width).bfloat16() for heads, width in ((12, 128), (4, 128), (4, 64)))
    turn = torch.outer(torch.arange(500.0), 0.9 ** torch.arange(64.0))
    angles = torch.arange(tokens) + 7, turn.cos(), turn.sin()
    slots = slots_of("gaps", tokens)
    made, one_by_one = caches("HND", stored, **SHAPE), caches("HND", stored, **SHAPE)
    options: dict[str, Any] = {"interleaved": interleaved}
    out = pagegen.rope_write_kv(q, k, v, *angles, *made, slots, **options)
    for t in range(tokens):
        row = slice(t, t + 1)
        alone = pagegen.rope_write_kv(
            q[row], k[row], v[row], angles[0][row], *angles[1:], *one_by_one, slots[row], **options
        )
        assert torch.equal(alone, out[row])
    assert same(made[0], one_by_one[0])
    assert same(made[1], one_by_one[1])


def test_columns_past_the_rotation_keep_every_bit() -> None:
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).view(1, 256, 256)
    finite = torch.where(every.isnan(), 0.0, every.float()).bfloat16()
    cache = torch.zeros(1, 1, 256, 256, dtype=torch.bfloat16)
    angle = torch.zeros(1, 8)
    where = torch.tensor([0])
    out = pagegen.rope_write_kv(finite, finite, None, where, angle, angle, cache, None, where)
    assert same(out[..., 16:], finite[..., 16:])
    assert same(cache[0, ..., 16:], finite[..., 16:]), "subnormals too"


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=name_of)
def test_subnormals_of_a_narrow_type_do_not_depend_on_what_the_cpu_does_with_its_own(stored: torch.dtype) -> None:
    values = (torch.randn(1, 8, 256) * 2.0**-10).view(1, 8, 256)
    made = [torch.zeros(1, 1, 8, 256).to(stored) for _ in range(2)]
    pagegen.write_kv(values, None, made[0], None, torch.tensor([0]))
    assert torch.set_flush_denormal(True)
    try:
        pagegen.write_kv(values, None, made[1], None, torch.tensor([0]))
    finally:
        torch.set_flush_denormal(False)
    assert same(*made)


@pytest.mark.by_pairs
@pytest.mark.parametrize("order", ["NHD", "HND", "pool", "packed"])
@pytest.mark.parametrize("stored", STORED, ids=name_of)
def test_many_blocks_are_copied_whole_or_in_pieces_as_their_layout_allows(
    order: str, stored: torch.dtype, threads: int
) -> None:
    made = caches(order, stored, **SHAPE)
    pairs = torch.randperm(24, generator=torch.Generator().manual_seed(3)).view(12, 2)
    wanted = [cache.clone() for cache in made]
    for cache, want in zip(made, wanted, strict=True):
        want[pairs[:, 1]] = cache[pairs[:, 0]]
    pagegen.copy_blocks(*made, pairs)
    assert same(made[0], wanted[0])
    assert same(made[1], wanted[1])
