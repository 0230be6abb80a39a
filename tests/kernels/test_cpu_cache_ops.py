"""Writing to and copying within caches on the CPU, against the float64 reference; and the device's description."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from cache_cases import (
    FLOATS,
    INT4,
    INTEGERS,
    ORDERS,
    STORED,
    caches,
    hard_values,
    name_of,
    nearest,
    reference_write,
    same,
)

import pagegen
from pagegen import targets
from pagegen.codegen import cpp
from pagegen.spec import Target
from pagegen.targets import cpp_build, cpu, cpu_cache, cpu_device

pytestmark = pytest.mark.skipif(cpu.compiler() is None, reason="needs a C++ compiler")
SLOTS = torch.tensor([17, -1, 0, 23, 6])
SHAPE = (4, 6, 3)


def rows(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """k [5, 3, 20] and v [5, 3, 18], slices of one product as projections give them."""
    wide = hard_values(5 * 3 * 50, seed).view(5, 3, 50).to(dtype)
    return wide[..., :20], wide[..., 20:38]


def a_scale(kind: str, value: float) -> torch.Tensor | float | None:
    generator = torch.Generator().manual_seed(int(value * 100))
    scales: dict[str, Any] = {
        "none": None,
        "tensor": value,
        "head": value * torch.tensor([1.0, 0.3, 7.0]),
        "token and head": value * (0.1 + torch.rand(SHAPE, generator=generator)),
    }
    return scales[kind]


@pytest.mark.parametrize("kind", ["none", "tensor", "head", "token and head"])
@pytest.mark.parametrize("stored", STORED, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_each_token_is_stored_at_its_slot_as_the_reference_rounds_it_and_nothing_elsewhere(
    dtype: torch.dtype, stored: torch.dtype, kind: str
) -> None:
    k, v = rows(dtype)
    k_scale, v_scale = a_scale(kind, 0.37), a_scale(kind, 1.9)
    for order in ORDERS:
        k_cache, v_cache = caches(order, stored)
        wanted_k = reference_write(k, k_cache, SLOTS, stored, k_scale)
        wanted_v = reference_write(v, v_cache, SLOTS, stored, v_scale)
        pagegen.write_kv(
            k, v, k_cache, v_cache, SLOTS, k_scale=k_scale, v_scale=v_scale, kv_dtype="int4" if stored == INT4 else None
        )
        assert same(k_cache, wanted_k)
        assert same(v_cache, wanted_v)


@pytest.mark.parametrize("kind", ["none", "token and head"])
@pytest.mark.parametrize("stored", INTEGERS, ids=name_of)
def test_zero_points_are_added_before_rounding(stored: torch.dtype, kind: str) -> None:
    k, v = rows(torch.bfloat16)
    k_cache, v_cache = caches("NHD", stored)
    scale, zero = a_scale(kind, 0.37), torch.randn(SHAPE) * 3
    wanted_k = reference_write(k, k_cache, SLOTS, stored, scale, zero)
    wanted_v = reference_write(v, v_cache, SLOTS, stored, None if scale is None else 1.0)
    pagegen.write_kv(k, v, k_cache, v_cache, SLOTS, k_scale=scale, k_zero=zero, kv_dtype=stored)
    assert same(k_cache, wanted_k)
    assert same(v_cache, wanted_v), "what is given for K alone leaves V as it is"


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=name_of)
def test_every_bfloat16_is_rounded_once_to_float8(stored: torch.dtype) -> None:
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).view(256, 1, 256)
    k_cache, v_cache = (torch.zeros(256, 1, 1, 256, dtype=torch.uint8) for _ in range(2))
    pagegen.write_kv(every, every, k_cache, v_cache, torch.arange(256), kv_dtype=stored)
    expected = nearest(every.double(), stored).view(k_cache.shape)
    assert same(k_cache.view(stored), expected.view(stored))
    assert torch.equal(k_cache, v_cache)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=name_of)
def test_float32_beside_a_tie_of_two_float8_goes_to_its_side(stored: torch.dtype) -> None:
    exact = torch.arange(0x7B, dtype=torch.uint8).view(stored).double()
    middle = ((exact[1:] + exact[:-1]) / 2).float()
    infinity = torch.tensor(torch.inf)
    values = torch.cat([middle, middle.nextafter(infinity), middle.nextafter(-infinity)])
    values = torch.cat([values, -values]).view(1, 1, -1)
    cache = torch.zeros(1, 1, 1, values.numel(), dtype=stored)
    pagegen.write_kv(values, None, cache, None, torch.tensor([0]))
    assert same(cache.view(torch.uint8), nearest(values.double(), stored).view(cache.shape))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float8_e4m3fn, [448.0, -448.0, 448.0, -448.0]),
        (torch.float8_e5m2, [10240.0, -10240.0, 57344.0, -57344.0]),
        (torch.int8, [127, -128, 127, -128]),
    ],
)
def test_what_is_too_large_saturates_and_nan_stays_nan_or_is_zero(stored: torch.dtype, wanted: list[float]) -> None:
    values = torch.tensor([1e4, -1e4, torch.inf, -torch.inf, torch.nan]).view(1, 1, 5)
    cache = torch.zeros(1, 1, 1, 5).to(stored)
    pagegen.write_kv(values, None, cache, None, torch.tensor([0]))
    assert cache.float().flatten()[:4].tolist() == wanted
    last = cache.float().flatten()[4]
    assert last == 0 if stored == torch.int8 else last.isnan()


def test_the_even_column_of_int4_lies_in_the_low_bits() -> None:
    cache = torch.zeros(1, 1, 1, 3, dtype=torch.int8)  # int8 serves as storage too
    pagegen.write_kv(
        torch.tensor([[[1.0, 2.0, -8.0, 7.0, -1e9, 1e9]]]), None, cache, None, torch.tensor([0]), kv_dtype="int4"
    )
    assert cache.view(torch.uint8).flatten().tolist() == [0x21, 0x78, 0x78]


def test_write_rounds_as_torch_does() -> None:
    hard = [0.0, -0.0, 1e-8, 6e-8, 3e-5, 65504.0, 65519.9, 65520.0, 1e30, float("inf"), -float("inf"), float("nan")]
    values = torch.tensor(hard + torch.randn(500).tolist() + (torch.randn(500) * 1e-6).tolist())
    for dtype in (torch.float16, torch.bfloat16):
        k_cache, v_cache = (torch.empty(1, 1, 1, len(values), dtype=dtype) for _ in range(2))
        rows_ = values.view(1, 1, -1)
        pagegen.write_kv(rows_, rows_, k_cache, v_cache, torch.tensor([0]))
        torch.testing.assert_close(k_cache.flatten(), values.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn, INT4], ids=name_of)
def test_many_tokens_are_written_by_several_threads(stored: torch.dtype) -> None:
    k_cache, v_cache = caches("NHD", stored, blocks=64, size=16, heads=4, dims=64, v_dims=64)
    k, v = torch.randn(2, 1000, 4, 64).bfloat16()
    slots = torch.randperm(1024)[:1000]
    scale = 0.1 + torch.rand(64, 16, 4)
    wanted = [reference_write(x, c, slots, stored, scale) for x, c in ((k, k_cache), (v, v_cache))]
    kv_dtype = "int4" if stored == INT4 else None
    pagegen.write_kv(k, v, k_cache, v_cache, slots, k_scale=scale, v_scale=scale, kv_dtype=kv_dtype)
    assert same(k_cache, wanted[0])
    assert same(v_cache, wanted[1])


def angles(half: int, dtype: torch.dtype = torch.float32, positions: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    turn = torch.outer(torch.arange(float(positions)), 0.9 ** torch.arange(float(half)))
    return turn.cos().to(dtype), turn.sin().to(dtype)


def turned(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> Any:
    """The rotation in float64, not rounded."""
    half = cos.shape[1]
    turn = torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    y = x.double().clone()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    pairs = torch.complex(y[..., first], y[..., second]) * turn
    y[..., first], y[..., second] = pairs.real, pairs.imag
    return y


@pytest.mark.by_pairs
@pytest.mark.parametrize("half", [1, 5, 10], ids=lambda half: f"{2 * half} of 20 columns")
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_rotation_is_exact_to_one_rounding_and_leaves_the_columns_past_it(
    dtype: torch.dtype, interleaved: bool, half: int
) -> None:
    q, k = torch.randn(5, 7, 20).to(dtype), torch.randn(5, 3, 24)[..., :20].to(dtype)
    k_cache, v_cache = caches("HND", dtype)
    positions = torch.tensor([63, 0, 5, 5, 40])
    for angle_dtype in FLOATS:
        cos, sin = angles(half, angle_dtype)
        out = pagegen.rope_write_kv(
            q, k, k[..., :18], positions, cos, sin, k_cache, v_cache, SLOTS, interleaved=interleaved
        )
        exact = turned(q, positions, cos, sin, interleaved)
        # the products and the sum in float32, then one rounding to dtype
        bound = exact.abs() * torch.finfo(dtype).eps / 2 + 3 * 2.0**-24 * 2 * q.abs().max()
        assert ((out.double() - exact).abs() <= bound).all()
        assert torch.equal(out[..., 2 * half :], q[..., 2 * half :])


@pytest.mark.parametrize("stored", STORED, ids=name_of)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotating_and_writing_at_once_stores_the_bits_of_rotating_and_then_writing(
    stored: torch.dtype, interleaved: bool
) -> None:
    k, v = rows(torch.bfloat16)
    q = torch.randn(5, 7, 20).half()
    positions, (cos, sin) = torch.tensor([63, 0, 5, 5, 40]), angles(7)
    options: dict[str, Any] = {"k_scale": a_scale("token and head", 0.37), "v_scale": 1.9, "kv_dtype": stored}
    if stored in INTEGERS:
        options |= {"k_zero": torch.full((3,), 0.25), "v_zero": torch.randn(SHAPE)}
    at_once, in_turn = caches("packed", stored), caches("packed", stored)
    args = (positions, cos, sin)
    out = pagegen.rope_write_kv(q, k, v, *args, *at_once, SLOTS, interleaved=interleaved, **options)
    # k as the queries: what comes back is k rotated, in k's dtype
    scratch = caches("NHD", torch.float32)
    turned_k = pagegen.rope_write_kv(k, k, v, *args, *scratch, SLOTS, interleaved=interleaved)
    pagegen.write_kv(turned_k, v, *in_turn, SLOTS, **options)
    assert same(at_once[0], in_turn[0])
    assert same(at_once[1], in_turn[1])
    assert out.dtype == torch.float16


def test_a_skipped_token_still_gets_its_query_rotated() -> None:
    q, k = torch.randn(5, 2, 20), torch.randn(5, 3, 20)
    k_cache, v_cache = caches("NHD", torch.float32)
    before = k_cache.clone()
    positions, (cos, sin) = torch.arange(5), angles(10)
    nowhere = torch.full((5,), -1)
    out = pagegen.rope_write_kv(q, k, k[..., :18], positions, cos, sin, k_cache, v_cache, nowhere)
    torch.testing.assert_close(out.double(), turned(q, positions, cos, sin, False), rtol=1e-6, atol=1e-6)
    assert same(k_cache, before)


def test_positions_outside_the_angles_read_nothing_outside_them() -> None:
    q = k = torch.ones(3, 3, 20)
    pool = torch.full((12, 10), torch.nan)
    pool[4:8] = 1.0
    positions = torch.tensor([-(2**62), 4, 2**62])
    cos = sin = pool[4:8]
    cache = torch.zeros(1, 3, 3, 20)
    out = pagegen.rope_write_kv(q, k, None, positions, cos, sin, cache, None, torch.tensor([0, 1, 2]))
    assert cache.isfinite().all()
    assert out.isfinite().all()


@pytest.mark.parametrize("stored", STORED, ids=name_of)
def test_without_values_only_keys_are_written(stored: torch.dtype) -> None:
    k, _ = rows(torch.float32)
    k_cache, _ = caches("packed", stored)
    kv_dtype = "int4" if stored == INT4 else None
    wanted = reference_write(k, k_cache, SLOTS, stored, 0.37)
    pagegen.write_kv(k, None, k_cache, None, SLOTS, k_scale=0.37, kv_dtype=kv_dtype)
    assert same(k_cache, wanted)
    args = (torch.tensor([63, 0, 5, 5, 40]), *angles(10))
    again, in_turn = caches("packed", stored)[0], caches("packed", stored)[0]
    turned_k = pagegen.rope_write_kv(k, k, None, *args, again, None, SLOTS, k_scale=0.37, kv_dtype=kv_dtype)
    pagegen.write_kv(turned_k, None, in_turn, None, SLOTS, k_scale=0.37, kv_dtype=kv_dtype)
    assert same(again, in_turn)


@pytest.mark.parametrize("stored", STORED, ids=name_of)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_torch_stores_the_same_bits_where_there_is_no_compiler(
    stored: torch.dtype, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for compiler in (cpu.compiler(), None):
        monkeypatch.setattr(cpu, "compiler", lambda compiler=compiler: compiler)
        k, v = rows(torch.float16)
        made = caches("pool", stored)
        options: dict[str, Any] = {"k_scale": 0.37, "v_scale": a_scale("head", 1.9), "kv_dtype": stored}
        if stored in INTEGERS:
            options["v_zero"] = torch.tensor([0.5, -1.0, 2.0])
        out = pagegen.rope_write_kv(
            k, k, v, torch.tensor([63, 0, 5, 5, 40]), *angles(7), *made, SLOTS, interleaved=interleaved, **options
        )
        pagegen.copy_blocks(*made, [(0, 1)])
        found.append((*made, out))
    for one, other in zip(*found, strict=True):
        assert same(one, other)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are x86's")
@pytest.mark.parametrize("machine", ["-march=x86-64", "-march=x86-64-v3"])
def test_every_instruction_set_stores_the_same_bits(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    other = cpp_build.load(cpp.render_cache_ops(), "write_kv and copy_blocks", machine=(machine,))
    other.pagegen_write_kv.argtypes, other.pagegen_write_kv.restype = [ctypes.c_char_p], None
    own = cpu.library()
    for stored in STORED:
        found = []
        for library in (own, other):
            monkeypatch.setattr(cpu, "library", lambda library=library: library)
            k, v = rows(torch.bfloat16)
            made = caches("NHD", stored)
            options: dict[str, Any] = {"k_scale": 0.37, "v_scale": a_scale("head", 1.9), "kv_dtype": stored}
            out = pagegen.rope_write_kv(k, k, v, torch.tensor([63, 0, 5, 5, 40]), *angles(7), *made, SLOTS, **options)
            found.append((*made, out))
        for one, two in zip(*found, strict=True):
            assert same(one, two)


@pytest.mark.parametrize("stored", STORED, ids=name_of)
@pytest.mark.parametrize("order", ORDERS)
def test_copied_block_equals_its_source_and_others_stay(order: str, stored: torch.dtype) -> None:
    k_cache, v_cache = caches(order, stored)
    wanted_k, wanted_v = k_cache.clone(), v_cache.clone()
    for source, target in ((0, 3), (1, 2)):
        wanted_k[target], wanted_v[target] = k_cache[source], v_cache[source]
    pagegen.copy_blocks(k_cache, v_cache, torch.tensor([[0, 9, 3], [1, 9, 2]])[:, ::2].contiguous())
    assert same(k_cache, wanted_k)
    assert same(v_cache, wanted_v)
    pagegen.copy_blocks(k_cache, None, [(2, 0)])
    assert same(k_cache[0], wanted_k[2])
    assert same(v_cache, wanted_v)


def test_scales_move_along_as_caches_of_one_head() -> None:
    k_scale, v_scale = torch.randn(2, 4, 6, 3)
    wanted = k_scale.clone(), v_scale.clone()
    for scale in wanted:
        scale[3] = scale[1]
    pagegen.copy_blocks(k_scale[:, :, None], v_scale[:, :, None], [(1, 3)])
    assert torch.equal(k_scale, wanted[0])
    assert torch.equal(v_scale, wanted[1])


def test_pairs_may_be_rows_of_something_wider() -> None:
    k_cache = torch.arange(4.0).view(4, 1, 1, 1).clone()
    pagegen.copy_blocks(k_cache, -k_cache, torch.tensor([[0, 1, 3], [2, 3, 0]])[:, :2])
    assert k_cache.flatten().tolist() == [0.0, 0.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=name_of)
def test_chain_of_copies_reads_every_source_before_it_is_overwritten(dtype: torch.dtype) -> None:
    k_cache = torch.arange(4.0).view(4, 1, 1, 1).to(dtype)
    v_cache = (-torch.arange(4.0)).view(4, 1, 1, 1).to(dtype)
    cpu_cache.copy_blocks(k_cache, v_cache, torch.tensor([[0, 1], [1, 2]]))
    assert k_cache.float().flatten().tolist() == [0.0, 0.0, 1.0, 3.0]
    assert v_cache.float().flatten().tolist() == [0.0, 0.0, -1.0, -3.0]


def test_a_cache_of_more_than_2_to_the_31_elements_is_written_and_copied_at_its_end() -> None:
    blocks = 2**31 // (16 * 8 * 128) + 3
    cache = torch.empty(blocks, 16, 8, 128, dtype=torch.int8)  # 2 GiB of addresses; pages nobody touches are not there
    k = torch.arange(2 * 8 * 128).view(2, 8, 128).remainder(100).float()
    pagegen.write_kv(k, None, cache, None, torch.tensor([blocks * 16 - 1, 5]))
    assert torch.equal(cache[-1, 15].float(), k[0])
    pagegen.copy_blocks(cache, None, [(blocks - 1, blocks - 2), (0, 1)])
    assert torch.equal(cache[-2, 15].float(), k[0])
    assert torch.equal(cache[1, 5].float(), k[1])


def test_no_tokens_and_no_pairs_are_no_work() -> None:
    k_cache, v_cache = caches("NHD", torch.float32)
    before = k_cache.clone()
    nothing = torch.empty(0, 3, 20)
    none = torch.empty(0, dtype=torch.int64)
    pagegen.write_kv(nothing, nothing[..., :18], k_cache, v_cache, none)
    out = pagegen.rope_write_kv(nothing, nothing, nothing[..., :18], none, *angles(10), k_cache, v_cache, none)
    assert out.shape == nothing.shape
    pagegen.copy_blocks(k_cache, v_cache, torch.empty(0, 2, dtype=torch.int64))
    assert same(k_cache, before)


def test_device_describes_this_cpu() -> None:
    device = targets.current_device(Target("cpu"))
    assert device.target.kind == "cpu"
    assert device.units == torch.get_num_threads()
    assert device.memory_gib > 0
    assert 0.1 < device.bandwidth_gb_s < 10_000
    assert device is targets.current_device(Target("cpu")), "measured once a process"


def test_bandwidth_probe_reads_memory_that_no_cache_holds() -> None:
    assert cpu_device.last_level_cache_bytes() < 2**32
    assert 0.1 < cpu_device.read_bandwidth_gb_s(seconds=0.05) < 10_000
