"""Prefix reuse: what may be found, by whom, for how long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagegen.cache import BlockAllocator, OutOfBlocks, prefix
from pagegen.cache.admission import known_chain
from pagegen.cache.prefix import block_digest, root_digest
from pagegen.cache.sequence import token_array

pytestmark = pytest.mark.usefixtures("index_class")


def computed(allocator, seq_id, tokens, **options):
    """Adds a sequence and computes all of it; returns the tokens that were cached."""
    hit = allocator.add(seq_id, tokens, **options)
    allocator.mark_computed(seq_id, len(tokens))
    allocator.check_invariants()
    return hit


def known(allocator, tokens, **options):
    """How many leading tokens of `tokens` a new sequence would find."""
    hit = allocator.add("probe", tokens, **options)
    allocator.free("probe")
    allocator.check_invariants()
    return hit


def test_full_computed_blocks_are_found_and_shared():
    allocator = BlockAllocator(8, 4)
    computed(allocator, "a", range(10))
    assert allocator.add("b", [*range(8), 90, 91]) == 8
    assert allocator.block_ids("b")[:2] == allocator.block_ids("a")[:2]
    assert allocator.block_ids("b")[2] != allocator.block_ids("a")[2]
    assert allocator.computed("b") == 8


def test_blocks_cannot_be_found_before_they_are_computed():
    allocator = BlockAllocator(8, 4)
    allocator.add("a", range(12))
    assert known(allocator, range(12)) == 0
    allocator.mark_computed("a", 7)
    assert known(allocator, range(12)) == 4
    allocator.mark_computed("a", 8)
    assert known(allocator, range(12)) == 8


def test_a_full_hit_leaves_the_last_token_to_compute():
    allocator = BlockAllocator(8, 4)
    computed(allocator, "a", range(8))
    assert [known(allocator, range(n)) for n in (8, 9, 5, 4, 1, 0)] == [4, 8, 4, 0, 0, 0]


def test_with_blocks_of_one_token_all_but_the_last_are_found():
    allocator = BlockAllocator(16, 1)
    computed(allocator, "a", range(8))
    assert known(allocator, range(8)) == 7 and known(allocator, range(9)) == 8


def test_a_partial_block_is_never_found():
    allocator = BlockAllocator(8, 4)
    computed(allocator, "a", range(7))
    assert known(allocator, range(7)) == known(allocator, range(20)) == 4


def test_a_block_completed_by_appended_tokens_is_found():
    allocator = BlockAllocator(8, 4)
    computed(allocator, "a", range(3))
    allocator.append("a", [3])
    assert known(allocator, range(5)) == 0
    allocator.mark_computed("a", 4)
    assert known(allocator, range(5)) == 4


def test_equal_tokens_at_other_positions_or_behind_other_tokens_are_not_found():
    allocator = BlockAllocator(16, 2)
    computed(allocator, "a", [1, 2, 3, 4, 5, 6])
    assert known(allocator, [3, 4, 5, 6, 7]) == 0
    assert known(allocator, [9, 2, 3, 4, 5, 6, 7]) == 0
    assert known(allocator, [1, 2, 5, 6, 7]) == 2  # the lookup ends at the first miss


def test_another_context_finds_nothing_and_each_context_its_own():
    allocator = BlockAllocator(16, 4)
    computed(allocator, "plain", range(9))
    assert computed(allocator, "adapter", range(9), context=b"adapter-1") == 0
    assert known(allocator, range(9), context=b"adapter-2") == 0
    assert known(allocator, range(9), context=b"adapter-1") == known(allocator, range(9)) == 8
    assert not set(allocator.block_ids("plain")) & set(allocator.block_ids("adapter"))


def test_a_fork_keeps_its_parents_context():
    allocator = BlockAllocator(16, 4)
    computed(allocator, "a", range(6), context=b"x")
    allocator.fork("a", "b")
    allocator.append("b", [6, 7])
    allocator.mark_computed("b", 8)
    assert known(allocator, range(9), context=b"x") == 8 and known(allocator, range(9)) == 0


def test_blocks_of_a_freed_sequence_stay_findable_and_count_as_cached():
    allocator = BlockAllocator(8, 4)
    computed(allocator, "a", range(10))
    allocator.free("a")
    stats = allocator.stats()
    assert (stats.cached_blocks, stats.free_blocks, stats.used_blocks) == (2, 6, 0)
    assert allocator.add("b", range(10)) == 8
    assert allocator.stats().cached_blocks == 0


def test_without_prefix_caching_nothing_is_found_or_kept():
    allocator = BlockAllocator(8, 4, prefix_caching=False)
    computed(allocator, "a", range(8))
    assert known(allocator, range(9)) == 0
    allocator.free("a")
    assert allocator.stats().free_blocks == 8 and not allocator.pool.index.nodes()


def named_blocks(allocator):
    """Blocks that the index knows."""
    index = allocator.pool.index
    return sum(len(index.copies(node)) for node in index.nodes())


def findable(allocator, tokens):
    """Leading blocks of `tokens` that a lookup of all of them would find."""
    return len(known_chain(allocator, token_array([*tokens, 0]), b""))


def test_free_blocks_are_taken_before_cached_ones_are_evicted():
    allocator = BlockAllocator(4, 4)
    computed(allocator, "a", range(8))
    allocator.free("a")
    allocator.add("b", range(50, 58))
    assert allocator.stats().cached_blocks == findable(allocator, range(8)) == 2


def test_eviction_takes_the_end_of_a_chain_before_its_start():
    allocator = BlockAllocator(4, 4)
    computed(allocator, "a", range(16))
    allocator.free("a")
    for evicted in (1, 2, 3, 4):
        allocator.add(evicted, [90])
        allocator.check_invariants()
        assert findable(allocator, range(16)) == named_blocks(allocator) == 4 - evicted
    with pytest.raises(OutOfBlocks):
        allocator.add("one too many", [90])


def test_what_survives_eviction_is_still_a_findable_prefix():
    allocator = BlockAllocator(5, 4)
    computed(allocator, "a", range(16))
    allocator.free("a")
    allocator.add("b", range(90, 96))  # one free block and one evicted
    allocator.free("b")
    assert allocator.add("c", range(13)) == 12


def test_the_least_recently_used_sequence_is_evicted_first():
    allocator = BlockAllocator(6, 4)
    for name, start in (("old", 0), ("new", 100)):
        computed(allocator, name, range(start, start + 12))
    for name in ("old", "new"):
        allocator.free(name)
    computed(allocator, "touch", range(5))  # uses the first block of "old" again
    allocator.free("touch")
    assert allocator.stats().cached_blocks == 5  # the last block of "old" made room for the tail of "touch"
    allocator.add("b", range(200, 208))  # takes the free one, and the second block of "old"
    allocator.check_invariants()
    assert findable(allocator, range(100, 112)) == 3 and findable(allocator, range(12)) == 1


def test_using_a_prefix_keeps_it_from_being_evicted():
    allocator = BlockAllocator(4, 4)
    computed(allocator, "a", range(12))
    allocator.free("a")
    assert allocator.add("b", range(9)) == 8
    allocator.append("b", range(9, 16))  # the last of "a" has to go, not what "b" uses
    allocator.check_invariants()
    assert allocator.length("b") == 16 and len(set(allocator.block_ids("b"))) == 4


def test_a_reused_block_forgets_its_old_hash_at_once():
    allocator = BlockAllocator(2, 4)
    computed(allocator, "a", range(8))
    allocator.free("a")
    allocator.add("b", range(50, 58))
    allocator.check_invariants()
    assert not named_blocks(allocator) and not allocator.pool.index.node_of.any()
    allocator.free("b")
    assert known(allocator, range(8)) == 0 and known(allocator, range(50, 58)) == 0


def test_a_truncated_and_rewritten_block_is_found_by_its_new_tokens_only():
    allocator = BlockAllocator(8, 4)
    computed(allocator, "a", range(8))
    allocator.truncate("a", 6)
    assert known(allocator, range(9)) == 8  # not yet overwritten
    allocator.append("a", [60])
    assert known(allocator, range(9)) == 4
    allocator.append("a", [70])
    allocator.mark_computed("a", 8)
    assert known(allocator, range(9)) == 4 and known(allocator, [0, 1, 2, 3, 4, 5, 60, 70, 1]) == 8


def test_what_stood_behind_a_rewritten_block_is_found_again_only_once_that_is_computed_again():
    allocator = BlockAllocator(8, 4)
    computed(allocator, "a", range(16))
    allocator.truncate("a", 6)
    allocator.append("a", [60, 70])
    allocator.check_invariants()
    assert known(allocator, range(16)) == 4 and allocator.stats().cached_blocks == 2
    allocator.add("b", range(16))
    allocator.mark_computed("b", 8)
    allocator.check_invariants()
    assert known(allocator, range(16)) == 12
    for seq_id in "ab":
        allocator.free(seq_id)
    allocator.add("filler", range(100, 132))
    allocator.check_invariants()
    index = allocator.pool.index
    assert not named_blocks(allocator) and not index.latest[index.root(b"")]


def test_the_index_keeps_nothing_of_what_was_evicted_and_freed():
    allocator = BlockAllocator(6, 2)
    for turn in range(20):
        computed(allocator, turn, [turn, turn, 1, 2, turn], context=bytes([turn % 3]))
        if turn:
            allocator.free(turn - 1)
    assert len(allocator.pool.index.nodes()) <= 6 + 3
    allocator.free(19)
    allocator.add("filler", range(12))
    assert allocator.pool.index.nodes() == [allocator.pool.index.root(b"")]
    allocator.free("filler")
    assert not allocator.pool.index.nodes()


def test_a_block_found_by_another_is_copied_when_its_first_owner_rewrites_it():
    allocator = BlockAllocator(8, 4)
    computed(allocator, "a", range(8))
    allocator.add("b", range(9))
    shared = allocator.block_ids("b")[1]
    allocator.truncate("a", 7)
    ((source, target),) = allocator.append("a", [70])
    assert source == shared and target != shared and allocator.block_ids("b")[1] == shared
    allocator.check_invariants()


def test_copies_computed_side_by_side_are_kept_once():
    allocator = BlockAllocator(8, 4)
    for name in ("a", "b"):
        allocator.add(name, range(8))
    for name in ("a", "b"):
        allocator.mark_computed(name, 8)
    allocator.check_invariants()
    allocator.free("a")
    allocator.check_invariants()
    assert (allocator.stats().cached_blocks, allocator.stats().free_blocks) == (0, 6)  # those of "b" will do
    assert known(allocator, range(9)) == 8
    allocator.free("b")
    assert (allocator.stats().cached_blocks, allocator.stats().free_blocks) == (2, 6)


def test_a_late_copy_replaces_the_cached_one_so_that_no_live_chain_hangs_from_it():
    allocator = BlockAllocator(6, 4)
    for name in ("early", "late"):
        allocator.add(name, range(8))
    allocator.mark_computed("early", 4)
    allocator.free("early")
    allocator.mark_computed("late", 8)  # its first block is a copy of a cached one, its second stands behind that
    allocator.check_invariants()
    allocator.add("filler", range(50, 66))  # evicts whatever can be
    allocator.check_invariants()
    allocator.free("filler")
    assert known(allocator, range(9)) == 8


def test_the_hit_rate_counts_all_tokens_that_were_added():
    allocator = BlockAllocator(8, 4)
    assert allocator.stats().hit_rate == 0.0
    computed(allocator, "a", range(8))
    allocator.add("b", range(8))
    stats = allocator.stats()
    assert (stats.queried_tokens, stats.hit_tokens, stats.hit_rate) == (16, 4, 0.25)


@pytest.mark.usefixtures("colliding_names")
def test_a_hash_collision_neither_shares_blocks_nor_breaks_the_index():
    allocator = BlockAllocator(16, 2)
    computed(allocator, "a", [0, 1, 2, 4])
    for seq_id, tokens in (("b", [3, 0, 2, 4, 9]), ("c", [0, 3, 1, 1, 9]), ("d", [0, 1, 5, 1, 9])):
        cached = allocator.add(seq_id, tokens)
        assert cached == (2 if tokens[:2] == [0, 1] else 0)
        allocator.mark_computed(seq_id, 5)
    for seq_id in "abcd":
        allocator.free(seq_id)
    assert allocator.add("again", [0, 1, 5, 1, 9]) == 2 and allocator.add("other", [3, 0, 9]) == 0


@pytest.mark.usefixtures("colliding_names")
@pytest.mark.parametrize(
    ("tokens", "context"), [([1, 2], b"x"), ([1, 3], b""), ([2, 2], b"")], ids=["context", "tokens", "tokens too"]
)
def test_a_hit_is_compared_and_not_only_hashed(tokens, context):
    allocator = BlockAllocator(8, 2)
    computed(allocator, "a", [1, 2])
    assert allocator.add("b", [*tokens, 9], context=context) == 0
    assert allocator.add("c", [1, 2, 9]) == 2


def test_names_are_the_same_in_every_process():
    folder = str(Path(prefix.__file__).parents[1])
    code = (
        "import sys, types\n"  # the module without its package, which would load torch
        f"package = types.ModuleType('pagegen'); package.__path__ = [{folder!r}]; sys.modules['pagegen'] = package\n"
        "from pagegen.cache.prefix import block_digest, root_digest\n"
        "print(block_digest(root_digest(b'tenant'), bytes(range(16))).hex())"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == block_digest(root_digest(b"tenant"), bytes(range(16))).hex()


def test_names_tell_context_parent_and_tokens_apart():
    names = {
        block_digest(root_digest(b""), b"abcdefgh"),
        block_digest(root_digest(b"a"), b"abcdefgh"),
        block_digest(root_digest(b""), b"abcdefgi"),
        block_digest(block_digest(root_digest(b""), b"abcdefgh"), b"abcdefgh"),
        root_digest(b"abcdefgh"),
    }
    assert len(names) == 5


def test_the_index_refuses_to_forget_what_it_does_not_know(index_class):
    with pytest.raises(KeyError, match="block 1"):
        index_class(2, 16).remove([1])


def test_what_a_truncation_gave_back_is_evicted_from_its_end():
    allocator = BlockAllocator(4, 4)
    computed(allocator, "a", range(16))
    allocator.truncate("a", 4)
    allocator.check_invariants()
    allocator.add("b", [90])
    assert findable(allocator, range(16)) == 3


@pytest.mark.parametrize(("most_cached", "cached"), [(None, 8), (9, 8), (8, 8), (7, 4), (3, 0), (0, 0)])
def test_no_more_is_taken_as_cached_than_the_caller_allows(most_cached, cached):
    allocator = BlockAllocator(8, 4)
    computed(allocator, "a", range(10))
    assert allocator.add("b", range(10), most_cached=most_cached) == cached == allocator.computed("b")
    allocator.check_invariants()
    with pytest.raises(ValueError, match="most_cached must be at least 0, got -1"):
        allocator.add("c", range(10), most_cached=-1)
