"""Sliding windows: what no query sees any more is given back, and no more than that."""

from __future__ import annotations

import pytest
import torch

import pagegen
from pagegen import BlockAllocator, CacheLayout, OutOfBlocks, PagedKVCache

SIZE = 4


def decode(allocator, seq_id, steps):
    for step in range(steps):
        allocator.append(seq_id, [500 + step])
        allocator.mark_computed(seq_id, allocator.length(seq_id))
        allocator.check_invariants()


def visible_blocks(start, length, window, size):
    """The blocks that some query at `start` or behind sees, found key by key."""
    positions = {key for query in range(start, length) for key in range(max(0, query - window + 1), query + 1)}
    return {position // size for position in positions}


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 13, 100])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_just_the_blocks_that_no_query_of_the_step_or_behind_sees_are_given_back(window, size):
    allocator = BlockAllocator(60, size, window=window)
    allocator.add("a", range(11))
    for start, length in ((0, 6), (6, 7), (7, 11), (11, 12), (12, 20), (20, 21)):
        if length > allocator.length("a"):
            allocator.append("a", range(allocator.length("a"), length))
        allocator.mark_computed("a", length)
        allocator.check_invariants()
        view = allocator.sequence("a")
        assert set(range(view.released, len(view.blocks))) >= visible_blocks(start, length, window, size)
        assert view.released == max(0, start - window + 1) // size
        assert allocator.block_ids("a")[: view.released] == [0] * view.released
        assert allocator.stats().used_blocks == len(view.blocks) - view.released


def test_a_long_decode_lives_in_as_many_blocks_as_its_window_needs():
    allocator = BlockAllocator(4, SIZE, window=8)
    allocator.add("a", range(6))
    allocator.mark_computed("a", 6)
    decode(allocator, "a", 100)
    assert allocator.length("a") == 106 and allocator.stats().used_blocks <= 4
    without = BlockAllocator(4, SIZE)
    without.add("a", range(6))
    with pytest.raises(OutOfBlocks):
        decode(without, "a", 100)


def test_what_a_step_computes_can_be_taken_back_and_older_tokens_cannot():
    allocator = BlockAllocator(20, SIZE, window=5)
    allocator.add("a", range(22))
    allocator.mark_computed("a", 22)
    allocator.append("a", range(22, 28))  # speculation
    allocator.mark_computed("a", 28)  # the first 4 blocks are gone: a query at 22 sees 18 and behind
    for length in (25, 22):
        allocator.truncate("a", length)
        allocator.check_invariants()
    allocator.truncate("a", 20)  # a query at 20 sees 16 and behind, which is still there
    for length in (19, 16, 15, 1):
        with pytest.raises(ValueError, match="length must be 0 or at least 20, got"):
            allocator.truncate("a", length)
    assert allocator.length("a") == 20
    allocator.truncate("a", 0)
    assert allocator.stats().used_blocks == 0
    allocator.append("a", range(9))
    allocator.mark_computed("a", 9)
    allocator.check_invariants()


def test_blocks_given_back_are_found_by_prefix_as_long_as_they_are_cached():
    allocator = BlockAllocator(20, SIZE, window=4)
    allocator.add("a", range(20))
    allocator.mark_computed("a", 20)
    decode(allocator, "a", 5)
    assert allocator.sequence("a").released == 5
    assert allocator.add("b", range(9)) == 8  # of the blocks that "a" gave back
    allocator.check_invariants()


def test_a_prefix_is_found_though_its_beginning_is_evicted_since_no_query_sees_that():
    allocator = BlockAllocator(8, SIZE, window=4)
    allocator.add("a", range(20))
    allocator.mark_computed("a", 20)
    decode(allocator, "a", 1)
    allocator.add("filler", range(100, 124))  # the two free blocks, and those given back first
    allocator.check_invariants()
    allocator.free("filler")
    assert allocator.add("b", range(21)) == 20
    assert allocator.sequence("b").released == 4 and allocator.block_ids("b")[4] == allocator.block_ids("a")[4]
    assert allocator.block_ids("b")[:4] == [0] * 4
    allocator.check_invariants()
    assert allocator.add("short", range(9)) == 0  # here the beginning would be seen


def test_a_prefix_whose_unseen_block_is_evicted_by_the_very_admission_that_found_it_stays_known():
    cache = BlockAllocator(4, 2, window=1)
    cache.add("first", [1, 2, 3])
    cache.mark_computed("first", 3)
    cache.free("first")
    assert cache.add("second", [1, 2, *range(10, 17)]) == 2  # takes all four blocks
    cache.check_invariants()
    cache.mark_computed("second", 9)
    cache.check_invariants()


