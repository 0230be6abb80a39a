"""`write_kv`, `copy_blocks` and the device description of the CPU target."""

from __future__ import annotations

import pytest
import torch
from batches import ORDERS, make_batch

from pagegen.spec import AttentionSpec
from pagegen.targets import cpu, cpu_device

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
pytestmark = pytest.mark.skipif(cpu.compiler() is None, reason="needs a C++ compiler")


def caches(order: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned caches of 4 or more blocks, 6 slots each, 3 heads, head dims 20 and 17."""
    spec = AttentionSpec(
        num_q_heads=3, num_kv_heads=3, head_dim=20, v_head_dim=17, q_dtype=torch.float32, kv_dtype=dtype
    )
    batch = make_batch(spec, [(25, 1)], block_size=6, order=order)
    return batch.k_cache, batch.v_cache


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cache_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_write_stores_each_token_at_its_slot_and_nothing_elsewhere(
    order: str, cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    k_cache, v_cache = caches(order, cache_dtype)
    wanted_k, wanted_v = k_cache.clone(), v_cache.clone()
    # one matrix product gives q, k and v side by side: k and v are strided
    wide = torch.randn(5, 3, 50).to(dtype)
    k, v = wide[..., :20], wide[..., 20:37]
    slots = torch.tensor([17, -1, 0, 23, 6])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted_k[slot // 6, slot % 6] = k[token].to(cache_dtype)
            wanted_v[slot // 6, slot % 6] = v[token].to(cache_dtype)
    cpu.write_kv(k, v, k_cache, v_cache, slots)
    assert same(k_cache, wanted_k)
    assert same(v_cache, wanted_v)


def test_write_rounds_as_torch_does() -> None:
    hard = [0.0, -0.0, 1e-8, 6e-8, 3e-5, 65504.0, 65519.9, 65520.0, 1e30, float("inf"), -float("inf"), float("nan")]
    values = torch.tensor(hard + torch.randn(500).tolist() + (torch.randn(500) * 1e-6).tolist())
    for dtype in (torch.float16, torch.bfloat16):
        k_cache, v_cache = (torch.empty(1, 1, 1, len(values), dtype=dtype) for _ in range(2))
        rows = values.view(1, 1, -1)
        cpu.write_kv(rows, rows, k_cache, v_cache, torch.tensor([0]))
        torch.testing.assert_close(k_cache.flatten(), values.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_many_tokens_are_written_by_several_threads() -> None:
    k_cache, v_cache = (torch.zeros(64, 16, 8, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = torch.randn(2, 1000, 8, 64).bfloat16()
    slots = torch.randperm(1024)[:1000]
    cpu.write_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache.view(1024, 8, 64)[slots], k)
    assert torch.equal(v_cache.view(1024, 8, 64)[slots], v)


@pytest.mark.parametrize("order", ORDERS)
def test_copied_block_equals_its_source_and_others_stay(order: str) -> None:
    k_cache, v_cache = caches(order, torch.bfloat16)
    wanted_k, wanted_v = k_cache.clone(), v_cache.clone()
    for source, target in ((0, 3), (1, 5)):
        wanted_k[target], wanted_v[target] = k_cache[source], v_cache[source]
    cpu.copy_blocks(k_cache, v_cache, torch.tensor([[0, 3], [1, 5]]))
    assert same(k_cache, wanted_k)
    assert same(v_cache, wanted_v)


def test_chain_of_copies_reads_every_source_before_it_is_overwritten() -> None:
    k_cache = torch.arange(4.0).view(4, 1, 1, 1).clone()
    v_cache = -k_cache
    cpu.copy_blocks(k_cache, v_cache, torch.tensor([[0, 1], [1, 2]]))
    assert k_cache.flatten().tolist() == [0.0, 0.0, 1.0, 3.0]
    assert v_cache.flatten().tolist() == [0.0, 0.0, -1.0, -3.0]


def test_no_tokens_and_no_pairs_are_no_work() -> None:
    k_cache, v_cache = caches("NHD", torch.float32)
    before = k_cache.clone()
    nothing = torch.empty(0, 3, 20)
    cpu.write_kv(nothing, nothing[..., :17], k_cache, v_cache, torch.empty(0, dtype=torch.int64))
    cpu.copy_blocks(k_cache, v_cache, torch.empty(0, 2, dtype=torch.int64))
    assert same(k_cache, before)


def test_device_describes_this_cpu() -> None:
    device = cpu.current_device()
    assert device.target.kind == "cpu"
    assert device.units == torch.get_num_threads()
    assert device.memory_gib > 0
    assert 0.1 < device.bandwidth_gb_s < 10_000
    assert device is cpu.current_device(), "measured once a process"


def test_bandwidth_probe_reads_memory_that_no_cache_holds() -> None:
    assert cpu_device.last_level_cache_bytes() < 2**32
    assert 0.1 < cpu_device.read_bandwidth_gb_s(seconds=0.05) < 10_000
