"""Several groups of layers with block sizes and windows of their own: one sequence in all of them, or in none."""

from __future__ import annotations

import pytest
import torch

from pagegen.cache import (
    BatchBuffers,
    BlockAllocator,
    GroupedAllocator,
    GroupedKVCache,
    InvariantBroken,
    OutOfBlocks,
    PagedKVCache,
)
from pagegen.spec import CacheLayout

WINDOW = 6


def grouped(full=40, local=40, **options):
    """Full attention in blocks of 4, and a window of 6 in blocks of 2."""
    return GroupedAllocator([BlockAllocator(full, 4, **options), BlockAllocator(local, 2, window=WINDOW, **options)])


def computed(groups, seq_id, tokens, **options):
    hit = groups.add(seq_id, tokens, **options)
    groups.mark_computed(seq_id, len(tokens))
    groups.check_invariants()
    return hit


def everything(groups):
    return [({i: a.sequence(i) for i in a.sequences}, a.stats(), list(a.pool.free)) for a in groups.allocators]


def test_a_sequence_has_blocks_of_its_own_in_every_group():
    groups = grouped()
    assert computed(groups, "a", range(10)) == 0
    assert [len(blocks) for blocks in groups.block_ids("a")] == [3, 5]
    groups.append("a", [10])
    groups.mark_computed("a", 11)
    assert groups.block_ids("a")[1][:2] == [0, 0]  # a query at 10 sees 5 and behind
    assert (groups.length("a"), groups.computed("a")) == (11, 11)
    groups.check_invariants()


def test_a_hit_holds_in_every_group():
    groups = grouped()
    computed(groups, "a", range(10))
    assert groups.add("b", range(10)) == 8
    assert groups.block_ids("a")[0][:2] == groups.block_ids("b")[0][:2]
    assert groups.block_ids("b")[1][:1] == [0]  # a query at 8 sees 3 and behind
    assert groups.block_ids("a")[1][1:4] == groups.block_ids("b")[1][1:4]
    groups.check_invariants()


def test_what_one_group_lost_is_cached_for_none():
    groups = grouped(local=8)
    computed(groups, "a", range(12))
    groups.free("a")
    groups.allocators[1].add("rival", range(100, 112))  # evicts all but two blocks of the second group
    groups.allocators[1].free("rival")
    for allocator, known in zip(groups.allocators, (12, 4), strict=True):
        assert allocator.add("probe", range(13)) == known
        allocator.free("probe")
    assert groups.add("b", range(13)) == 4
    groups.check_invariants()


def test_a_shorter_beginning_is_taken_where_a_window_has_a_gap():
    groups = grouped()
    computed(groups, "a", range(16))
    local = groups.allocators[1]
    local.pool.make_writable(local.block_ids("a")[6])  # tokens 12 and 13 cannot be found there
    assert groups.add("b", range(17)) == 12
    local.pool.make_writable(local.block_ids("a")[5])
    assert groups.add("c", range(17)) == 8


def test_hits_are_multiples_of_every_block_size():
    groups = GroupedAllocator([BlockAllocator(20, 4), BlockAllocator(20, 6)])
    computed(groups, "a", range(30))
    assert [a.add("probe", range(30)) for a in groups.allocators] == [28, 24]
    for allocator in groups.allocators:
        allocator.free("probe")
    assert groups.add("b", range(30)) == 24 and groups.add("c", range(24)) == 12


@pytest.mark.parametrize(("full", "local", "short"), [(4, 40, 0), (40, 8, 1)])
def test_every_operation_is_done_in_all_groups_or_in_none(full, local, short):
    groups = grouped(full, local, num_host_blocks=4)
    computed(groups, "a", range(15))
    groups.fork("a", "b")
    before = everything(groups)
    for call in (
        lambda: groups.add("c", range(50, 62)),
        lambda: groups.append("b", range(20)),
        lambda: groups.append_each(["a", "b"], [1, 1]),
    ):
        with pytest.raises(OutOfBlocks, match=f"in group {short}") as error:
            call()
        assert error.value.group == short and error.value.needed > error.value.free
        assert everything(groups) == before
        groups.check_invariants()
    assert not groups.can_admit(12)


