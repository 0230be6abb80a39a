"""The writing operators under torch.compile: opcheck clean with every argument, quantised caches written in place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_compile import _fresh_dynamo, compiled_code, large_buffers, uncached  # noqa: F401  fixtures
from torch.library import opcheck

import pagegen

TOKENS, HEADS, KV_HEADS, DIM, BLOCKS, BLOCK = 4, 4, 2, 16, 64, 8
LAYERS = 2
ops = torch.ops.pagegen


def rows(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(16)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    return {
        "q": torch.randn(TOKENS, HEADS, DIM, generator=generator),
        "k": torch.randn(TOKENS, KV_HEADS, DIM, generator=generator),
        "v": torch.randn(TOKENS, KV_HEADS, DIM, generator=generator),
        "slots": torch.tensor([8, -1, 10, 40]),
        "positions": torch.tensor([8, 9, 10, 8]),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def caches(dtype: torch.dtype, kv_dtype: str | None, blocks: int = 6) -> list[torch.Tensor]:
    width = DIM // 2 if kv_dtype == "int4" else DIM
    return [torch.zeros(blocks, BLOCK, KV_HEADS, width).to(dtype) for _ in range(2)]


PER_TOKEN = torch.rand(6, BLOCK, KV_HEADS, generator=torch.Generator().manual_seed(2)) + 0.1
# opcheck cannot compare float8 tensors, so float8 is given as uint8
QUANTISED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float8 per tensor": (torch.uint8, {"kv_dtype": "float8_e4m3fn", "k_scale": torch.tensor(0.5)}),
    "float8 per head": (torch.uint8, {"kv_dtype": "float8_e5m2", "v_scale": torch.tensor([0.5, 2.0])}),
    "int8 per token": (torch.int8, {"k_scale": PER_TOKEN, "v_scale": 2 * PER_TOKEN}),
    "asymmetric int4": (torch.uint8, {"kv_dtype": "int4", "k_scale": PER_TOKEN, "v_scale": PER_TOKEN,
                                      "k_zero": -PER_TOKEN, "v_zero": PER_TOKEN}),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("with_v", [True, False], ids=["k and v", "k alone"])
def test_opcheck_passes_for_writes_to_quantised_caches(name: str, with_v: bool) -> None:
    x = rows()
    dtype, options = QUANTISED[name]
    k_cache, v_cache = caches(dtype, options.get("kv_dtype"))
    if not with_v:
        options = {key: value for key, value in options.items() if not key.startswith("v_")}
    v, v_cache = (x["v"], v_cache) if with_v else (None, None)
    opcheck(ops.write_kv.default, (x["k"], v, k_cache, v_cache, x["slots"]), options)
    args = (x["q"], x["k"], v, x["positions"], x["cos"], x["sin"], k_cache, v_cache, x["slots"])
    opcheck(ops.rope_write_kv.default, args, {"interleaved": True, **options})


@pytest.mark.compat("torch", "opcheck: update_scales")
@pytest.mark.parametrize("with_v", [True, False], ids=["k and v", "k alone"])
@pytest.mark.parametrize("asymmetric", [True, False])
def test_opcheck_passes_for_update_scales(with_v: bool, asymmetric: bool) -> None:
    x = rows()
    v, v_scale = (x["v"], PER_TOKEN.clone()) if with_v else (None, None)
    zeros = {"k_zero": PER_TOKEN.clone(), "v_zero": PER_TOKEN.clone() if with_v else None} if asymmetric else {}
    args = (x["k"], v, x["slots"], PER_TOKEN.clone(), v_scale)
    opcheck(ops.update_scales.default, args, {"kv_dtype": "int4", **zeros})


def test_opcheck_passes_for_copies_of_one_cache() -> None:
    opcheck(ops.copy_blocks.default, (caches(torch.int8, None)[0], None, torch.tensor([[0, 3], [4, 5]])))


STORAGE = {
    "float8": (torch.float8_e4m3fn, None),
    "float8 as uint8": (torch.uint8, "float8_e4m3fn"),
    "int8": (torch.int8, None),
    "int4": (torch.uint8, "int4"),
}


@pytest.mark.compat("torch", "torch.compile: quantised caches are written in place")
@pytest.mark.parametrize(
    "name", ["float8 as uint8", "int4", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("float8", "int8"))]
)
def test_quantised_caches_and_their_scales_are_written_in_place_in_one_graph(name: str, uncached: None) -> None:  # noqa: F811
    dtype, kv_dtype = STORAGE[name]
    meant = kv_dtype or str(dtype).removeprefix("torch.")

    def make() -> Any:
        pools = [caches(dtype, kv_dtype, BLOCKS) for _ in range(LAYERS)]
        scales = [[torch.zeros(BLOCKS, BLOCK, KV_HEADS) for _ in range(2)] for _ in range(LAYERS)]

        def step(q, k, v, slots, positions, cos, sin):
            for (k_cache, v_cache), (k_scale, v_scale) in zip(pools, scales, strict=True):
                pagegen.update_scales(k, v, slots, k_scale, v_scale, kv_dtype=meant)
                q = q + pagegen.rope_write_kv(
                    q, k, v, positions, cos, sin, k_cache, v_cache, slots,
                    k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_dtype,
                )  # fmt: skip
                k, v = k * 1.5, v * 0.5
            return q

        return step, pools, scales

    inputs = list(rows().values())
    step, pools, scales = make()
    with torch.no_grad():
        expected = step(*inputs)
    compiled_step, compiled_pools, compiled_scales = make()
    result, code = compiled_code(compiled_step, *inputs)
    torch.testing.assert_close(result, expected)
    assert not large_buffers(code)
    writes = [line for line in code.splitlines() if "pagegen.rope_write_kv.default(" in line]
    assert len(writes) == LAYERS
    # caches and scales are the graph's own inputs, no buffers or views made in between
    own = re.compile(r", (arg\w+), (arg\w+), arg\w+, .*k_scale=(arg\w+), v_scale=(arg\w+)")
    assert len({name for line in writes for name in own.search(line).groups()}) == 4 * LAYERS, writes
    for one, other in zip(compiled_pools, pools, strict=True):
        for found, wanted in zip(one, other, strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
            assert wanted.view(torch.uint8).any()
    for one_scale, other_scale in zip(compiled_scales, scales, strict=True):
        for found, wanted in zip(one_scale, other_scale, strict=True):
            torch.testing.assert_close(found, wanted)
