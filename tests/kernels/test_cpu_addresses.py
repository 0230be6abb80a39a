"""The C++ kernels on caches of more than 2^31 elements: virtual memory in which only the used blocks are touched."""

from __future__ import annotations

import math
import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import Batch
from cpu_cases import Case, prebuild, run, same_bits
from torch import Tensor

BF16 = Case("bf16", 3, 64, 16, "HND", kv_heads=3)
LATENT = Case("latent-block-480", 16, 576, 480, kv_heads=1, fields={"v_head_dim": 512, "shared_kv": True})
WINDOW = Case("long-window", 2, 64, 16, fields={"window": 70})
PAGES = Case(
    "int8-pages", 4, 128, 64, kv_heads=8, fields={"kv_dtype": "int8", "kv_scale_granularity": "token_head"}
)  # fmt: skip
PACKED = Case(
    "int4-pages", 4, 128, 64, kv_heads=8,
    fields={"kv_dtype": "int4", "kv_scale_granularity": "token_head", "kv_zero_points": True},
)  # fmt: skip
CASES = [BF16, LATENT, WINDOW, PAGES, PACKED]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    prebuild(CASES)


def untouched(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over virtual memory that takes no room until it is written."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, span * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=span).as_strided(shape, strides)


def moved_far(batch: Batch, first_block: int, block_stride: int, slot_stride: int, head_stride: int) -> Batch:
    """The batch with its blocks at ids from `first_block` on, in caches with these strides."""
    far: dict[str, Any] = {}
    for name in ("k_cache", "v_cache"):
        near = getattr(batch, name)
        if near is not None:
            shape = (first_block + near.shape[0], *near.shape[1:])
            far[name] = untouched(shape, (block_stride, slot_stride, head_stride, 1), near.dtype)
            far[name][first_block:] = near
    for name in ("k_scale", "v_scale", "k_zero", "v_zero"):
        near = getattr(batch, name)
        if near is not None:
            shape = (first_block + near.shape[0], *near.shape[1:])
            far[name] = untouched(shape, (math.prod(near.shape[1:]), near.shape[2], 1), near.dtype)
            far[name][first_block:] = near
    table = batch.block_table.clone()
    table[(table >= 0) & (table < batch.k_cache.shape[0])] += first_block
    return replace(batch, block_table=table, **far)


@pytest.mark.parametrize(
    ("case", "first_block", "block_stride", "slot_stride", "head_stride"),
    [
        (BF16, 2**31 // 3072 + 1, 3072, 64, 1024),
        (LATENT, 7768, 480 * 576, 576, 576),
        (BF16, 4564, 1_435_968, 3 * 64, 64),
        (PAGES, 16_200, 133_120, 1024, 128),  # past 2^31
        (PAGES, 32_300, 133_120, 1024, 128),  # past 2^32
        (PACKED, 2**31 // 32768 + 1, 32768, 512, 64),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_blocks_past_two_billion_elements_are_found(
    case: Case, first_block: int, block_stride: int, slot_stride: int, head_stride: int
) -> None:
    assert first_block * block_stride > 2**31 - 1
    for sequences in ([(50, 1), (133, 1)], [(50, 1), (33, 4), (70, 20)]):
        near = case.batch(sequences)
        far = moved_far(near, first_block, block_stride, slot_stride, head_stride)
        assert same_bits(run(case.load(), near), run(case.load(), far))


def test_tokens_past_262144_are_found_where_each_takes_8192_elements() -> None:
    near = WINDOW.batch([(90, 1), (87, 3)])
    skipped = 262_144 // 16 + 8  # blocks of older tokens, which no query sees; whole splits of 128 tokens
    far = moved_far(near, skipped, 16 * 8192, 8192, 64)
    table = torch.full((2, skipped + near.block_table.shape[1]), -(2**30), dtype=torch.int32)
    table[:, skipped:] = far.block_table
    lens = far.seq_lens + skipped * 16
    assert 262_144 * 8192 == 2**31
    result = run(WINDOW.load(), replace(far, block_table=table, seq_lens=lens))
    assert same_bits(run(WINDOW.load(), near), result)


def test_queries_and_results_past_two_billion_elements_are_found() -> None:
    near = BF16.batch([(50, 3), (70, 20)], padded_rows=0)
    first, rows = 262_150, near.q.shape[0]
    call = near.call()
    assert near.query_start_loc is not None
    call.query_start_loc = near.query_start_loc + first
    shape, strides = (first + rows, *near.q.shape[1:]), (8192, 64, 1)
    call.q, call.out = (untouched(shape, strides, torch.bfloat16) for _ in range(2))
    call.lse = untouched(shape[:2], (8192, 1), torch.float32)
    call.q[first:] = near.q
    BF16.load()(call)
    assert same_bits(run(BF16.load(), near), (call.out[first:], call.lse[first:]))
