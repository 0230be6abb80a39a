"""Memory of caches on the CPU: huge pages where there are some, zero, and no one else's."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from pagegen.cache import PagedKVCache
from pagegen.spec import CacheLayout
from pagegen.targets import huge_pages
from pagegen.targets.huge_pages import HUGE_PAGE, huge_memory

needs_advice = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages")


@needs_advice
def test_memory_of_a_huge_page_or_more_begins_at_one() -> None:
    for size in (HUGE_PAGE, 3 * HUGE_PAGE + 7):
        memory = huge_memory(size)
        assert memory.shape == (size,)
        assert memory.data_ptr() % HUGE_PAGE == 0
        assert not memory.any()
        memory.fill_(3)
        assert int(memory.sum()) == 3 * size


@pytest.mark.parametrize("size", [0, 1, HUGE_PAGE - 1])
def test_less_is_ordinary_memory(size: int) -> None:
    assert torch.equal(huge_memory(size), torch.zeros(size, dtype=torch.uint8))


@needs_advice
def test_views_keep_the_memory_and_nothing_else_does() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE

    gc.collect()
    before, size = mapped(), 64 * HUGE_PAGE
    view = huge_memory(size).view(torch.bfloat16)[-5:]
    view.fill_(1.0)
    assert view.tolist() == [1.0] * 5
    assert mapped() >= before + size
    del view
    gc.collect()
    assert mapped() < before + size


def test_a_system_that_refuses_the_advice_gives_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("Invalid argument")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Refusing)
    assert not huge_memory(HUGE_PAGE + 1).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8", "float32"])
def test_a_cache_is_zero_and_its_keys_and_values_lie_apart(dtype: str) -> None:
    cache = PagedKVCache(2, 256, CacheLayout(block_size=16, order="HND"), 4, 128, 64, dtype=dtype)
    keys, values = cache.pools
    assert keys.numel() == 2 * 256 * 16 * 4 * 128 == 2 * values.numel()
    assert not keys.view(torch.uint8).any() and not values.view(torch.uint8).any()
    keys.view(torch.uint8).fill_(1)
    assert not values.view(torch.uint8).any()
    assert cache.k_cache(1).shape == (256, 16, 4, 128)
    assert keys.data_ptr() % HUGE_PAGE == 0 or not hasattr(mmap, "MADV_HUGEPAGE")
