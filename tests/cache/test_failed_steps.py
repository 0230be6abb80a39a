"""What a failed step leaves behind, in cases that the state machine meets once in ten thousand operations."""

from __future__ import annotations

from pagegen.cache import BlockAllocator
from pagegen.cache.groups import GroupedAllocator


def test_who_lies_on_the_host_with_the_same_tokens_of_its_own_loses_nothing_to_a_failed_step():
    allocator = BlockAllocator(4, 2, num_host_blocks=4)
    allocator.add("right", range(5))
    allocator.mark_computed("right", 5)
    allocator.swap_out("right")
    allocator.add("all", range(90, 98))  # evicts what was found of it
    allocator.free("all")
    assert allocator.add("failing", range(5)) == 0
    allocator.mark_computed("failing", 5)
    allocator.abandon(["failing"])
    assert (allocator.computed("failing"), allocator.computed("right")) == (0, 5)
    allocator.free("failing")
    allocator.swap_in("right")
    assert allocator.computed("right") == 5
    allocator.check_invariants()


def test_a_failed_step_asks_nobody_to_be_freed_whose_tokens_are_its_own():
    allocator = BlockAllocator(6, 2, window=2, num_host_blocks=4)
    allocator.add("right", range(9))
    for length in (6, 8, 9):
        allocator.mark_computed("right", length)
    allocator.swap_out("right")
    allocator.add("all", range(90, 102))
    allocator.free("all")
    allocator.add("failing", range(9))
    allocator.mark_computed("failing", 9)
    allocator.abandon(["failing"])
    assert (allocator.computed("failing"), allocator.computed("right")) == (0, 9)


def test_a_block_that_two_share_is_found_again_after_a_failed_step_of_a_third_and_cached_when_both_have_left():
    allocator = BlockAllocator(12, 2)
    for seq_id in ("a", "third"):  # side by side, in blocks of their own
        allocator.add(seq_id, [0] * 4)
    allocator.mark_computed("a", 4)
    allocator.fork("a", "b")
    allocator.mark_computed("third", 4)
    allocator.abandon(["third"])
    allocator.append_each(["a", "b"], [1, 2])
    allocator.mark_all_computed(["a", "b"], [5, 5])
    for seq_id in ("a", "b", "third"):
        allocator.free(seq_id)
    assert allocator.stats().cached_blocks == 2
    assert allocator.add("later", [0] * 4 + [3]) == 4
    allocator.check_invariants()


def test_who_wrote_a_block_keeps_it_where_a_later_finder_loses_its_tokens_in_another_group():
    books = GroupedAllocator([BlockAllocator(5, 3), BlockAllocator(6, 1)])
    books.add("first", [0, 0])
    books.mark_computed("first", 2)
    books.add("failing", [0] * 3)
    books.mark_computed("failing", 3)
    assert books.add("finder", [0] * 4) == 3  # of three, failing's block; of one, two of first's
    books.abandon(["failing"])
    assert [books.computed(seq_id) for seq_id in ("first", "failing", "finder")] == [2, 0, 0]
    books.mark_computed("first", 2)
    books.check_invariants()


def test_what_a_sequence_that_has_left_wrote_stays_with_a_fork_of_it():
    books = GroupedAllocator([BlockAllocator(8, 3), BlockAllocator(8, 1)])
    books.add("first", [0, 0])
    books.mark_computed("first", 2)
    books.add("failing", [0] * 3)
    books.mark_computed("failing", 3)
    books.add("finder", [0] * 4)
    books.fork("first", "fork")
    books.free("first")
    books.abandon(["failing"])
    assert [books.computed(seq_id) for seq_id in ("fork", "failing", "finder")] == [2, 0, 0]
    books.check_invariants()


def test_who_comes_back_from_the_host_to_blocks_of_a_failed_step_loses_them_as_whoever_came_later_does():
    allocator = BlockAllocator(6, 2, num_host_blocks=3)
    allocator.add("early", [0] * 5)
    allocator.mark_computed("early", 5)
    allocator.swap_out("early")
    allocator.add("all", range(90, 102))  # evicts what was found of it
    allocator.free("all")
    assert allocator.add("failing", [0] * 5) == 0
    allocator.mark_computed("failing", 5)
    pairs = allocator.swap_in("early")
    assert [block for block, _ in pairs] == allocator.block_ids("early")[2:]  # the others are failing's
    allocator.abandon(["failing"])
    assert (allocator.computed("failing"), allocator.computed("early")) == (0, 0)
    allocator.check_invariants()
