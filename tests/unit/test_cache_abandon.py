"""A step that failed before it wrote: nobody computes on it, nobody finds it."""

from __future__ import annotations

import pytest

from pagegen import BlockAllocator, CacheLayout, PagedKVCache

SIZE = 4


@pytest.fixture
def allocator():
    made = BlockAllocator(24, SIZE, num_host_blocks=8)
    yield made
    made.check_invariants()


def computed(allocator, seq_id, tokens):
    hit = allocator.add(seq_id, tokens)
    allocator.mark_computed(seq_id, len(tokens))
    return hit


def known(allocator, tokens):
    hit = allocator.add("probe", tokens)
    allocator.free("probe")
    return hit


def test_an_abandoned_prefill_is_computed_again_and_found_by_nobody(allocator):
    computed(allocator, "a", range(10))
    allocator.abandon(["a"])
    assert allocator.computed("a") == 0 and known(allocator, range(10)) == 0
    allocator.mark_computed("a", 10)
    assert known(allocator, range(10)) == 8


def test_only_the_last_step_is_taken_back(allocator):
    computed(allocator, "a", range(6))
    allocator.append("a", range(6, 13))
    allocator.mark_computed("a", 9)
    allocator.mark_computed("a", 13)
    allocator.abandon(["a"])
    assert allocator.computed("a") == 9 and known(allocator, range(13)) == 8
    allocator.abandon(["a"])
    assert allocator.computed("a") == 9


def test_whoever_found_the_blocks_since_computes_them_itself(allocator):
    computed(allocator, "a", range(12))
    assert allocator.add("b", [*range(12), 50]) == 12
    allocator.abandon(["a"])
    assert (allocator.computed("a"), allocator.computed("b")) == (0, 0)
    allocator.check_invariants()
    pairs = allocator.mark_all_computed(["a", "b"])
    assert pairs == []  # of what they share nothing is kept, and the last writes in place
    assert not set(allocator.block_ids("a")) & set(allocator.block_ids("b"))
    assert known(allocator, range(13)) == 12


def test_a_fork_of_the_failed_step_goes_back_with_it(allocator):
    computed(allocator, "a", range(6))
    allocator.append("a", [6])
    allocator.mark_computed("a", 7)
    allocator.fork("a", "b")
    allocator.abandon(["a"])
    assert (allocator.computed("a"), allocator.computed("b")) == (6, 6)
    pairs = allocator.mark_all_computed(["a", "b"])
    assert len(pairs) == 1  # the two tokens before are kept


def test_what_was_computed_on_top_of_it_is_forgotten_even_after_its_sequence_ended(allocator):
    computed(allocator, "a", range(8))
    assert computed(allocator, "b", [*range(8), *range(50, 60)]) == 8
    allocator.free("b")
    allocator.abandon(["a"])
    allocator.check_invariants()
    computed(allocator, "c", range(8))
    assert known(allocator, [*range(8), *range(50, 60)]) == 8  # the good blocks, and none of those of "b"


def test_a_copy_that_another_computed_rightly_is_still_found(allocator):
    for seq_id in ("good", "bad"):
        allocator.add(seq_id, range(9))
    allocator.mark_computed("good", 9)
    allocator.mark_computed("bad", 9)
    allocator.abandon(["bad"])
    assert allocator.computed("good") == 9 and known(allocator, range(9)) == 4 + 4 * (known(allocator, range(9)) == 8)
    allocator.check_invariants()


def test_a_sequence_that_went_to_the_host_on_top_of_it_computes_again(allocator):
    computed(allocator, "a", range(8))
    allocator.add("b", [*range(8), 50])
    allocator.swap_out("b")
    allocator.abandon(["a"])
    assert allocator.computed("b") == 0
    allocator.swap_in("b")
    allocator.check_invariants()
    allocator.mark_computed("b", 9)
    assert known(allocator, range(9)) == 8


def test_a_failed_step_that_had_nothing_to_compute_takes_nothing_back(allocator):
    computed(allocator, "a", range(8))
    allocator.mark_all_computed(["a"])
    allocator.abandon(["a"])
    assert allocator.computed("a") == 8 and known(allocator, range(9)) == 8


def test_abandoning_names_whom_to_free_where_a_window_lost_what_would_be_seen_again():
    allocator = BlockAllocator(24, SIZE, window=4)
    computed(allocator, "a", range(16))
    allocator.add("b", [*range(16), 50])  # holds the last block alone
    with pytest.raises(ValueError, match=r"\['b'\].*free those first"):
        allocator.abandon(["a"])
    assert (allocator.computed("a"), allocator.computed("b")) == (16, 16)
    allocator.free("b")
    allocator.abandon(["a"])
    assert allocator.computed("a") == 0
    allocator.check_invariants()


def test_unknown_sequences_are_named(allocator):
    with pytest.raises(KeyError, match="nobody"):
        allocator.abandon(["nobody"])


def test_a_cache_batches_again_what_it_abandoned():
    cache = PagedKVCache(1, 8, CacheLayout(block_size=SIZE), 1, 8)
    cache.add("a", range(6))
    first = cache.batch(["a"])
    cache.abandon(["a"])
    again = cache.batch(["a"])
    assert again.slot_mapping.tolist() == first.slot_mapping.tolist() and again.positions.tolist() == list(range(6))
