"""Swapping to host memory and back: exact, with prefixes shared again, and refused without room."""

from __future__ import annotations

import pytest
import torch

from pagegen import BlockAllocator, CacheLayout, OutOfBlocks, PagedKVCache

SIZE = 4


def computed(allocator, seq_id, tokens, **options):
    hit = allocator.add(seq_id, tokens, **options)
    allocator.mark_computed(seq_id, len(tokens))
    return hit


@pytest.fixture
def allocator():
    made = BlockAllocator(8, SIZE, num_host_blocks=6)
    yield made
    made.check_invariants()


def test_a_swapped_sequence_keeps_its_id_length_tokens_and_what_is_computed(allocator):
    allocator.add("a", range(10), context=b"x")
    allocator.mark_computed("a", 7)
    before, blocks = allocator.sequence("a"), allocator.block_ids("a")
    pairs = allocator.swap_out("a")
    assert [device for device, _ in pairs] == blocks and sorted(host for _, host in pairs) == [0, 1, 2]
    allocator.check_invariants()
    assert allocator.is_swapped("a") and (allocator.length("a"), allocator.computed("a")) == (10, 7)
    assert allocator.sequence("a").tokens == before.tokens and allocator.sequence("a").context == b"x"
    allocator.add("other", range(50, 82))  # all blocks of the device
    allocator.free("other")
    again = allocator.swap_in("a")
    assert [host for _, host in again] == [host for _, host in pairs]
    assert [device for device, _ in again] == allocator.block_ids("a")
    after = allocator.sequence("a")
    assert (after.tokens, after.computed, after.indexed) == (before.tokens, 7, before.indexed)
    assert not allocator.is_swapped("a") and allocator.stats().free_host_blocks == 6


def test_blocks_are_given_back_and_what_others_refer_to_stays_theirs(allocator):
    computed(allocator, "a", range(10))
    allocator.fork("a", "b")
    shared = allocator.block_ids("b")
    assert len(allocator.swap_out("a")) == 3
    assert allocator.block_ids("b") == shared and allocator.stats().used_blocks == 3
    allocator.add("other", range(50, 70))
    assert not set(allocator.block_ids("other")) & set(shared)


def test_what_can_still_be_found_is_shared_again_and_not_copied(allocator):
    computed(allocator, "a", range(10))
    blocks = allocator.block_ids("a")
    allocator.swap_out("a")
    assert computed(allocator, "b", [*range(8), 77]) == 8  # found while "a" is away
    pairs = allocator.swap_in("a")
    assert allocator.block_ids("a")[:2] == blocks[:2] == allocator.block_ids("b")[:2]
    assert [device for device, _ in pairs] == allocator.block_ids("a")[2:]


def test_blocks_that_were_evicted_meanwhile_are_findable_again_after_the_swap(allocator):
    computed(allocator, "a", range(12))
    allocator.swap_out("a")
    allocator.add("filler", range(50, 82))
    allocator.check_invariants()
    allocator.free("filler")
    assert len(allocator.swap_in("a")) == 3
    assert allocator.add("b", range(13)) == 12


def test_a_swapped_sequence_grows_and_is_computed_as_before(allocator):
    computed(allocator, "a", range(6))
    allocator.swap_out("a")
    allocator.swap_in("a")
    assert allocator.append_each(["a"], [6]) == [] and allocator.append("a", [7, 8]) == []
    allocator.mark_computed("a", 9)
    assert allocator.sequence("a").tokens == list(range(9)) and allocator.add("b", range(9)) == 8


def test_the_host_pool_says_when_it_is_full_and_nothing_moves(allocator):
    computed(allocator, "a", range(16))
    computed(allocator, "b", range(50, 62))
    allocator.swap_out("a")
    with pytest.raises(OutOfBlocks, match="3 host blocks are needed but 2 are free") as error:
        allocator.swap_out("b")
    assert (error.value.needed, error.value.free, error.value.pool) == (3, 2, "host")
    assert not allocator.is_swapped("b") and len(allocator.block_ids("b")) == 3
    allocator.free("a")
    assert allocator.stats().free_host_blocks == 6 and len(allocator.swap_out("b")) == 3


