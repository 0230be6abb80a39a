"""The Triton cache kernels in Triton's interpreter against the float64 reference, and the template unspecialised.

Run with TRITON_INTERPRET=1, in a process of its own. The interpreter truncates float32 to bfloat16 where hardware
rounds: what is stored as bfloat16 is compared within one unit in the last place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_cases import INT4, INTEGERS, ORDERS, STORED, caches, hard_values, name_of, nearest, reference_write, same

import pagegen
from pagegen import paths
from pagegen.codegen import triton_cache as codegen
from pagegen.spec import Target
from pagegen.targets import torch_cache, triton_cache
from pagegen.targets.cache_call import Rotation, WriteCall
from pagegen.targets.triton_module import import_source

SLOTS = torch.tensor([17, -1, 0, 23, 6])
SHAPE = (4, 6, 3)
POSITIONS = torch.tensor([63, -1, 5, 99, 40])  # two of them outside the 64 that have angles


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_TARGET", "interpreter")


def rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """k [5, 3, 20] and v [5, 3, 18], slices of one product as projections give them."""
    wide = hard_values(5 * 3 * 50).view(5, 3, 50).to(dtype)
    return wide[..., :20], wide[..., 20:38]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, or for bfloat16 neighbours."""
    if found.dtype != torch.bfloat16:
        return same(found, expected)
    apart = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs() <= 1
    return bool((apart | (found.isnan() & expected.isnan())).all())


def token_scales(value: float) -> torch.Tensor:
    return value * (0.1 + torch.rand(SHAPE, generator=torch.Generator().manual_seed(int(value * 100))))


# float32 plain and bfloat16 scaled: the type of the rows and the factors meet in no line of the template
WRITES = [
    pytest.param(
        dtype, stored, scaled, id=f"{name_of(dtype)}-{name_of(stored)}-{'scaled' if scaled else 'plain'}",
        marks=[] if scaled == (dtype == torch.bfloat16) or stored == dtype else [pytest.mark.nightly],
    )
    for dtype in (torch.float32, torch.bfloat16)
    for stored in STORED
    for scaled in (False, True)
]  # fmt: skip
# every type, and both rotations for some of them
ROTATIONS = [
    pytest.param(
        stored, interleaved, id=f"{name_of(stored)}-{'interleaved' if interleaved else 'halves'}",
        marks=[] if number % 2 == interleaved or stored == torch.float8_e4m3fn else [pytest.mark.nightly],
    )
    for number, stored in enumerate((torch.bfloat16, *(stored for stored in STORED if stored != torch.bfloat16)))
    for interleaved in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "stored", "scaled"), WRITES)
def test_write_kv_stores_what_the_reference_rounds_and_nothing_elsewhere(
    dtype: torch.dtype, stored: torch.dtype, scaled: bool
) -> None:
    k, v = rows(dtype)
    k_scale, v_scale = (token_scales(0.37), torch.tensor([1.9, 0.2, 5.0])) if scaled else (None, None)
    k_zero, v_zero = (torch.randn(SHAPE), torch.tensor(0.5)) if scaled and stored in INTEGERS else (None, None)
    order = ORDERS[STORED.index(stored) % len(ORDERS)]
    k_cache, v_cache = caches(order, stored)
    wanted_k = reference_write(k, k_cache, SLOTS, stored, k_scale, k_zero)
    wanted_v = reference_write(v, v_cache, SLOTS, stored, v_scale, v_zero)
    pagegen.write_kv(
        k, v, k_cache, v_cache, SLOTS,
        k_scale=k_scale, v_scale=v_scale, k_zero=k_zero, v_zero=v_zero, kv_dtype=stored,
    )  # fmt: skip
    assert close(k_cache, wanted_k)
    assert close(v_cache, wanted_v)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=name_of)
def test_float8_by_integer_arithmetic_is_the_nearest_for_every_bfloat16_and_beside_every_tie(
    stored: torch.dtype,
) -> None:
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).float()
    exact = torch.arange(0x7B, dtype=torch.uint8).view(stored).double()
    middle = ((exact[1:] + exact[:-1]) / 2).float()
    infinity = torch.tensor(torch.inf)
    values = torch.cat([every, middle, middle.nextafter(infinity), middle.nextafter(-infinity)])
    values = torch.cat([values, torch.zeros(-len(values) % 1024)]).view(-1, 64, 16)  # 64 heads: few programs
    cache = torch.zeros(len(values), 1, 64, 16, dtype=torch.uint8)
    pagegen.write_kv(values, None, cache, None, torch.arange(len(values)), kv_dtype=stored)
    assert same(cache.view(stored), nearest(values.double(), stored).view(cache.shape).view(stored))


