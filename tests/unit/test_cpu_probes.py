"""The probes read what they say they read, and give rates that a machine can have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagegen.spec import CacheLayout
from pagegen.targets import cpu, cpu_device, cpu_probes
from pagegen.targets.cpu_probes import Walk

pytestmark = pytest.mark.skipif(cpu.compiler() is None, reason="needs a C++ compiler")


def words(*tensors: torch.Tensor) -> int:
    """The sum of the 32-bit words of contiguous tensors modulo 2^32, as numpy has it."""
    parts = [t.contiguous().view(torch.uint8).numpy().reshape(-1).view(np.uint32) for t in tensors]
    return sum(int(part.sum(dtype=np.uint64)) for part in parts) % 2**32


def random_cache(layout: CacheLayout, blocks: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    size = blocks * layout.block_size * heads * dim * dtype.itemsize
    return layout.view(torch.randint(256, (size,), dtype=torch.uint8).view(dtype), heads, dim)


@pytest.mark.parametrize("size", [64, 4096, 1_000_000 // 64 * 64])
@pytest.mark.parametrize("threads", [1, 3])
def test_reading_sums_every_word_once_on_any_number_of_threads(size, threads):
    memory = torch.randint(256, (size,), dtype=torch.uint8)
    assert cpu_probes.read(memory, threads) == words(memory)


def test_reading_leaves_out_what_is_less_than_a_line():
    memory = torch.randint(256, (100,), dtype=torch.uint8)
    assert cpu_probes.read(memory) == words(memory[:64])


def test_reading_refuses_memory_with_gaps():
    with pytest.raises(ValueError, match="memory must be contiguous"):
        cpu_probes.read(torch.zeros(64, 64)[:, :32])


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize(
    "walk",
    [
        Walk(), Walk(streams=1, ahead=0), Walk(tile=16, streams=2, ahead=8, split=16), Walk(heads=8, ahead=4),
        Walk(tile=256, streams=16, split=256), Walk(tile=48, streams=3, split=96, heads=2),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("block_size", "dim", "dtype"), [(16, 128, torch.bfloat16), (24, 80, torch.int8)])
def test_a_walk_reads_each_row_of_every_sequence_once_and_no_other(order, walk, block_size, dim, dtype):
    layout = CacheLayout(block_size=block_size, order=order)
    k, v = (random_cache(layout, 60, 3, dim, dtype) for _ in range(2))
    lens = torch.tensor([300, 1, 0, 97], dtype=torch.int32)
    table = torch.randperm(60).to(torch.int32)[:52].view(4, 13) if block_size == 24 else _long_table(lens)
    rows = []
    for blocks, length in zip(table.long(), lens.tolist(), strict=True):
        needed = blocks[: -(-length // block_size)]
        rows += [cache[needed].flatten(0, 1)[:length] for cache in (k, v)]
    assert walk(k, v, table, lens, threads=2) == words(*rows)
    assert walk(k, None, table, lens, threads=1) == words(*rows[::2])


def _long_table(lens: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 for every sequence, entries past its end out of any cache: they must not be followed."""
    table = torch.full((len(lens), 19), 2**31 - 1, dtype=torch.int32)
    ids = torch.randperm(60).to(torch.int32)
    at = 0
    for row, length in zip(table, lens.tolist(), strict=True):
        n = -(-length // 16)
        row[:n] = ids[at : at + n]
        at += n
    return table


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"streams": 3}, "streams must divide tile"),
        ({"split": 100}, "split must be a multiple of tile"),
        ({"ahead": 9}, "ahead must be 0 to 8"),
        ({"heads": 0}, "at least 1"),
    ],
)
def test_a_walk_refuses_constants_that_no_kernel_has(wrong, message):
    with pytest.raises(ValueError, match=message):
        Walk(**wrong)


def test_a_walk_refuses_rows_that_are_not_whole_words():
    cache = torch.zeros(2, 16, 1, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="whole 32-bit words"):
        Walk()(cache, None, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))


def test_peaks_are_what_a_cpu_can_do_and_products_of_narrow_types_are_not_slower_than_float32():
    single, pairs, fours = (cpu_probes.peak_gflops(kind, threads=1, seconds=0.02) for kind in cpu_probes.PEAKS)
    assert 0.1 < single < 10_000
    for narrow in (pairs, fours):
        assert narrow == 0 or narrow > 0.8 * single, "the better of several samples each"
    with pytest.raises(ValueError, match="kind must be one of float32, bfloat16, int8, got 'int4'"):
        cpu_probes.peak_gflops("int4")


def test_the_bandwidth_of_a_device_is_that_of_the_probe():
    assert 0.1 < cpu_device.read_bandwidth_gb_s(seconds=0.02) < 10_000


def test_without_a_compiler_the_bandwidth_is_said_to_be_unknown(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(cpu_probes, "library", cpu_probes.library.__wrapped__)
    assert cpu_device.read_bandwidth_gb_s() == 0.0