def test_swapping_in_needs_room_on_the_device():
    allocator = BlockAllocator(4, SIZE, num_host_blocks=4)
    computed(allocator, "a", range(12))
    allocator.swap_out("a")
    allocator.add("b", range(50, 58))
    assert not allocator.can_swap_in("a")
    with pytest.raises(OutOfBlocks) as error:
        allocator.swap_in("a")
    assert (error.value.needed, error.value.free, error.value.pool) == (1, 0, "device")  # two can still be found
    assert allocator.is_swapped("a")
    allocator.free("b")
    assert allocator.can_swap_in("a", lookahead=4) and not allocator.can_swap_in("a", lookahead=5)
    with pytest.raises(ValueError, match="lookahead must be at least 0, got -1"):
        allocator.can_swap_in("a", lookahead=-1)
    assert allocator.swap_in("a")
    allocator.check_invariants()


def test_the_watermark_is_kept_from_who_comes_back_unless_the_device_is_empty():
    allocator = BlockAllocator(4, SIZE, prefix_caching=False, watermark=1, num_host_blocks=8)
    for seq_id, length in (("a", 12), ("b", 1)):
        allocator.add(seq_id, [1] * length) if seq_id == "a" else None
    allocator.append("a", [1] * 4)  # grows into the watermark
    allocator.swap_out("a")
    allocator.add("b", [1])
    with pytest.raises(OutOfBlocks) as error:
        allocator.swap_in("a")
    assert (error.value.needed, error.value.free) == (4, 2)
    allocator.free("b")
    assert allocator.can_swap_in("a") and len(allocator.swap_in("a")) == 4
    allocator.check_invariants()


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a.append("a", [1]),
        lambda a: a.append_each(["b", "a"], [1, 1]),
        lambda a: a.fork("a", "child"),
        lambda a: a.truncate("a", 1),
        lambda a: a.mark_computed("a", 5),
        lambda a: a.mark_all_computed(["a"]),
        lambda a: a.abandon(["a"]),
        lambda a: a.swap_out("a"),
        lambda a: a.block_ids("a"),
    ],
)
def test_every_other_operation_on_a_swapped_sequence_is_refused(allocator, call):
    for seq_id in "ab":
        allocator.add(seq_id, [1] * 5)
    allocator.swap_out("a")
    with pytest.raises(ValueError, match="'a': swap it in first"):
        call(allocator)
    assert allocator.length("b") == 5
    allocator.free("a")
    assert allocator.stats().free_host_blocks == 6


def test_only_a_swapped_sequence_can_be_swapped_in(allocator):
    allocator.add("a", [1])
    for call in (allocator.swap_in, allocator.can_swap_in):
        with pytest.raises(ValueError, match="swapped out, got 'a', which is not"):
            call("a")
    for call in (allocator.swap_in, allocator.swap_out, allocator.is_swapped):
        with pytest.raises(KeyError, match="nobody"):
            call("nobody")


def test_a_sequence_of_no_tokens_can_be_swapped(allocator):
    allocator.add("a", [])
    assert allocator.swap_out("a") == [] and allocator.is_swapped("a") and allocator.swap_in("a") == []


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_keys_and_values_come_back_bit_by_bit(order, dtype):
    layout = CacheLayout(block_size=SIZE, order=order)
    cache = PagedKVCache(3, 8, layout, 2, 8, 6, dtype=dtype, prefix_caching=False, num_host_blocks=8)
    cache.add("a", range(10))
    cache.batch(["a"])
    generator = torch.Generator().manual_seed(0)
    for pool in cache.pools:
        pool.view(torch.uint8).copy_(
            torch.randint(0, 256, (pool.view(torch.uint8).numel(),), generator=generator, dtype=torch.uint8)
        )

    def contents():
        blocks = torch.tensor(cache.block_ids("a"))
        views = [view(layer) for layer in range(3) for view in (cache.k_cache, cache.v_cache)]
        return [view.contiguous().view(torch.uint8)[blocks].flatten(0, 1)[:10] for view in views]

    before, blocks = contents(), cache.block_ids("a")
    cache.swap_out("a")
    cache.add("other", range(50, 58))  # takes the very blocks
    for pool in cache.pools:
        pool.view(torch.uint8).fill_(0)
    cache.swap_in("a")
    assert cache.block_ids("a") != blocks
    assert all(torch.equal(a, b) for a, b in zip(before, contents(), strict=True))
    cache.check_invariants()
