"""The prefix index in C++ does what the one in Python does, node by node."""

from __future__ import annotations

import copy
import logging
import pickle
import random

import numpy as np
import pytest

from pagegen.cache import BlockAllocator, pool, prefix_compiled
from pagegen.cache.prefix import NO_NODE, PrefixIndex, block_digest, root_digest
from pagegen.cache.prefix_compiled import CompiledIndex

pytestmark = pytest.mark.skipif(not prefix_compiled.available(), reason="no C++ compiler works here")


def columns(index):
    """All that an index holds, by the names of nodes: rows may differ."""
    name = {NO_NODE: None, **{node: index.digest(node) for node in index.nodes()}}
    return {
        (name[node], index.is_known(node)): (
            name[index.parent(node)],
            int(index.users[node]),
            name[int(index.latest[node])],
            index.copies(node),
            index.parent(node) and index.tokens(node),
        )
        for node in index.nodes()
    }, [name[node] for node in index.node_of.tolist()]


def name_one(index, nodes, counts, blocks, tokens):
    return index.name(np.array(nodes), np.array(counts), np.array(blocks, dtype=np.int32), tokens)


class Pair:
    """Both forms, given the same: a node is a place in `held`, the rows that sequences stand on in each."""

    def __init__(self, blocks, words):
        self.indexes = [PrefixIndex(blocks, 4 * words), CompiledIndex(blocks, 4 * words)]
        self.blocks, self.words = blocks, words
        self.held = []  # a sequence's node in each, and its context and tokens so far

    def both(self, act):
        first, second = (act(i, index) for i, index in enumerate(self.indexes))
        return first, second

    def tokens(self, draw, count):
        return np.array([draw.randrange(2) for _ in range(count * self.words)], dtype=np.uint32).tobytes()

    def begin(self, draw):
        context = bytes([draw.randrange(3)])
        tokens = self.tokens(draw, draw.randrange(6))
        roots = self.both(lambda i, index: index.enter_root(context))
        limit = len(tokens) // 4 // self.words
        gaps = draw.random() < 0.3
        chains = self.both(lambda i, index: index.walk(roots[i], tokens, limit, through_gaps=gaps))
        assert len(chains[0]) == len(chains[1])
        firsts = self.both(lambda i, index: index.first_blocks(chains[i]).tolist())
        assert firsts[0] == firsts[1]
        if len(chains[0]):
            self.both(lambda i, index: (index.enter(chains[i].item(-1)), index.leave(roots[i])))
            roots = tuple(chain.item(-1) for chain in chains)
        self.held.append(list(roots))

    def name(self, draw):
        rows = draw.sample(range(len(self.held)), min(len(self.held), 1 + draw.randrange(3)))
        free = np.flatnonzero(self.indexes[0].node_of == NO_NODE).tolist()
        counts = [draw.randrange(4) for _ in rows]
        blocks = draw.sample(free, min(len(free), sum(counts)))
        if len(blocks) < sum(counts):
            return
        tokens = self.tokens(draw, len(blocks))
        said = self.both(lambda i, index: name_one(index, [self.held[r][i] for r in rows], counts, blocks, tokens))
        assert said[0].done.tolist() == said[1].done.tolist() and said[0].joined == said[1].joined
        for place, row in enumerate(rows):
            self.held[row] = [named.last.item(place) for named in said]

    def remove(self, draw):
        named = np.flatnonzero(self.indexes[0].node_of).tolist()
        blocks = draw.sample(named, min(len(named), draw.randrange(5)))
        self.both(lambda i, index: index.remove(blocks))

    def fill(self, draw):
        free = np.flatnonzero(self.indexes[0].node_of == NO_NODE).tolist()
        row = draw.choice(self.held)
        if free and self.indexes[0].is_known(row[0]) and self.indexes[0].parent(row[0]):
            block = draw.choice(free)
            joined = self.both(lambda i, index: index.fill(row[i], block))
            assert joined[0] == joined[1]

    def leave(self, draw):
        row = self.held.pop(draw.randrange(len(self.held)))
        self.both(lambda i, index: index.leave(row[i]))

    def forget(self, draw):
        rows = draw.sample(self.held, min(len(self.held), draw.randrange(3)))
        known = [row for row in rows if self.indexes[0].is_known(row[0])]
        gone = self.both(lambda i, index: sorted(index.forget_behind([row[i] for row in known])))
        assert gone[0] == gone[1]

    def check(self):
        python, compiled = self.both(lambda i, index: columns(index))
        assert python == compiled
        alone = self.both(lambda i, index: index.only_copies(np.arange(self.blocks, dtype=np.int32)).tolist())
        assert alone[0] == alone[1]


