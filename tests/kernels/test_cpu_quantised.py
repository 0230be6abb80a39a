"""The C++ kernels over quantised caches and over caches that K and V share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_cases import DECODE, HASWELL, PORTABLE, RAGGED, SHORT, Case, check, prebuild, run, same_bits

from pagegen import targets
from pagegen.spec import Target
from pagegen.targets import cpp_build, cpu

NARROW = ("float8_e4m3fn", "float8_e5m2", "int8", "int4")
# AVX-512 with a bf16 dot product but no byte tables, and without the dot product
MACHINES = {
    "native": cpp_build.NATIVE,
    "no-vbmi": (*cpp_build.NATIVE, "-mno-avx512vbmi"),
    "avx2": HASWELL,
    "portable": PORTABLE,
}


def scaled(kv_dtype: str, granularity: str, **fields: Any) -> dict[str, Any]:
    return {"kv_dtype": kv_dtype, "kv_scale_granularity": granularity, **fields}


# int8 is multiplied as it is, without a table; elsewhere e5m2 and int8 take the steps of e4m3 and int4.
BY_DAY = {
    "no-vbmi": ("float8_e4m3fn", "int4"),
    "avx2": ("float8_e4m3fn", "int4"),
    "portable": ("float8_e4m3fn", "int4"),
}
EVERYTHING = {"window": 90, "logit_softcap": 20.0, "alibi": True, "sinks": True}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CASES = [
    Case("e4m3", 4, 128, 16, fields=scaled(E4M3, "none")),
    Case("e4m3-tensor", 4, 128, 16, variant=SHORT, fields=scaled(E4M3, "tensor")),
    Case("e4m3-head", 7, 80, 24, "pool", variant=SHORT, fields=scaled(E4M3, "head")),
    Case("e4m3-token", 16, 96, 16, "HND", fields=scaled(E4M3, "token_head")),
    Case("e5m2-token", 1, 64, 16, "packed", kv_heads=5, fields=scaled(E5M2, "token_head")),
    Case("e5m2-everything", 4, 64, 8, dtype="float16", fields=scaled(E5M2, "head", **EVERYTHING)),
    Case("int8", 2, 56, 32, fields=scaled("int8", "none"), nightly=True),
    Case("int8-token", 3, 64, 16, "HND", variant=SHORT, fields=scaled("int8", "token_head")),
    Case("int8-tensor", 12, 128, 528, "pool", fields=scaled("int8", "tensor")),
    Case("int8-zero", 4, 100, 24, fields=scaled("int8", "head", kv_zero_points=True)),
    Case("int4-tensor", 5, 112, 16, fields=scaled("int4", "tensor")),
    Case("int4-token", 4, 64, 16, variant=SHORT, fields=scaled("int4", "token_head")),
    Case("int4-zero", 8, 128, 16, "HND", fields=scaled("int4", "token_head", kv_zero_points=True)),
    Case("int4-zero-panel", 16, 64, 8, "pool", fields=scaled("int4", "token_head", kv_zero_points=True), nightly=True),
    Case("int4-odd", 2, 100, 1, "packed", fields=scaled("int4", "head", v_head_dim=36)),
    Case("int4-fp32-sinks", 4, 64, 16, dtype="float32", fields=scaled("int4", "token_head", sinks=True)),
    Case("e4m3-bf16-over-fp32", 4, 64, 16, dtype="float32", variant=SHORT, nightly=True,
         fields=scaled(E4M3, "token_head")),
    # K and V shared
    Case("latent", 128, 576, 64, kv_heads=1, fields={"v_head_dim": 512, "shared_kv": True}),
    Case("latent-few", 5, 160, 16, "HND", kv_heads=1, fields={"v_head_dim": 100, "shared_kv": True}, nightly=True),
    Case("latent-fp32", 12, 96, 24, dtype="float32", kv_heads=1, nightly=True,
         fields={"v_head_dim": 64, "shared_kv": True}),
    Case("latent-e4m3", 16, 576, 64, kv_heads=1, fields=scaled(E4M3, "tensor", v_head_dim=512, shared_kv=True)),
    Case("latent-int8", 4, 192, 16, "packed", nightly=True,
         fields=scaled("int8", "token_head", v_head_dim=128, shared_kv=True)),
    Case("latent-int4", 29, 96, 16, variant=SHORT,
         fields=scaled("int4", "token_head", v_head_dim=64, shared_kv=True, kv_zero_points=True)),
]  # fmt: skip
CODES = [
    Case(f"{kv_dtype}-{name}", 1, 256, 8, kv_heads=1, machine=machine, fields=scaled(kv_dtype, "token_head", scale=1.0),
         nightly=kv_dtype not in BY_DAY.get(name, NARROW))
    for name, machine in MACHINES.items()
    for kv_dtype in NARROW
]  # fmt: skip
BY_NAME = {case.name: case for case in (*CASES, *CODES)}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    prebuild([*CASES, *CODES])


@pytest.mark.parametrize("case", [*CASES, *CODES], ids=lambda case: case.name)
def test_kernel_gives_the_reference_result_wherever_blocks_lie(case: Case) -> None:
    kernel = case.load()
    for sequences in (DECODE, RAGGED):
        batch = case.batch(sequences)
        result = check(kernel, batch)
        assert same_bits(result, run(kernel, batch.permuted()))


def stored_codes(case: Case) -> torch.Tensor:
    """[256 / block_size, block_size, 1, bytes]: every code that the cache can store, each somewhere in a row."""
    if case.fields["kv_dtype"] == "int4":
        return torch.arange(256, dtype=torch.uint8)[:128].expand(2, 8, 1, 128)
    return torch.arange(256, dtype=torch.uint8).expand(2, 8, 1, 256)


@pytest.mark.parametrize("case", CODES, ids=lambda case: case.name)
@pytest.mark.parametrize("queries", [1, 9])  # the stream way, the panel way
def test_every_code_comes_out_as_the_value_it_stands_for(case: Case, queries: int) -> None:
    batch = case.batch([(1, queries)], padded_rows=0)
    ones = torch.ones_like(batch.k_scale)
    call = batch.call()
    call.k_scale, call.v_scale = ones, ones
    call.k_cache = torch.zeros_like(stored_codes(case)).view(batch.k_cache.dtype)
    call.v_cache = stored_codes(case).view(batch.k_cache.dtype)
    call.block_table = torch.zeros(1, 1, dtype=torch.int32)
    case.load()(call)
    if batch.k_cache.dtype == torch.uint8:
        byte = torch.arange(128)
        nibbles = torch.stack([byte & 15, byte >> 4], dim=1).flatten()
        wanted = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
    else:
        wanted = call.v_cache[0, 0, 0].float()
    torch.testing.assert_close(call.out[-1, 0].float(), wanted, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("case", CODES, ids=lambda case: case.name)
@pytest.mark.parametrize("queries", [1, 9])
def test_every_code_of_a_key_scores_as_the_value_it_stands_for(case: Case, queries: int) -> None:
    codes = stored_codes(case).clone()
    integer = case.fields["kv_dtype"] in ("int8", "int4")
    values = codes.view(torch.int8 if integer else case.spec.kv_dtype)
    if not integer:
        codes[~values.float().isfinite()] = 0  # 0 * inf would be everywhere
    kernel, seen = case.load(), []
    batch = case.batch([(1, queries)] * 4, padded_rows=0)
    for start in range(0, 256, 4):
        call = batch.call()
        call.k_scale = call.v_scale = torch.ones_like(batch.k_scale)
        call.k_cache = call.v_cache = codes.view(batch.k_cache.dtype)
        call.block_table = torch.zeros(4, 1, dtype=torch.int32)
        call.q = torch.zeros(4 * queries, 1, 256, dtype=torch.bfloat16)
        call.q[queries - 1 :: queries, 0, start : start + 4] = torch.eye(4)
        kernel(call)
        assert call.lse is not None
        seen.append(call.lse[queries - 1 :: queries, 0])
    if case.fields["kv_dtype"] == "int4":
        row = codes[0, 0, 0].long()
        nibbles = torch.stack([row & 15, row >> 4], dim=1).flatten()
        wanted = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
    else:
        wanted = values[0, 0, 0].float()
    torch.testing.assert_close(torch.cat(seen), wanted, rtol=1e-6, atol=1e-9)


def test_nan_in_a_live_value_of_eight_bits_reaches_its_own_sequence_only() -> None:
    for name in (f"{E4M3}-native", f"{E5M2}-native", f"{E4M3}-avx2", f"{E5M2}-portable"):
        case = BY_NAME[name]
        batch = case.batch([(100, 1), (100, 1)])
        clean, _ = run(case.load(), batch)
        assert batch.v_cache is not None
        batch.v_cache.view(torch.uint8)[batch.block_table[1, 2], 3, 0, 5] = 0x7F
        out, _ = run(case.load(), batch)
        assert torch.equal(out[0], clean[0])
        assert out[1, :, 5].isnan().all()
        batch.k_cache.view(torch.uint8)[batch.block_table[1, 2], 3, 0, 5] = 0xFF
        out, lse = run(case.load(), batch)
        assert torch.equal(out[0], clean[0])
        assert out[1].isnan().all()
        assert lse[1].isnan().all()


def test_a_mixed_up_scale_of_keys_and_values_would_show() -> None:
    case = BY_NAME["e4m3-tensor"]
    batch = case.batch(DECODE)
    call = batch.call()
    call.k_scale, call.v_scale = call.v_scale, call.k_scale
    case.load()(call)
    expected, _ = batch.expected()
    assert (call.out.double() - expected).abs().max() > 0.3


def test_sinks_are_kept_for_quantised_caches_and_count_once() -> None:
    case = BY_NAME["int4-fp32-sinks"]
    check(case.load(), case.batch([(640, 1), (129, 1), (128, 1), (3, 1), (0, 1)]))


@pytest.mark.parametrize("name", ["e4m3-token", "int4-zero", "latent-int4", "int8-token"])
def test_result_has_the_same_bits_on_any_number_of_threads_and_alone(name: str) -> None:
    case = BY_NAME[name]
    kernel, threads = case.load(), torch.get_num_threads()
    batch = case.batch([(700, 300), (900, 1), (50, 50)])
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(kernel, batch))
    finally:
        torch.set_num_threads(threads)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
    call = batch.call()
    rows = slice(300, 301)
    call.q, call.out, call.lse = batch.q[rows], call.out[rows], call.lse[rows]  # type: ignore[index]
    call.block_table, call.seq_lens, call.query_start_loc = batch.block_table[1:2], batch.seq_lens[1:2], None
    kernel(call)
    assert same_bits((call.out, call.lse), tuple(x[rows] for x in results[0]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_dtype": "int4", "head_dim": 5}, "must be even"),
        ({"logit_softcap": 1e300}, "logit_softcap"),
        ({"scale": 1e31}, "scale of at most 1e30"),
    ],
)
def test_unsupported_says_why(change: dict[str, Any], reason: str) -> None:
    assert reason in (targets.unsupported(BY_NAME["e4m3"].spec.replace(**change), Target("cpu")) or "")


def test_every_kind_of_cache_is_supported() -> None:
    for case in BY_NAME.values():
        assert cpu.unsupported(case.spec.replace(batch_invariant=True)) is None


def test_call_without_the_scales_of_the_spec_is_refused_before_memory_is_touched() -> None:
    case = BY_NAME["e4m3-tensor"]
    call = case.batch([(100, 1)]).call()
    call.k_scale = call.v_scale = None
    with pytest.raises(ValueError, match="the call must match the kernel"):
        case.load()(call)
