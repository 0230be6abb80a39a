"""A copied or unpickled cache is a cache of its own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from pagegen import BatchBuffers, CacheLayout, GroupedKVCache, PagedKVCache
from pagegen.cache import BlockAllocator

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_allocator_goes_on_from_where_the_original_was_and_leaves_it_alone(way):
    original = BlockAllocator(16, 4, num_host_blocks=4)
    original.add("x", range(6))
    original.mark_computed("x", 6)
    copied = COPIES[way](original)
    copied.append("x", [6, 7, 8])
    copied.mark_computed("x", 9)
    assert list(copied.sequence("x").tokens) == list(range(9)) and list(original.sequence("x").tokens) == list(range(6))
    assert copied.add("y", [*range(8), 99]) == 8 and copied.add("z", [0, 0, 0, 0, 9]) == 0
    for i in range(20):  # the table grows
        copied.add(i, [i])
        copied.free(i)
    copied.swap_out("z")
    copied.check_invariants()
    original.check_invariants()
    assert original.stats().num_sequences == 1


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_cache_has_memory_of_its_own_that_its_copies_of_blocks_go_to(way):
    original = PagedKVCache(2, 8, CacheLayout(block_size=4), num_kv_heads=1, head_dim=8, dtype=torch.float32)
    original.add("x", range(6))
    original.batch(["x"])
    original.k_cache(1)[:] = 1.0
    copied = COPIES[way](original)
    copied.fork("x", "y")
    copied.append("y", [7])  # writes into a shared block: it is copied
    (block,) = set(copied.block_ids("y")) - set(copied.block_ids("x"))
    copied.k_cache(1)[block] = 3.0
    assert (copied.k_cache(1) == 3.0).sum() == 32 and (original.k_cache(1) == 1.0).all()
    copied.pools[0].zero_()  # what a compiled step writes to
    assert not copied.k_cache(1).any() and (original.k_cache(1) == 1.0).all()
    copied.check_invariants()
    groups = copy.deepcopy(GroupedKVCache([PagedKVCache(1, 8, CacheLayout(block_size=4), num_kv_heads=1, head_dim=8)]))
    groups.add("x", range(5))
    groups.check_invariants()


def test_buffers_are_not_copied():
    buffers = BatchBuffers(2, 4, 2)
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="BatchBuffers cannot be copied or pickled"):
            refused(buffers)
