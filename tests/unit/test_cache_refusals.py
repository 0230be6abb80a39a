"""What no cache takes, and how it says so: the argument, what was expected and what came."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagegen import CacheLayout, PagedKVCache
from pagegen.cache import BlockAllocator, GroupedAllocator


@pytest.fixture
def cache():
    made = PagedKVCache(1, 8, CacheLayout(block_size=4), num_kv_heads=1, head_dim=8)
    made.add("a", range(6))
    return made


REFUSED = {
    "seq_ids must be a sequence, got int 5": lambda c: c.batch(5),
    "seq_ids must be a sequence, got NoneType None": lambda c: c.append_each(None, [1]),
    "lengths must be a sequence, got int 3": lambda c: c.allocator.mark_all_computed(["a"], 3),
    "query_lens must be a sequence, got int 3": lambda c: c.batch(["a"], query_lens=3),
    "seq_id must be hashable, got list []": lambda c: c.add([], [1]),
    "seq_id must be hashable, got dict {}": lambda c: c.free({}),
    "seq_id must be hashable, got set": lambda c: c.batch(["a", {1}]),
    "seq_id must be hashable, got ndarray": lambda c: c.batch(["a"]) and c.batch([np.zeros(2)]),
    "seq_id must be hashable and compare to True or False, got Tensor": lambda c: c.add(torch.tensor(1), [1]),
    "seq_ids must be a sequence, got float 0.5": lambda c: c.abandon(0.5),
    "child must be hashable, got list []": lambda c: c.fork("a", []),
    "buffers must be a BatchBuffers, got str 'x'": lambda c: c.batch(["a"], buffers="x"),
    "tokens must be a 1-D sequence of integers, got set": lambda c: c.add("b", {1, 2}),
    "tokens must be a 1-D sequence of integers, got dict": lambda c: c.add("b", {1: 2}),
    "tokens must be a 1-D sequence of integers, got Tensor": lambda c: c.allocator.add("b", torch.ones(2, 1)),
    "length must be an integer, got float 2.0": lambda c: c.truncate("a", 2.0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_argument_is_named_and_nothing_changes(cache, message):
    before = cache.stats()
    with pytest.raises(TypeError) as refused:
        REFUSED[message](cache)
    assert str(refused.value).startswith(message)
    assert cache.stats() == before and cache.length("a") == 6
    cache.check_invariants()


CHANGED = {
    "add": lambda c, changes: c.add("a", changes),
    "append": lambda c, changes: c.append("a", changes),
    "append_each": lambda c, changes: c.append_each(["a"], changes),
    "batch": lambda c, changes: c.batch(["a"], query_lens=changes),
    "mark_all_computed": lambda c, changes: c.allocator.mark_all_computed(["a"], changes),
    "abandon": lambda c, changes: c.abandon("a" for _ in changes),
}


@pytest.mark.parametrize("verb", CHANGED)
@pytest.mark.parametrize("change", ["free", "truncate", "swap_out", "add"])
def test_what_changes_the_cache_while_it_is_read_is_seen(verb, change):
    cache = PagedKVCache(1, 8, CacheLayout(block_size=4), num_kv_heads=1, head_dim=8, num_host_blocks=4)
    if change != "add":
        cache.add("a", range(6))

    def changes():
        getattr(cache, change)("a", *{"truncate": [1], "add": [range(6)]}.get(change, []))
        yield 2

    try:
        CHANGED[verb](cache, changes())
    except (KeyError, ValueError) as refused:
        assert "seq_id must" in str(refused) or "in 0..1" in str(refused)
    cache.check_invariants()


@pytest.mark.parametrize("count", [-1, 7, 2**70])
def test_a_query_length_beyond_any_is_named(cache, count):
    with pytest.raises(ValueError, match=rf"query_lens must be in 0\.\.6 .* for 'a', got {count}"):
        cache.batch(["a"], query_lens=[count])


class Odd:
    """An integer that can do nothing else, and something when it is asked for."""

    def __init__(self, value, asked=lambda: None):
        self.value, self.asked = value, asked

    def __index__(self):
        self.asked()
        return self.value


def test_tokens_of_odd_integers_are_named_too(cache):
    shorter = []
    shorter += [Odd(1, shorter.clear), 2]
    for tokens, message in (([1, Odd(2**40)], "in 0..4294967295, got 1099511627776"), (shorter, "became shorter")):
        with pytest.raises(ValueError, match=f"tokens must .*{message}"):
            cache.append("a", tokens)
    assert cache.length("a") == 6


def test_a_block_size_beyond_any_is_named():
    with pytest.raises(ValueError, match=r"block_size must be in 1\.\.2147483647, got"):
        BlockAllocator(4, 2**70)


@pytest.mark.parametrize("kind", [np.uint8, np.uint64, np.int8, torch.tensor, Odd])
def test_an_integer_of_any_kind_counts_like_one_of_python(kind):
    """-5 of unsigned ones is a large number, and two small ones add up to less than either."""
    found = []
    for make in (int, kind):
        allocator = BlockAllocator(30, 4, num_host_blocks=9)
        allocator.add("a", range(9))
        allocator.mark_computed("a", make(9))
        allocator.mark_all_computed(["a"], [make(9)])
        found += [allocator.add("b", range(9), most_cached=make(5)), allocator.add("c", range(9), most_cached=9)]
        for each in (allocator, GroupedAllocator([BlockAllocator(30, 4)])):
            found += [each.can_admit(make(n), lookahead=make(most)) for n in (3, 90, 120) for most in (0, 10, 120)]
            found += [each.can_admit(make(9), tokens=range(9), lookahead=make(most)) for most in (1, 127)]
        allocator.truncate("a", make(5))
        allocator.swap_out("b")
        found += [allocator.can_swap_in("b", lookahead=make(most)) for most in (1, 127)]
        found += [allocator.sequence("a").tokens, allocator.block_ids("a"), allocator.stats()]
        allocator.check_invariants()
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_integers_of_numpy_are_integers_everywhere(cache):
    cache.truncate("a", np.int64(5))
    cache.batch(["a"], query_lens=(n for n in [np.int32(3)]))
    assert (cache.length("a"), cache.computed("a")) == (5, 3)
    assert BlockAllocator(np.int64(4), np.int32(2), watermark=np.int8(1)).num_blocks == 4
    cache.check_invariants()
