"""Writing operators: what they refuse and how they say it, scales that follow the rows, positions that stay logical."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pagegen

BLOCKS, SIZE, HEADS, DIM, V_DIM = 5, 4, 2, 16, 12
TOKENS = 3
INT4 = torch.int4  # type: ignore[attr-defined]


def operands(**changes: Any) -> dict[str, Any]:
    """A write of 3 tokens to float32 caches; a change to None of a keyword drops nothing: None is passed."""
    values: dict[str, Any] = {
        "k": torch.ones(TOKENS, HEADS, DIM),
        "v": torch.ones(TOKENS, HEADS, V_DIM),
        "k_cache": torch.zeros(BLOCKS, SIZE, HEADS, DIM),
        "v_cache": torch.zeros(BLOCKS, SIZE, HEADS, V_DIM),
        "slot_mapping": torch.tensor([7, -1, 2]),
    }
    return {**values, **changes}


def quantised(dtype: torch.dtype, pack: int = 1, **changes: Any) -> dict[str, Any]:
    return operands(
        k_cache=torch.zeros(BLOCKS, SIZE, HEADS, DIM // pack).to(dtype),
        v_cache=torch.zeros(BLOCKS, SIZE, HEADS, V_DIM // pack).to(dtype),
        **changes,
    )


PER_TOKEN = torch.ones(BLOCKS, SIZE, HEADS)
POOL = torch.zeros(BLOCKS, SIZE, HEADS, DIM)
BAD_WRITES = {
    "k_dtype": (operands(k=torch.ones(TOKENS, HEADS, DIM, dtype=torch.int32)), "k must be float32 or float16"),
    "k_heads": (operands(k=torch.ones(TOKENS, 3, DIM)), r"k must be .* = \[3, 2, 16\], got float32 \[3, 3, 16\]"),
    "k_width": (operands(k=torch.ones(TOKENS, HEADS, 8)), "k must be"),
    "k_stride": (operands(k=torch.ones(TOKENS, HEADS, 2 * DIM)[..., ::2]), "k must have a last stride of 1"),
    "v_dtype": (operands(v=torch.ones(TOKENS, HEADS, V_DIM).half()), "v must be float32"),
    "v_tokens": (operands(v=torch.ones(2, HEADS, V_DIM)), "v must be"),
    "v_alone": (operands(v_cache=None), "v and v_cache must both be given or both be None, got v without v_cache"),
    "v_cache_alone": (operands(v=None), "got v_cache without v"),
    "slots_dtype": (operands(slot_mapping=torch.zeros(TOKENS, dtype=torch.int32)), "slot_mapping must be int64"),
    "slots_size": (operands(slot_mapping=torch.zeros(2, dtype=torch.int64)), "slot_mapping must be"),
    "k_repeated": (operands(k_cache=torch.zeros(1, SIZE, HEADS, DIM).expand(BLOCKS, -1, -1, -1)),
                   "k_cache must have memory of its own for every element, got strides .* overlap"),
    "v_overlapping": (operands(v_cache=torch.zeros(999).as_strided((BLOCKS, SIZE, HEADS, V_DIM), (90, 20, 8, 1))),
                      "v_cache must have memory of its own"),
    "v_is_k": (operands(k_cache=POOL, v_cache=POOL[..., :V_DIM]), "v_cache must have memory of its own, got k_cache's"),
    "uint8": (quantised(torch.uint8), "kv_dtype must say what a uint8 k_cache holds"),
    "kv_dtype": (operands(kv_dtype="int8"), "kv_dtype must be a dtype that k_cache can hold, got int8 for float32"),
    "kv_dtype_name": (quantised(torch.uint8, kv_dtype="int3"), "kv_dtype must be one of .*, got 'int3'"),
    "int4_in_float8": (quantised(torch.float8_e4m3fn, 2, kv_dtype="int4"), "kv_dtype must be a dtype"),
    "int4_unpacked": (quantised(torch.uint8, kv_dtype="int4"), "k_cache must be half as wide as k for int4"),
    "int4_odd": (quantised(torch.uint8, 2, kv_dtype="int4", k=torch.ones(TOKENS, HEADS, 15)),
                 "k must have an even head_dim for an int4 cache"),
    "scale_shape": (
        operands(k_scale=torch.ones(3)), r"k_scale must be a float, floats \[2\] or float32 \[5, 4, 2\], got .*3"
    ),
    "scale_dtype": (operands(v_scale=torch.ones(2, dtype=torch.int64)), "v_scale must be a float"),
    "scale_half": (operands(k_scale=PER_TOKEN.half()), "k_scale must be float32"),
    "zero_float": (operands(k_zero=PER_TOKEN), "k_zero must be None unless the cache holds int8 or int4"),
    "zero_float8": (quantised(torch.uint8, kv_dtype="fp8", v_zero=PER_TOKEN), "v_zero must be None"),
    "zero_shape": (quantised(torch.int8, k_zero=torch.ones(BLOCKS, SIZE)), "k_zero must be"),
    "v_scale_without_v": (operands(v=None, v_cache=None, v_scale=2.0), "v_scale must be None where v_cache is None"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_WRITES)
@pytest.mark.parametrize("rotate", [False, True], ids=["write_kv", "rope_write_kv"])
def test_a_bad_write_is_refused_by_name_before_anything_is_touched(name: str, rotate: bool) -> None:
    given, message = BAD_WRITES[name]
    before = {key: value.clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
    turn = torch.ones(4, 4)
    with pytest.raises((ValueError, TypeError), match=message):
        if rotate:
            pagegen.rope_write_kv(
                torch.ones(TOKENS, 4, DIM), positions=torch.arange(TOKENS), cos=turn, sin=turn, **given
            )
        else:
            pagegen.write_kv(**given)
    for key, value in before.items():
        assert torch.equal(given[key], value)


def rotation(**changes: Any) -> dict[str, Any]:
    values = {
        "q": torch.ones(TOKENS, 4, DIM),
        "positions": torch.arange(TOKENS),
        "cos": torch.ones(8, 8),
        "sin": torch.zeros(8, 8),
    }
    return {**operands(), **values, **changes}


BAD_ROTATIONS = {
    "q_width": (rotation(q=torch.ones(TOKENS, 4, 8)), "q must be"),
    "q_tokens": (rotation(q=torch.ones(2, 4, DIM)), "q must be"),
    "positions_dtype": (rotation(positions=torch.arange(TOKENS).int()), "positions must be int64"),
    "positions_size": (rotation(positions=torch.arange(2)), "positions must be"),
    "cos_dtype": (rotation(cos=torch.ones(8, 8).double()), "cos must be float32 or"),
    "cos_wide": (rotation(cos=torch.ones(8, 9), sin=torch.ones(8, 9)), "cos must have 1..8 columns .* got 9"),
    "cos_none": (rotation(cos=torch.ones(8, 0), sin=torch.ones(8, 0)), "cos must have 1..8 columns .* got 0"),
    "cos_rows": (rotation(cos=torch.ones(0, 8), sin=torch.ones(0, 8)), "cos must have a row a position"),
    "sin_shape": (rotation(sin=torch.zeros(7, 8)), "sin must be"),
    "sin_dtype": (rotation(sin=torch.zeros(8, 8).half()), "sin must be float32"),
}


@pytest.mark.parametrize("name", BAD_ROTATIONS)
def test_a_bad_rotation_is_refused_by_name_before_anything_is_touched(name: str) -> None:
    given, message = BAD_ROTATIONS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        pagegen.rope_write_kv(**given)
    assert not given["k_cache"].any()


@pytest.mark.parametrize("position", [-1, 8])
def test_positions_are_checked_when_asked_for(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = rotation(positions=torch.tensor([0, position, 1]))
    pagegen.rope_write_kv(**given)
    monkeypatch.setenv("PAGEGEN_CHECK", "1")
    with pytest.raises(ValueError, match=rf"positions\[1\] must be in 0..7, got {position}"):
        pagegen.rope_write_kv(**given)


@pytest.mark.parametrize("layout", ["blocks first", "heads first", "layers inside", "one slot", "one head"])
def test_every_view_without_overlap_can_be_written(layout: str) -> None:
    made = {
        "blocks first": torch.zeros(BLOCKS, SIZE, HEADS, DIM),
        "heads first": torch.zeros(HEADS, BLOCKS, SIZE, DIM).permute(1, 2, 0, 3),
        "layers inside": torch.zeros(BLOCKS, 3, SIZE, 2, HEADS, DIM)[:, 1, :, 0],
        "one slot": torch.zeros(BLOCKS * SIZE, 1, HEADS, DIM),
        "one head": torch.zeros(BLOCKS, 1, SIZE, DIM).transpose(1, 2).expand(-1, -1, 1, -1),
    }
    cache = made[layout]
    k = torch.randn(TOKENS, cache.shape[2], DIM)
    pagegen.write_kv(k, None, cache, None, torch.tensor([7, -1, 2]))
    assert torch.equal(cache[7 // cache.shape[1], 7 % cache.shape[1]], k[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_moving_blocks_changes_no_rotation_and_no_bit_of_attention(interleaved: bool) -> None:
    length, heads = 14, 4
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(length, n, DIM, generator=generator).bfloat16() for n in (heads, HEADS))
    v = torch.randn(length, HEADS, V_DIM, generator=generator).bfloat16()
    angles = torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.3, 0.1, 0.01]))
    found = []
    for table in ([0, 1, 2, 3], [4, 2, 0, 1]):
        blocks = torch.tensor(table)
        caches = [torch.full((BLOCKS, SIZE, HEADS, width), torch.nan).bfloat16() for width in (DIM, V_DIM)]
        positions = torch.arange(length)
        slots = blocks[positions // SIZE] * SIZE + positions % SIZE
        turned = pagegen.rope_write_kv(
            q, k, v, positions, angles.cos(), angles.sin(), *caches, slots, interleaved=interleaved
        )
        in_order = caches[0][blocks].flatten(0, 1)[:length]
        out = pagegen.paged_attention(
            turned, *caches, blocks[None].int(), torch.tensor([length], dtype=torch.int32),
            query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        )  # fmt: skip
        found.append((turned, in_order, out))
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there)


QUANTISED = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127, "int4": 7}


@pytest.mark.parametrize(("kv_dtype", "top"), QUANTISED.items())
def test_symmetric_scales_map_the_largest_magnitude_to_the_largest_value(kv_dtype: str, top: int) -> None:
    k = torch.tensor([[[0.5, -3.0, 1.0], [0.0, 0.0, 0.0]], [[1e-3, 0.0, -2e-3], [9e9, 0.0, 1.0]]]).bfloat16()
    k_scale, v_scale = torch.full((2, 3, 4, 2), 7.0)
    pagegen.update_scales(k, 2 * k, torch.tensor([5, 0]), k_scale, v_scale, kv_dtype=kv_dtype)
    expected = k.float().abs().amax(dim=-1) / top
    torch.testing.assert_close(k_scale[1, 1], torch.tensor([expected[0, 0], 1.0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(k_scale[0, 0], expected[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(v_scale[0, 0], 2 * expected[1], rtol=1e-6, atol=0)
    k_scale[1, 1], k_scale[0, 0] = 7.0, 7.0
    assert (k_scale == 7.0).all(), "other slots keep their scales"


def test_skipped_tokens_set_no_scale_not_even_of_slot_0() -> None:
    k = torch.randn(3, HEADS, DIM)
    for slots, kept in (([-1, -1, -1], []), ([-1, 2, -1], [2]), ([0, -1, 2], [0, 2])):
        scale = torch.full((BLOCKS, SIZE, HEADS), 7.0)
        pagegen.update_scales(k, None, torch.tensor(slots), scale, None, kv_dtype="int8")
        changed = (scale.flatten(0, 1) != 7.0).all(dim=-1).nonzero().flatten().tolist()
        assert changed == kept
        for slot in kept:
            assert torch.equal(scale.flatten(0, 1)[slot], k[slots.index(slot)].abs().amax(dim=-1) / 127)


@pytest.mark.parametrize(("kv_dtype", "first", "last"), [("int8", -128, 127), ("int4", -8, 7)])
def test_asymmetric_scales_use_every_level_of_the_row_s_own_range(kv_dtype: str, first: int, last: int) -> None:
    generator = torch.Generator().manual_seed(0)
    k = torch.rand(4, HEADS, DIM, generator=generator) * torch.tensor([1.0, 5.0, 1e-2, 100.0])[:, None, None]
    k += torch.tensor([0.0, 3.0, -1.0, -50.0])[:, None, None]
    v = -k[..., :V_DIM].contiguous()
    packed = 2 if kv_dtype == "int4" else 1
    caches = [torch.zeros(BLOCKS, SIZE, HEADS, width // packed, dtype=torch.int8) for width in (DIM, V_DIM)]
    slots = torch.tensor([19, 4, 0, 7])
    k_scale, v_scale, k_zero, v_zero = torch.zeros(4, BLOCKS, SIZE, HEADS)
    zeros = {"k_zero": k_zero, "v_zero": v_zero}
    pagegen.update_scales(k, v, slots, k_scale, v_scale, kv_dtype=kv_dtype, **zeros)
    pagegen.write_kv(k, v, *caches, slots, k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_dtype, **zeros)
    for rows, cache, scale, zero in ((k, caches[0], k_scale, k_zero), (v, caches[1], v_scale, v_zero)):
        for token, slot in enumerate(slots.tolist()):
            place = slot // SIZE, slot % SIZE
            levels = cache[place].to(torch.int16)
            if packed == 2:
                levels = torch.stack([levels << 12 >> 12, levels >> 4], dim=-1).flatten(-2)
            assert levels.amin(dim=-1).tolist() == [first] * HEADS
            assert levels.amax(dim=-1).tolist() == [last] * HEADS
            read = (levels - zero[place][:, None]) * scale[place][:, None]
            assert ((read - rows[token]).abs() <= 0.51 * scale[place][:, None]).all()


@pytest.mark.parametrize("value", [0.0, 1000.0, -1e-30, 3e38])
def test_a_row_of_one_value_is_read_back(value: float) -> None:
    k = torch.full((1, HEADS, DIM), value)
    cache = torch.zeros(BLOCKS, SIZE, HEADS, DIM, dtype=torch.int8)
    scale, zero = torch.zeros(2, BLOCKS, SIZE, HEADS)
    slots = torch.tensor([3])
    pagegen.update_scales(k, None, slots, scale, None, k_zero=zero, kv_dtype="int8")
    pagegen.write_kv(k, None, cache, None, slots, k_scale=scale, k_zero=zero)
    read = (cache[0, 3] - zero[0, 3][:, None]) * scale[0, 3][:, None]
    assert scale[0, 3].isfinite().all()
    torch.testing.assert_close(read, k[0], rtol=1e-4, atol=0)
    if value == 0.0:
        assert scale[0, 3].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_row_s_range_ignores_nan_and_infinity(asymmetric: bool) -> None:
    k = torch.tensor([[[1.0, -2.0, torch.nan, torch.inf], [torch.nan, torch.inf, -torch.inf, torch.nan]]])
    scale, zero = torch.zeros(2, 1, 1, 2)
    pagegen.update_scales(k, None, torch.tensor([0]), scale, None, k_zero=zero if asymmetric else None, kv_dtype="int8")
    torch.testing.assert_close(scale[0, 0, 0].item(), (3.0 / 255) if asymmetric else 2.0 / 127, rtol=1e-6, atol=0.0)
    assert scale[0, 0, 1] == 1.0


@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_attention_over_rows_with_dynamic_scales_is_close_to_attention_over_the_rows(kv_dtype: str) -> None:
    length = 14
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(length, HEADS, DIM, generator=generator) * (1.0 + torch.arange(14.0))[:, None, None]
    v = torch.randn(length, HEADS, DIM, generator=generator)
    q = torch.randn(1, 4, DIM, generator=generator) / 10
    packed = 2 if kv_dtype == "int4" else 1
    caches = [torch.zeros(BLOCKS, SIZE, HEADS, DIM // packed, dtype=torch.uint8) for _ in range(2)]
    slots = torch.arange(length) + SIZE
    scales = {"k_scale": torch.zeros(BLOCKS, SIZE, HEADS), "v_scale": torch.zeros(BLOCKS, SIZE, HEADS)}
    pagegen.update_scales(k, v, slots, *scales.values(), kv_dtype=kv_dtype)
    pagegen.write_kv(k, v, *caches, slots, kv_dtype=kv_dtype, **scales)
    table = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    lens = torch.tensor([length], dtype=torch.int32)
    out = pagegen.paged_attention(q, *caches, table, lens, kv_dtype=kv_dtype, **scales)
    floats = [torch.zeros(BLOCKS, SIZE, HEADS, DIM) for _ in range(2)]
    pagegen.write_kv(k, v, *floats, slots)
    exact = pagegen.paged_attention(q, *floats, table, lens)
    bound = {"float8_e4m3fn": 0.1, "float8_e5m2": 0.2, "int8": 0.02, "int4": 0.3}[kv_dtype]
    assert (out - exact).abs().max() < bound


BAD_UPDATES: dict[str, tuple[dict[str, Any], str]] = {
    "float": ({"kv_dtype": "bfloat16"}, "kv_dtype must be one of float8_e4m3fn, float8_e5m2, int8, int4, got bfloat16"),
    "per_head": ({"k_scale": torch.ones(HEADS)}, "k_scale must be float32"),
    "half": ({"v_scale": PER_TOKEN.half()}, "v_scale must be float32"),
    "heads": ({"k_scale": torch.ones(BLOCKS, SIZE, 3)}, "k_scale must be"),
    "repeated": ({"k_scale": torch.ones(1, 1, HEADS).expand(BLOCKS, SIZE, HEADS)}, "k_scale must have memory"),
    "v": ({"v": None}, "v and v_scale must both be given or both be None, got v_scale without v"),
    "zero": ({"kv_dtype": "fp8", "k_zero": PER_TOKEN}, "k_zero must be None for a cache that is not int8 or int4"),
    "v_zero": ({"v": None, "v_scale": None, "v_zero": PER_TOKEN}, "v_zero must be None where v is None"),
    "slots": ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping must be"),
    "sizes": ({"v_scale": torch.ones(BLOCKS, 3, HEADS)}, "v_scale must be"),
}


@pytest.mark.parametrize("name", BAD_UPDATES)
def test_a_bad_update_of_scales_is_refused_by_name(name: str) -> None:
    changes, message = BAD_UPDATES[name]
    given = {**operands(), "k_scale": PER_TOKEN.clone(), "v_scale": PER_TOKEN.clone(), "kv_dtype": "int8", **changes}
    del given["k_cache"], given["v_cache"]
    with pytest.raises((ValueError, TypeError), match=message):
        pagegen.update_scales(**given)


def test_copies_that_would_race_are_refused_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.zeros(BLOCKS, SIZE, HEADS, DIM)
    monkeypatch.setenv("PAGEGEN_CHECK", "1")
    with pytest.raises(ValueError, match="pairs must name each target once"):
        pagegen.copy_blocks(cache, None, torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match="k_cache must have memory of its own"):
        pagegen.copy_blocks(cache[:1].expand(3, -1, -1, -1), None, [(0, 1)])