def test_a_step_that_lacks_copies_in_one_group_computes_in_none():
    groups = GroupedAllocator([BlockAllocator(8, 4), BlockAllocator(2, 4)])
    groups.add("a", range(6))
    groups.fork("a", "b")
    with pytest.raises(OutOfBlocks) as error:
        groups.mark_computed("b", 6)
    assert error.value.group == 1 and groups.computed("b") == 0
    groups.check_invariants()


def test_swapping_needs_room_in_every_group_and_moves_all_or_none():
    groups = GroupedAllocator([BlockAllocator(8, 4, num_host_blocks=8), BlockAllocator(8, 4, num_host_blocks=1)])
    computed(groups, "a", range(6))
    with pytest.raises(OutOfBlocks, match="2 host blocks are needed in group 1 but 1 are free") as error:
        groups.swap_out("a")
    assert (error.value.pool, groups.is_swapped("a")) == ("host", False)
    computed(groups, "b", [1, 2])
    assert [len(pairs) for pairs in groups.swap_out("b")] == [1, 1] and groups.is_swapped("b")
    groups.check_invariants()
    assert groups.can_swap_in("b") and [len(pairs) for pairs in groups.swap_in("b")] == [1, 1]
    groups.check_invariants()


def test_truncating_further_than_a_window_allows_changes_no_group():
    groups = grouped()
    computed(groups, "a", range(16))
    groups.append("a", [1])
    groups.mark_computed("a", 17)
    before = everything(groups)
    with pytest.raises(ValueError, match="length must be 0 or at least"):
        groups.truncate("a", 3)
    assert everything(groups) == before
    groups.truncate("a", 16)
    groups.check_invariants()


def test_an_abandoned_step_goes_back_as_far_in_every_group():
    groups = GroupedAllocator([BlockAllocator(20, 4), BlockAllocator(20, 8)])
    computed(groups, "a", range(6))
    groups.append("a", range(6, 18))
    groups.mark_computed("a", 18)
    assert groups.add("b", range(18)) == 16
    groups.abandon(["a"])
    groups.check_invariants()
    assert groups.computed("a") == groups.computed("b") == 6
    groups.mark_all_computed(["a", "b"])
    assert groups.add("c", range(18)) == 16
    groups.check_invariants()


def test_groups_that_differ_are_found():
    groups = grouped()
    computed(groups, "a", range(6))
    groups.allocators[1].append("a", [1])
    with pytest.raises(InvariantBroken, match="groups_hold_the_same_sequences: group 1"):
        groups.check_invariants()


@pytest.mark.parametrize(
    ("allocators", "error", "says"),
    [
        ([], ValueError, "one or more"),
        ([BlockAllocator(2, 2)] * 2, ValueError, "each a different one"),
        ([object()], TypeError, "BlockAllocators, got object"),
    ],
)
def test_wrong_groups_are_refused(allocators, error, says):
    with pytest.raises(error, match=says):
        GroupedAllocator(allocators)
    used = BlockAllocator(2, 2)
    used.add("a", [1])
    with pytest.raises(ValueError, match="no sequences yet"):
        GroupedAllocator([used])


def paged(local_blocks=40):
    layouts = CacheLayout(block_size=4), CacheLayout(block_size=2, order="HND")
    return GroupedKVCache(
        [
            PagedKVCache(2, 40, layouts[0], 2, 8, dtype="float32", num_host_blocks=20),
            PagedKVCache(3, local_blocks, layouts[1], 1, 4, dtype="float32", window=WINDOW, num_host_blocks=20),
        ]
    )


def write(cache, batches, tag):
    """Stores a number made of tag and position in every slot of a step, in every layer."""
    for each, batch in zip(cache.caches, batches, strict=True):
        size = each.layout.block_size
        for layer in range(each.num_layers):
            at = batch.slot_mapping // size, batch.slot_mapping % size
            each.k_cache(layer)[at] = (1000 * tag + batch.positions)[:, None, None].float()
            each.v_cache(layer)[at] = -(1000 * tag + batch.positions)[:, None, None].float()