def angles(half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turn = torch.outer(torch.arange(64.0), 0.9 ** torch.arange(float(half)))
    return turn.cos(), turn.sin()


def a_call(stored: torch.dtype, *, half: int, interleaved: bool, dtype: torch.dtype, with_v: bool = True) -> WriteCall:
    k, v = rows(dtype)
    k_cache, v_cache = caches("packed", stored)
    q = torch.randn(5, 7, 20, generator=torch.Generator().manual_seed(2)).to(dtype)
    zero = torch.full((1,), 0.25).expand(SHAPE) if stored in INTEGERS else None
    return WriteCall(
        k, v if with_v else None, k_cache, v_cache if with_v else None, SLOTS, stored,
        k_scale=token_scales(0.37), v_scale=token_scales(1.9) if with_v else None,
        k_zero=zero, v_zero=zero if with_v else None,
        rotation=Rotation(q, torch.full_like(q, torch.nan), POSITIONS, *angles(half), interleaved),
    )  # fmt: skip


def outcome(call: WriteCall, write: Any) -> list[torch.Tensor]:
    write(call)
    assert call.rotation is not None
    return [x for x in (call.k_cache, call.v_cache, call.rotation.rotated) if x is not None]


@pytest.mark.parametrize(("stored", "interleaved"), ROTATIONS)
def test_rope_write_kv_has_the_bits_of_torch_s_operators(stored: torch.dtype, interleaved: bool) -> None:
    options: dict[str, Any] = {"half": 7, "interleaved": interleaved, "dtype": torch.float16}
    writer = triton_cache.writer(Target("interpreter"))
    found, wanted = outcome(a_call(stored, **options), writer), outcome(a_call(stored, **options), torch_cache.write)
    assert all(map(close, found, wanted))


@pytest.mark.parametrize("half", [1, 10])
def test_keys_alone_are_rotated_and_written(half: int) -> None:
    options: dict[str, Any] = {"half": half, "interleaved": False, "dtype": torch.float32, "with_v": False}
    writer = triton_cache.writer(Target("interpreter"))
    for stored in (torch.float16, INT4):
        found, wanted = (outcome(a_call(stored, **options), write) for write in (writer, torch_cache.write))
        assert all(map(close, found, wanted))


@pytest.mark.parametrize("stored", [torch.float16, torch.float8_e5m2, INT4], ids=name_of)
@pytest.mark.parametrize("rotate", [False, True], ids=["write_kv", "rope_write_kv"])
def test_the_unspecialised_template_stores_the_same_bits(stored: torch.dtype, rotate: bool) -> None:
    template = import_source((paths.data("templates") / codegen.CACHE_OPS).read_text(encoding="utf-8"))

    def write(call: WriteCall) -> None:
        form = triton_cache.form_of(call, native_float8=False)
        template.launch_write_kv(**triton_cache.operands(call), **codegen.write_bindings(form))

    found = []
    for run in (write, triton_cache.writer(Target("interpreter"))):
        call = a_call(stored, half=7, interleaved=True, dtype=torch.float32)
        if not rotate:
            call.rotation = None
        run(call)
        found.append((call.k_cache, call.v_cache))
    assert all(map(same, *found))


@pytest.mark.parametrize("stored", STORED, ids=name_of)
def test_copy_blocks_copies_whole_blocks_of_any_dtype_and_nothing_else(stored: torch.dtype) -> None:
    order = ORDERS[STORED.index(stored) % len(ORDERS)]
    k_cache, v_cache = caches(order, stored, blocks=6, size=24)
    wanted = k_cache.clone(), v_cache.clone()
    for cache in wanted:
        cache[3], cache[5] = cache[0], cache[1]
    pairs = torch.tensor([[0, 3, 9], [1, 5, 9]])[:, :2]  # rows of something wider
    pagegen.copy_blocks(k_cache, v_cache, pairs)
    assert same(k_cache, wanted[0])
    assert same(v_cache, wanted[1])
    pagegen.copy_blocks(k_cache, None, [(3, 1)])
    assert same(k_cache[1], wanted[0][0])
    assert same(v_cache, wanted[1])


def test_a_cache_of_more_than_2_to_the_31_elements_is_written_and_copied_at_its_end() -> None:
    blocks = 2**31 // (16 * 8 * 128) + 3
    cache = torch.empty(blocks, 16, 8, 128, dtype=torch.int8)  # 2 GiB of addresses; pages nobody touches are not there
    k = torch.arange(8 * 128).view(1, 8, 128).remainder(100).float()
    pagegen.write_kv(k, None, cache, None, torch.tensor([blocks * 16 - 1]))
    pagegen.copy_blocks(cache, None, [(blocks - 1, blocks - 2)])
    assert torch.equal(cache[-1, 15].float(), k[0])
    assert torch.equal(cache[-2, 15].float(), k[0])


@pytest.mark.parametrize("rotate", [False, True], ids=["write_kv", "rope_write_kv"])
@pytest.mark.parametrize("stored", STORED, ids=name_of)
def test_one_kernel_is_launched_whatever_is_asked_for(stored: torch.dtype, rotate: bool) -> None:
    call = a_call(stored, half=7, interleaved=False, dtype=torch.float32)
    if not rotate:
        call.rotation = None
    source = codegen.render_write(triton_cache.form_of(call, native_float8=False))
    assert source.count("_kernel[") == 1


def test_nothing_is_compiled_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    call = a_call(torch.int8, half=3, interleaved=True, dtype=torch.float16)
    writer = triton_cache.writer(Target("interpreter"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="this write to a cache is not compiled yet: make one such call before"):
        writer(call)
    with pytest.raises(RuntimeError, match="this copy of blocks is not compiled yet"):
        pagegen.copy_blocks(torch.zeros(2, 7, 3, 8), None, [(0, 1)])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    writer(call)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    writer(call)