@pytest.mark.parametrize(("blocks", "words"), [(24, 1), (24, 16), (300, 2), (300, 33)])
def test_both_forms_come_to_the_same_columns(blocks, words):
    verbs = ["begin", "begin", "name", "name", "name", "remove", "fill", "leave", "forget"]
    for seed in range(6):
        draw, pair = random.Random(seed), Pair(blocks, words)
        for step in range(250):
            verb = draw.choice(verbs if step % 50 == 0 or blocks < 100 else verbs[:5])  # the larger one is to be full
            if verb in ("begin", "remove") or pair.held:
                getattr(pair, verb)(draw)
            if step % 10 == 0 or blocks < 100:
                pair.check()
        while pair.held:
            pair.leave(draw)
        pair.both(lambda i, index: index.remove(np.flatnonzero(index.node_of).tolist()))
        assert not pair.indexes[0].nodes() and not pair.indexes[1].nodes()


@pytest.mark.parametrize("words", [*range(1, 34), 63, 64, 65, 256, 1000])
def test_names_are_those_of_hashlib(words):
    index = CompiledIndex(2, 4 * words)
    tokens = np.random.default_rng(words).integers(0, 2**32, 2 * words, dtype=np.uint32).tobytes()
    named = name_one(index, [index.enter_root(b"context")], [2], [0, 1], tokens)
    first = block_digest(root_digest(b"context"), tokens[: 4 * words])
    assert index.digest(named.last.item(0)) == block_digest(first, tokens[4 * words :])
    assert index.find(first) == index.parent(named.last.item(0))


def test_nodes_without_blocks_may_be_more_than_there_are_rows_at_first():
    index, turns = CompiledIndex(4, 4), 1000
    node = index.enter_root(b"")
    tokens = np.arange(turns, dtype=np.uint32)
    for turn in range(turns):  # as a window does it: what stands before gives its block back
        node = name_one(index, [node], [1], [turn % 4], tokens[turn : turn + 1].tobytes()).last.item(0)
        index.remove([turn % 4])
    assert len(index.nodes()) == turns + 1
    assert len(index.walk(index.root(b""), tokens.tobytes(), turns, through_gaps=True)) == turns
    index.leave(node)
    assert not index.nodes()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda index: pickle.loads(pickle.dumps(index))])
def test_a_copy_goes_its_own_way(duplicate):
    allocator = BlockAllocator(8, 4)
    assert isinstance(allocator.pool.index, CompiledIndex)
    allocator.add("a", range(9))
    allocator.mark_computed("a", 9)
    other = duplicate(allocator)
    other.free("a")
    other.add("b", range(50, 82))
    other.mark_computed("b", 32)
    assert allocator.add("c", range(9)) == 8
    for each in (allocator, other):
        each.check_invariants()


def test_without_a_compiler_the_index_is_in_python_and_the_log_says_so_once(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    prefix_compiled.available.cache_clear()
    prefix_compiled.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            made = [BlockAllocator(4, 4).pool.index for _ in range(2)]
    finally:
        prefix_compiled.available.cache_clear()
    assert [type(index) for index in made] == [PrefixIndex, PrefixIndex]
    assert sum("no-such-compiler" in record.message for record in caplog.records) == 1


def test_an_allocator_without_prefix_caching_compiles_nothing(monkeypatch):
    monkeypatch.setattr(pool, "open_index", lambda *_: pytest.fail("it asked for an index"))
    BlockAllocator(4, 4, prefix_caching=False).add("a", range(4))
