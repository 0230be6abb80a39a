"""The steps in C++ do what those in Python do, array by array."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from pagegen.cache import BlockAllocator, OutOfBlocks, pool, prefix, prefix_compiled
from pagegen.cache.prefix import NO_NODE
from pagegen.selection import shipping

COLUMN_OF_NODES = 4

pytestmark = pytest.mark.skipif(not prefix_compiled.available(), reason="no C++ compiler works here")


def one_of_each(monkeypatch, *args, **options):
    """Two allocators alike, the first all in Python."""
    with monkeypatch.context() as patch:
        patch.setattr(pool, "open_index", prefix.PrefixIndex)
        python = BlockAllocator(*args, **options)
    compiled = BlockAllocator(*args, **options)
    assert python.compiled is None and compiled.compiled is not None
    return python, compiled


def everything(allocator):
    """All numbers of an allocator; nodes by their names, since their rows may differ."""
    table, blocks, index = allocator.table, allocator.pool, allocator.pool.index
    numbers = table.numbers.copy()
    numbers[COLUMN_OF_NODES] = 0
    names = [index.digest(node) if node != NO_NODE else b"" for node in table.nodes.tolist()]
    appended = None if table.appended is None else [np.asarray(part).tolist() for part in table.appended]
    return {
        "numbers": numbers.tolist(), "names": names, "blocks": table.blocks.tolist(), "refs": blocks.refs.tolist(),
        "tokens": blocks.tokens.tolist(), "free": list(blocks.free), "cached": list(blocks.cached),
        "clock": (table.version, table.last_reshaped), "sharing": table.sharing, "appended": appended,
        "block names": [index.digest(node) if node else b"" for node in index.node_of.tolist()],
    }  # fmt: skip


class Pair:
    """Both, told the same."""

    def __init__(self, monkeypatch, draw, **options):
        self.both = one_of_each(monkeypatch, 40, 4, num_host_blocks=12, **options)
        self.draw, self.names, self.born = draw, [], 0

    def tell(self, verb, *args, **options):
        said = []
        for allocator in self.both:
            try:
                said.append(getattr(allocator, verb)(*args, **options))
            except (OutOfBlocks, ValueError) as error:
                said.append((type(error), str(error)))
        assert said[0] == said[1]
        return not (isinstance(said[0], tuple) and isinstance(said[0][0], type))

    def some(self):
        here = [name for name in self.names if not self.both[0].is_swapped(name)]
        return self.draw.sample(here, self.draw.randint(0, len(here)))

    def tokens(self, most):
        return [self.draw.randrange(2) for _ in range(self.draw.randint(0, most))]

    def add(self):
        name, tokens, context = self.born, self.tokens(30), bytes([self.draw.randrange(2)])
        self.born += 1
        if self.tell("add", name, tokens, context=context):
            self.names.append(name)

    def append_each(self):
        names = self.some()
        tokens = [self.draw.randrange(2) for _ in names]
        self.tell("append_each", names, tokens)

    def append(self):
        for name in self.some()[:1]:
            tokens = self.tokens(20)
            self.tell("append", name, tokens)

    def compute(self):
        names = self.some()
        self.tell("mark_all_computed", names)

    def compute_some(self):
        names = self.some()
        shares = [self.draw.random() for _ in names]
        lengths = [int(share * self.both[0].length(name)) for share, name in zip(shares, names, strict=True)]
        self.tell("mark_all_computed", names, lengths)
        for name, length in list(zip(names, lengths, strict=True))[:1]:
            self.tell("mark_computed", name, length)

    def fork(self):
        for name in self.some()[:1]:
            child = self.born
            self.born += 1
            self.tell("fork", name, child)
            self.names.append(child)

    def truncate(self):
        for name in self.some()[:1]:
            length = self.draw.randint(0, self.both[0].length(name))
            self.tell("truncate", name, length)

    def abandon(self):
        names = self.some()
        self.tell("abandon", names)

    def swap(self):
        for name in self.draw.sample(self.names, min(1, len(self.names))):
            out = self.both[0].is_swapped(name)
            self.tell("swap_in" if out else "swap_out", name)

    def free(self):
        for name in self.draw.sample(self.names, min(1, len(self.names))):
            self.names.remove(name)
            self.tell("free", name)


VERBS = ["add", "add", "append", "compute_some", "fork", "truncate", "abandon", "swap", "free", "free"]
VERBS += 4 * ["append_each", "compute"]


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"prefix_caching": True, "watermark": 3}])
def test_both_come_to_the_same_arrays(options, monkeypatch):
    for seed in range(4):
        pair = Pair(monkeypatch, random.Random(seed), **options)
        for _ in range(250):
            getattr(pair, pair.draw.choice(VERBS))()
            python, compiled = map(everything, pair.both)
            assert python == compiled
        pair.both[1].check_invariants()


def test_a_copy_in_the_middle_of_a_step_goes_on_with_arrays_of_its_own():
    allocator = BlockAllocator(8, 4)
    allocator.add("a", range(7))
    allocator.append_each(["a"], [7])
    other = copy.deepcopy(allocator)
    other.append_each(["a"], [50])
    other.mark_all_computed(["a"])
    allocator.append_each(["a"], [8])
    assert (allocator.sequence("a").tokens, other.sequence("a").tokens) == ([*range(9)], [*range(8), 50])
    assert (allocator.computed("a"), other.computed("a")) == (0, 9)
    for each in (allocator, other):
        each.check_invariants()


def test_a_step_without_room_changes_nothing(monkeypatch):
    for allocator in one_of_each(monkeypatch, 3, 4):
        allocator.add("a", range(4))
        allocator.add("b", range(10, 18))
        before = everything(allocator)
        with pytest.raises(OutOfBlocks, match="2 blocks are needed but 0 are free"):
            allocator.append_each(["a", "b"], [1, 2])
        with pytest.raises(ValueError, match="one a sequence"):
            allocator.append_each(["a", "b"], [1])
        assert everything(allocator) == before


def test_rows_and_blocks_that_move_while_sequences_grow_are_found_again(monkeypatch):
    both = one_of_each(monkeypatch, 1000, 2)
    for allocator in both:
        for name in range(40):  # rows are made anew at 16 and 32
            allocator.add(name, [name] * 3)
            allocator.append_each(list(range(name + 1)), range(name + 1))
            allocator.mark_all_computed(list(range(name + 1)))
        for _ in range(40):  # 17 blocks and more a row
            allocator.append_each([0, 1], [5, 6])
        allocator.check_invariants()
    assert everything(both[0]) == everything(both[1])


def test_a_build_ships_the_text_that_the_cache_compiles():
    assert shipping.CACHE_SOURCES == prefix_compiled.SOURCES
