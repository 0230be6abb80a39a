"""Writing to caches on a real GPU: the bits of the CPU kernels, and CUDA-graph capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pagegen

pytestmark = pytest.mark.gpu

BLOCKS, BLOCK, HEADS, Q_HEADS, DIM, TOKENS = 40, 16, 8, 32, 128, 300
INT4 = torch.int4  # type: ignore[attr-defined]
STORED = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, INT4)


def operands(stored: torch.dtype, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(TOKENS, heads, DIM, generator=generator).bfloat16() for heads in (Q_HEADS, HEADS, HEADS))
    k[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30])
    v[:, :, 0] *= 1e4
    slots = torch.randperm(BLOCKS * BLOCK, generator=generator)[:TOKENS]
    slots[::7] = -1
    angles = torch.outer(torch.arange(512.0), 0.9 ** torch.arange(48.0))
    storage, width = (torch.uint8, DIM // 2) if stored == INT4 else (stored, DIM)
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v,
        "positions": torch.randint(0, 512, (TOKENS,), generator=generator),
        "cos": angles.cos(), "sin": angles.sin(),
        "k_cache": torch.zeros(BLOCKS, BLOCK, HEADS, width).to(storage),
        "v_cache": torch.zeros(BLOCKS, BLOCK, HEADS, width).to(storage),
        "slot_mapping": slots,
        "k_scale": 0.05 + torch.rand(BLOCKS, BLOCK, HEADS, generator=generator),
        "v_scale": torch.tensor([0.37, 1.9] * (HEADS // 2)),
    }  # fmt: skip
    if stored in (torch.int8, INT4):
        given["k_zero"] = torch.randn(BLOCKS, BLOCK, HEADS, generator=generator)
    return {**{name: value.to(device) for name, value in given.items()}, "kv_dtype": stored}


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_a_gpu_stores_and_returns_the_bits_of_the_cpu(stored: torch.dtype, interleaved: bool) -> None:
    found = []
    for device in ("cuda", "cpu"):
        given = operands(stored, device)
        rotated = pagegen.rope_write_kv(**given, interleaved=interleaved)
        pagegen.copy_blocks(given["k_cache"], given["v_cache"], [(0, 1), (2, 3)])
        found.append([x.cpu() for x in (rotated, given["k_cache"], given["v_cache"])])
    for gpu, cpu in zip(*found, strict=True):
        nan = gpu.isnan() & cpu.isnan() if gpu.dtype in STORED[:3] else torch.zeros(gpu.shape, dtype=torch.bool)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[gpu.element_size()]
        equal = gpu.view(integers) == cpu.view(integers)
        if gpu.dtype in STORED[3:5]:
            nan = gpu.float().isnan() & cpu.float().isnan()
        assert (equal | nan).all()


def test_dynamic_scales_and_a_write_can_be_captured_in_a_cuda_graph() -> None:
    given = operands(torch.int8, "cuda")
    scale, zero = (torch.zeros(BLOCKS, BLOCK, HEADS, device="cuda") for _ in range(2))
    k, cache, slots = given["k"].nan_to_num(0.0, 1.0, -1.0), given["k_cache"], given["slot_mapping"]

    def step() -> None:
        pagegen.update_scales(k, None, slots, scale, None, k_zero=zero, kv_dtype="int8")
        pagegen.write_kv(k, None, cache, None, slots, k_scale=scale, k_zero=zero)

    step()  # compiles
    wanted = cache.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    cache.zero_()
    scale.zero_()
    graph.replay()
    assert torch.equal(cache, wanted)
