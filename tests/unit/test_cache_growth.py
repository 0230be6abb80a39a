"""One token for each of many sequences, and what a decode step, a long prompt and the bookkeeping cost."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from pagegen import BlockAllocator, CacheLayout, OutOfBlocks, PagedKVCache
from pagegen.cache import BatchBuffers, pool, prefix
from pagegen.cache.prefix import block_digest

SIZE = 4


def filled(lengths, num_blocks=40, **options):
    """An allocator with a computed sequence of each length; sequence i is called i."""
    made = BlockAllocator(num_blocks, SIZE, **options)
    for seq_id, length in enumerate(lengths):
        made.add(seq_id, [seq_id] * length)
        made.mark_computed(seq_id, length)
    return made


def test_a_token_for_each_is_what_appending_it_to_each_gives():
    lengths = [1, 3, 4, 5, 8, 0, 7]
    one, other = filled(lengths), filled(lengths)
    for step in range(9):
        ids = [seq_id for seq_id in range(len(lengths)) if (seq_id + step) % 3]
        tokens = [100 * step + seq_id for seq_id in ids]
        assert one.append_each(ids, tokens) == []
        for seq_id, token in zip(ids, tokens, strict=True):
            other.append(seq_id, [token])
        one.mark_all_computed(ids)
        for seq_id in ids:
            other.mark_computed(seq_id, other.length(seq_id))
        one.check_invariants()
        assert [one.sequence(i) for i in range(7)] == [other.sequence(i) for i in range(7)]
        assert one.stats() == other.stats()


def test_everybody_of_a_fork_gets_a_tail_of_its_own_and_the_last_keeps_the_old_one():
    allocator = filled([6])
    for child in (1, 2):
        allocator.fork(0, child)
    head, tail = allocator.block_ids(0)
    pairs = allocator.append_each([2, 0, 1], [7, 8, 9])
    assert [source for source, _ in pairs] == [tail, tail] and len({target for _, target in pairs} | {tail}) == 3
    assert allocator.block_ids(1) == [head, tail]
    assert [allocator.sequence(i).tokens[-1] for i in (0, 1, 2)] == [8, 9, 7]
    allocator.check_invariants()


def test_a_rewritten_named_tail_loses_its_name():
    allocator = filled([8])
    allocator.truncate(0, 6)
    allocator.append_each([0], [5])
    allocator.check_invariants()
    assert allocator.add("other", [0] * 9) == 4


@pytest.mark.parametrize("forked", [False, True])
def test_a_token_for_each_needs_room_for_all_or_changes_nothing(forked):
    allocator = filled([4, 4, 6, 5], num_blocks=7)  # 6 in use; two full tails
    if forked:
        allocator.fork(2, "child")
        allocator.truncate(3, 4)
        allocator.append(3, [1, 1, 1, 1])
    before = [allocator.sequence(i) for i in range(4)], allocator.stats()
    ids = [2, "child", 3] if forked else [0, 1, 2, 3]
    with pytest.raises(OutOfBlocks) as error:
        allocator.append_each(ids, range(len(ids)))
    assert (error.value.needed, error.value.free) == (2, 1)
    assert ([allocator.sequence(i) for i in range(4)], allocator.stats()) == before
    allocator.check_invariants()


@pytest.mark.parametrize(
    ("ids", "tokens", "error", "says"),
    [
        ([0, 1], [1], ValueError, r"tokens must be one a sequence \(2\), got 1"),
        ([0, 0], [1, 2], ValueError, "0 twice"),
        ([0, 9], [1, 2], KeyError, "9"),
        ([0, 1], [1, -2], ValueError, "-2"),
        ([0, 1], [1, 2.0], TypeError, "float"),
        ([0, []], [1, 2], TypeError, "hashable"),
    ],
)
def test_a_wrong_step_is_refused_before_anything_changes(ids, tokens, error, says):
    allocator = filled([3, 4])
    with pytest.raises(error, match=says):
        allocator.append_each(ids, tokens)
    assert [allocator.length(i) for i in (0, 1)] == [3, 4]


def test_a_step_of_nobody_does_nothing():
    assert filled([3]).append_each([], []) == [] and filled([3]).mark_all_computed([]) == []


def test_ids_are_looked_up_again_once_one_of_them_means_another_sequence():
    allocator = filled([3, 3])
    allocator.append_each([0, 1], [5, 5])
    allocator.free(0)
    with pytest.raises(KeyError):
        allocator.append_each([0, 1], [6, 6])
    allocator.add(0, [9] * 5)
    allocator.append_each([0, 1], [6, 7])
    assert (allocator.sequence(0).tokens, allocator.length(1)) == ([9, 9, 9, 9, 9, 6], 5)


def test_what_can_admit_saw_is_looked_up_again_by_the_add_that_takes_it():
    allocator = filled([12], num_blocks=5)
    allocator.free(0)
    prompt = [0] * 12 + [1, 1, 1]
    assert allocator.can_admit(15, tokens=prompt)
    allocator.add("rival", [9] * 12)  # takes the two free blocks, and evicts the end of the chain
    assert not allocator.can_admit(15, tokens=prompt)
    with pytest.raises(OutOfBlocks) as error:
        allocator.add("late", prompt)
    assert (error.value.needed, error.value.free) == (2, 0)
    allocator.free("rival")
    assert allocator.add("late", prompt) == 8
    allocator.check_invariants()


def test_a_block_given_away_since_it_was_seen_is_not_shared():
    allocator = filled([8], num_blocks=4)
    allocator.free(0)
    assert allocator.can_admit(9, tokens=[0] * 9)
    allocator.add("rival", [7] * 16)
    allocator.free("rival")
    assert allocator.add("late", [0] * 9) == 0
    allocator.check_invariants()


def calls_of(call):
    """How many functions, Python's or C's, a call of `call` enters."""
    entered = []
    sys.setprofile(lambda frame, event, argument: entered.append(event) if event in ("call", "c_call") else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered)


def test_a_decode_step_enters_as_many_functions_for_256_sequences_as_for_one():
    """But for those that fill a block or need one: what time it takes does not hang on a loop over sequences."""
    cache = PagedKVCache(1, 1024, CacheLayout(block_size=16), 1, 8, dtype=torch.int8)
    for seq_id in range(256):
        cache.add(seq_id, [seq_id] * 20)
    cache.batch(range(256))
    found = []
    for count in (1, 256):
        ids, tokens, buffers = list(range(count)), [7] * count, BatchBuffers(256, 256, 8)

        def step(ids=ids, tokens=tokens, buffers=buffers):
            cache.append_each(ids, tokens)
            cache.batch(ids, buffers=buffers)

        step()
        found.append(calls_of(step))
    assert found[0] == found[1] < 200


def test_a_long_prompt_that_is_known_is_not_hashed_but_compared(monkeypatch):
    monkeypatch.setattr(pool, "open_index", prefix.PrefixIndex)
    allocator, prompt = BlockAllocator(3100, 16), list(range(32_768))
    allocator.add("first", prompt)
    allocator.mark_computed("first", len(prompt))
    hashed = []
    monkeypatch.setattr(prefix, "block_digest", lambda parent, tokens: hashed.append(1) or block_digest(parent, tokens))
    assert allocator.add("again", prompt) == 32_752 and not hashed
    assert allocator.add("other", [*prompt[:16_000], *prompt[:16_000]]) == 16_000 and len(hashed) == 1


@pytest.mark.parametrize("content", ["distinct", "cached"])
def test_the_bookkeeping_takes_less_than_a_hundredth_of_the_keys_and_values(content):
    """A model of 1 B parameters (16 layers, 8 heads of 64 in bfloat16) has 32 KiB a token."""
    allocator = BlockAllocator(2048, 16)
    for seq_id in range(16):
        allocator.add(seq_id, np.arange(2048) * 16 + seq_id)
        allocator.mark_computed(seq_id, 2048)
    assert allocator.stats().used_slots == 2048 * 16
    if content == "cached":
        for seq_id in range(16):
            allocator.free(seq_id)
    assert 100 * 2048 < allocator.bookkeeping_bytes() < 0.01 * 2048 * 16 * 32 * 1024