def test_only_tokens_that_are_the_same_from_the_start_on_are_found():
    allocator = BlockAllocator(40, SIZE, window=4)
    allocator.add("a", range(20))
    allocator.mark_computed("a", 20)
    assert allocator.add("b", [99, *range(1, 21)]) == 0
    assert allocator.add("c", [*range(20), 5], context=b"x") == 0


def test_forks_of_a_windowed_sequence_share_and_release_apart():
    allocator = BlockAllocator(30, SIZE, window=6)
    allocator.add("a", range(18))
    allocator.mark_computed("a", 18)
    allocator.fork("a", "b")
    decode(allocator, "b", 20)
    view = allocator.sequence("a")
    assert view.tokens == list(range(view.released * SIZE, 18)) and allocator.sequence("b").released == 8
    decode(allocator, "a", 3)


def test_a_swapped_window_comes_back_as_it_was():
    allocator = BlockAllocator(20, SIZE, window=6, num_host_blocks=4)
    allocator.add("a", range(18))
    allocator.mark_computed("a", 18)
    decode(allocator, "a", 2)
    before = allocator.sequence("a")
    assert len(allocator.swap_out("a")) == len(before.blocks) - before.released == 2
    allocator.check_invariants()
    allocator.add("filler", range(100, 180))
    allocator.free("filler")
    allocator.swap_in("a")
    after = allocator.sequence("a")
    assert (after.tokens, after.released, after.length) == (before.tokens, before.released, before.length)
    decode(allocator, "a", 9)


def test_room_is_counted_without_what_a_found_prefix_does_not_need():
    allocator = BlockAllocator(6, SIZE, window=4)
    allocator.add("a", range(20))
    allocator.mark_computed("a", 20)
    allocator.append("a", [1])
    allocator.mark_computed("a", 21)
    tokens = [*range(20), 7, 8, 9, 10, 11]
    assert allocator.stats().used_blocks == 2
    assert allocator.can_admit(25, tokens=tokens) and allocator.add("b", tokens) == 20
    allocator.check_invariants()


def test_a_batch_of_a_windowed_cache_names_no_prefix_groups_and_tables_no_lost_blocks():
    cache = PagedKVCache(1, 40, CacheLayout(block_size=SIZE), 1, 8, window=6)
    cache.add("a", range(18))
    cache.batch(["a"])
    cache.fork("a", "b")
    for _ in range(8):
        for seq_id in "ab":
            cache.append(seq_id, [3])
        batch = cache.batch(["a", "b"])
    assert batch.prefix_groups == ()
    for row, seq_id in enumerate("ab"):
        assert batch.block_table[row].tolist() == cache.block_ids(seq_id)
        assert int(batch.slot_mapping[row]) == cache.block_ids(seq_id)[25 // SIZE] * SIZE + 25 % SIZE
    cache.check_invariants()


@pytest.mark.parametrize(("window", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_wrong_window_is_refused(window, error):
    with pytest.raises(error, match="window"):
        BlockAllocator(4, 4, window=window)


@pytest.mark.parametrize("window", [3, 9])
def test_attention_over_a_windowed_cache_is_attention_over_one_that_keeps_everything(window):
    """Table entries of blocks given back are 0: whatever lies there must not matter."""
    torch.manual_seed(0)
    keys, values, queries = (torch.randn(60, heads, 8) for heads in (1, 1, 2))
    caches = [
        PagedKVCache(1, 24, CacheLayout(block_size=SIZE), 1, 8, dtype="float32", window=given)
        for given in (window, None)
    ]
    for cache in caches:
        cache.add("in block 0", [1])
        cache.add("a", range(18))
        assert cache.block_ids("in block 0") == [0]
        for view in (cache.k_cache(0), cache.v_cache(0)):
            view[0] = torch.nan
    for _ in range(20):
        results = []
        for cache in caches:
            batch = cache.batch(["a"])
            at = batch.slot_mapping // SIZE, batch.slot_mapping % SIZE
            cache.k_cache(0)[at], cache.v_cache(0)[at] = keys[batch.positions], values[batch.positions]
            results.append(
                pagegen.reference_attention(
                    queries[batch.positions], cache.k_cache(0), cache.v_cache(0), batch.block_table, batch.seq_lens,
                    query_start_loc=batch.query_start_loc, window=window,
                )
            )  # fmt: skip
            cache.append("a", [7])
        assert torch.equal(*results)
    assert caches[0].allocator.sequence("a").released > 4