def read(cache, seq_id):
    """The numbers that a sequence's computed tokens have, by group; they must agree over layers, keys and values."""
    found = []
    for each, blocks in zip(cache.caches, cache.block_ids(seq_id), strict=True):
        views = [each.k_cache(layer) for layer in range(each.num_layers)]
        views += [-each.v_cache(layer) for layer in range(each.num_layers)]
        numbers = {tuple(view[torch.tensor(blocks)].flatten(0, 1)[:, 0, 0].int().tolist()) for view in views}
        assert len(numbers) == 1
        found.append(list(numbers.pop())[: cache.computed(seq_id)])
    return found


def test_a_batch_a_group_with_the_same_tokens_and_positions():
    cache = paged()
    cache.add("a", torch.arange(9))
    cache.add("b", [5, 6])
    full, local = cache.batch(["a", "b"], query_lens=[7, 2])
    assert full.input_ids is local.input_ids and full.positions is local.positions
    assert full.positions.tolist() == [*range(7), 0, 1] and full.query_lens == local.query_lens == (7, 2)
    assert full.block_table.shape == (2, 2) and local.block_table.shape == (2, 4)
    assert full.slot_mapping.tolist() != local.slot_mapping.tolist()
    cache.check_invariants()


def test_forks_swaps_and_decode_keep_every_groups_contents():
    cache = paged()
    cache.add("a", range(9))
    write(cache, cache.batch(["a"]), 1)
    cache.fork("a", "b")
    cache.append_each(["a", "b"], [1, 2])
    write(cache, cache.batch(["b"]), 2)
    write(cache, cache.batch(["a"]), 1)
    cache.swap_out("a")
    assert cache.is_swapped("a") and cache.can_swap_in("a")
    cache.add("other", range(100, 120))
    write(cache, cache.batch(["other"]), 3)
    cache.swap_in("a")
    cache.append("a", [3])
    write(cache, cache.batch(["a"]), 1)
    cache.check_invariants()
    full, local = read(cache, "a")
    assert full == [1000 + i for i in range(11)] and local[5:] == full[5:]
    full, local = read(cache, "b")
    assert full == [*(1000 + i for i in range(9)), 2009] and local[4:] == full[4:]
    cache.abandon(["a"])
    assert cache.computed("a") == 10
    cache.truncate("b", 9)
    for seq_id in ("a", "b", "other"):
        cache.free(seq_id)
    assert [stats.used_blocks for stats in cache.stats()] == [0, 0]


def test_a_batch_is_refused_for_all_groups_before_any_changes():
    cache = paged()
    cache.add("a", range(9))
    narrow = [BatchBuffers(2, 16, 8), BatchBuffers(2, 16, 4)]
    with pytest.raises(ValueError, match="5 blocks, got buffers for 2, 16 and 4"):
        cache.batch(["a"], buffers=narrow)
    assert cache.computed("a") == 0
    with pytest.raises(ValueError, match=r"one a group \(2\), got 1"):
        cache.batch(["a"], buffers=narrow[:1])
    wide = [BatchBuffers(2, 16, 8), BatchBuffers(2, 16, 8)]
    batches = cache.batch(["a"], buffers=wide)
    assert [batch.block_table.shape for batch in batches] == [(1, 8), (1, 8)]
    with pytest.raises(TypeError, match="PagedKVCaches, got BatchBuffers"):
        GroupedKVCache(wide)


def test_a_step_without_blocks_for_its_copies_changes_no_group():
    cache = paged(local_blocks=3)
    cache.add("a", range(6))
    cache.fork("a", "b")
    with pytest.raises(OutOfBlocks) as error:
        cache.batch(["b"])
    assert error.value.group == 1 and cache.computed("b") == 0
    cache.check_invariants()
    assert not cache.can_admit(3) and cache.can_admit(0, tokens=[])


def test_a_wrong_step_is_named_as_one_allocator_names_it_even_where_blocks_lack():
    groups = grouped(full=1)
    groups.add("a", range(4))
    with pytest.raises(ValueError, match=r"tokens must be one a sequence \(1\), got 2"):
        groups.append_each(["a"], [1, 2])
    with pytest.raises(TypeError, match="seq_ids must be a sequence, got int 5"):
        groups.append_each(5, [1])
    with pytest.raises(OutOfBlocks) as error:
        groups.append_each(["a"], [1])
    assert error.value.group == 0 and groups.length("a") == 4
