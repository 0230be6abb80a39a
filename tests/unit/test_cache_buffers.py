"""Persistent batch buffers: the same inputs as fresh ones, at the same addresses."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
import torch

from pagegen import CacheLayout, OutOfBlocks, PagedKVCache
from pagegen.cache import BatchBuffers
from pagegen.cache.sharing import prefix_groups

SIZE = 4
FIELDS = ("block_table", "seq_lens", "query_start_loc", "slot_mapping", "positions", "input_ids")


def make(num_blocks=60, **options):
    return PagedKVCache(1, num_blocks, CacheLayout(block_size=SIZE), 1, 8, dtype="int8", **options)


def expected(cache, ids, starts):
    """What a batch of `ids` whose first queries stand at `starts` must hold, one token after the other."""
    ends = [cache.computed(seq_id) for seq_id in ids]
    queries = [(i, p) for i, (a, b) in enumerate(zip(starts, ends, strict=True)) for p in range(a, b)]
    tables = [cache.block_ids(seq_id) for seq_id in ids]
    tokens = [cache.allocator.sequence(seq_id).tokens for seq_id in ids]
    counts = [b - a for a, b in zip(starts, ends, strict=True)]
    return {
        "seq_lens": ends,
        "query_start_loc": [0, *np.cumsum(counts).tolist()],
        "slot_mapping": [tables[i][p // SIZE] * SIZE + p % SIZE for i, p in queries],
        "positions": [p for _, p in queries],
        "input_ids": [tokens[i][p] for i, p in queries],
    }


def groups_found_anew(cache, ids, starts):
    tables = [cache.block_ids(seq_id) for seq_id in ids]
    table = np.zeros((len(ids), max(1, *map(len, tables))), dtype=np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    return prefix_groups(table, np.array(starts) // SIZE)


def check(cache, batch, ids, starts):
    """The batch holds what it must, and the groups are those that a search from the start finds."""
    for name, values in expected(cache, ids, starts).items():
        assert getattr(batch, name).tolist() == values, name
    for row, seq_id in enumerate(ids):
        needed = -(-cache.computed(seq_id) // SIZE)
        assert batch.block_table[row, :needed].tolist() == cache.block_ids(seq_id)[:needed]
        behind = batch.block_table[row, len(cache.block_ids(seq_id)) :]
        assert not behind.any()
    assert batch.query_lens == tuple(cache.computed(i) - start for i, start in zip(ids, starts, strict=True))
    assert (batch.max_query_len, batch.max_seq_len) == (max(batch.query_lens), int(batch.seq_lens.max()))
    assert batch.prefix_groups == groups_found_anew(cache, ids, starts)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("persistent", [True, False])
def test_whatever_happens_between_steps_a_batch_holds_what_a_search_from_the_start_finds(seed, persistent):
    draw = random.Random(seed)
    cache = make(num_host_blocks=20)
    buffers = BatchBuffers(8, 80, 20) if persistent else None
    addresses = [tensor.data_ptr() for tensor in buffers.tensors] if buffers else []
    names, living, away = iter(range(1000)), [], []
    for _ in range(60):
        action = draw.choice(["add", "fork", "free", "truncate", "swap", "decode", "decode", "decode", "append"])
        try:
            if action == "add" and len(living) < 6:
                cache.add(name := next(names), [draw.randint(0, 1) for _ in range(draw.randint(1, 20))])
                living.append(name)
            elif action == "fork" and living and len(living) < 6:
                cache.fork(draw.choice(living), name := next(names))
                living.append(name)
            elif action == "free" and living:
                cache.free(living.pop(draw.randrange(len(living))))
            elif action == "truncate" and living:
                name = draw.choice(living)
                cache.truncate(name, draw.randint(0, cache.length(name)))
            elif action == "swap" and (living or away):
                if away and draw.random() < 0.5:
                    cache.swap_in(away[-1])
                    living.append(away.pop())
                elif living:
                    cache.swap_out(living[-1])
                    away.append(living.pop())
            elif action == "append" and living:
                cache.append(draw.choice(living), [draw.randint(0, 1) for _ in range(draw.randint(1, 5))])
            if action == "decode" and living:
                if draw.random() < 0.2:
                    draw.shuffle(living)
                for _ in range(draw.randint(1, 6)):  # steps of the same sequences
                    cache.append_each(living, [draw.randint(0, 1) for _ in living])
                    starts = [cache.computed(name) for name in living]
                    check(cache, cache.batch(living, buffers=buffers), living, starts)
            elif living:
                starts = [cache.computed(name) for name in living]
                counts = [
                    draw.randint(0, cache.length(name) - start) for name, start in zip(living, starts, strict=True)
                ]
                check(cache, cache.batch(living, query_lens=counts, buffers=buffers), living, starts)
        except OutOfBlocks:
            while living:
                cache.free(living.pop())
    if buffers:
        assert [tensor.data_ptr() for tensor in buffers.tensors] == addresses


def test_a_smaller_batch_leaves_nothing_of_the_larger_one_behind_it():
    cache, buffers = make(), BatchBuffers(4, 12, 6)
    for seq_id in range(4):
        cache.add(seq_id, [seq_id] * 3)
    cache.batch(range(4), buffers=buffers)
    cache.append_each([2, 1], [7, 8])
    batch = cache.batch([2, 1], buffers=buffers)
    table, lens, starts, slots, positions, ids = buffers.tensors
    assert lens.tolist() == [4, 4, 0, 0] and starts.tolist() == [0, 1, 2, 2, 2]
    assert slots[2:].tolist() == [-1] * 10 and not positions[2:].any() and not ids[2:].any()
    assert batch.block_table.data_ptr() == table.data_ptr() and batch.block_table.shape == (2, 6)
    assert batch.slot_mapping.shape == (2,) and batch.block_table.is_contiguous()


def test_the_tensors_of_fresh_batches_are_their_own():
    cache = make()
    cache.add("a", range(6))
    first = cache.batch(["a"])
    kept = [getattr(first, name).clone() for name in FIELDS]
    cache.append("a", range(6, 11))
    second = cache.batch(["a"])
    second.block_table.fill_(9)
    assert all(torch.equal(a, getattr(first, name)) for a, name in zip(kept, FIELDS, strict=True))
    assert cache.block_ids("a") != [9, 9, 9]
    cache.check_invariants()


def test_two_caches_may_take_turns_in_the_same_buffers():
    buffers, caches = BatchBuffers(2, 8, 6), [make(), make(num_blocks=70)]
    for turn in range(4):
        for number, cache in enumerate(caches):
            if not turn:
                cache.add("other", [1] * (9 * number + 1))
                cache.batch(["other"])
                cache.add("a", [number] * 5)
                cache.batch(["a"])
            cache.append("a", [turn])
            start = [cache.computed("a")]
            check(cache, cache.batch(["a"], buffers=buffers), ["a"], start)


def test_a_new_allocator_behind_the_same_cache_shows_none_of_the_old_ones_blocks():
    cache, buffers = make(), BatchBuffers(2, 20, 8)
    cache.add("a", range(20))
    cache.batch(["a"], buffers=buffers)
    cache.allocator = type(cache.allocator)(60, SIZE)
    cache.add("a", range(3))
    batch = cache.batch(["a"], buffers=buffers)
    assert batch.block_table.tolist() == [[0] * 8] and batch.prefix_groups == ()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((1, 16, 8), "2 sequences, 10 queries and 2 blocks, got buffers for 1, 16 and 8"),
        ((2, 9, 8), "got buffers for 2, 9 and 8"),
        ((2, 16, 1), "got buffers for 2, 16 and 1"),
    ],
)
def test_buffers_that_are_too_small_are_refused_before_anything_changes(sizes, says):
    cache = make()
    cache.add("a", range(8))
    cache.add("b", range(20, 22))
    with pytest.raises(ValueError, match=says):
        cache.batch(["a", "b"], buffers=BatchBuffers(*sizes))
    assert cache.computed("a") == 0


def test_buffers_on_another_device_are_refused():
    cache = make()
    cache.add("a", [1])
    with pytest.raises(ValueError, match="buffers must be on cpu, where the cache is, got meta"):
        cache.batch(["a"], buffers=BatchBuffers(1, 1, 1, device="meta"))


@pytest.mark.parametrize(
    ("sizes", "error"),
    [((0, 1, 1), ValueError), ((1, -1, 1), ValueError), ((1, 1, 0), ValueError), ((1.0, 1, 1), TypeError)],
)
def test_wrong_sizes_of_buffers_are_refused(sizes, error):
    with pytest.raises(error, match="max_"):
        BatchBuffers(*sizes)


def test_prefix_groups_are_not_searched_again_while_the_same_rows_only_grow(monkeypatch):
    from pagegen.cache import sharing

    cache, searches = make(num_blocks=100), []
    monkeypatch.setattr(sharing, "prefix_groups", lambda *given: searches.append(1) or prefix_groups(*given))
    cache.add("a", [*range(8), 1])
    cache.batch(["a"])
    for seq_id in ("b", "c"):
        cache.add(seq_id, [*range(8), 2])
    cache.add("alone", [9] * 5)
    ids = ["a", "b", "c", "alone"]
    cache.batch(ids)
    for step in range(30):
        cache.append_each(ids, [step] * 4)
        assert cache.batch(ids).prefix_groups == ((2, (0, 1, 2)),)
    assert len(searches) == 1
    cache.free("alone")
    cache.append_each(["a", "b", "c"], [1, 1, 1])
    assert cache.batch(["a", "b", "c"]).prefix_groups == ((2, (0, 1, 2)),)
    assert len(searches) == 1  # who shares has not changed
    cache.truncate("c", 5)
    cache.append("c", [3])
    assert cache.batch(["a", "b", "c"]).prefix_groups == ((1, (0, 1, 2)),)
    assert len(searches) == 2


@pytest.mark.parametrize("kind", ["array", "numpy", "tensor"])
def test_what_the_caller_does_with_its_tokens_afterwards_changes_no_batch(kind):
    cache = make()
    for seq_id in "ab":
        cache.add(seq_id, [1, 2])
    cache.batch(["a", "b"])
    given = {"array": array("I", [5, 6]), "numpy": np.array([5, 6], dtype=np.uint32), "tensor": torch.tensor([5, 6])}
    tokens = given[kind]
    cache.append_each(["a", "b"], tokens)
    tokens[0] = 99
    if kind == "array":
        tokens.append(7)  # nor is it held fast
    assert cache.batch(["a", "b"]).input_ids.tolist() == [5, 6]
    assert cache.allocator.sequence("a").tokens == [1, 2, 5]
    cache.check_invariants()
