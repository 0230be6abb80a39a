"""Random operations on the cache, against a naive model that keeps whole token lists.

What a slot holds depends on the context and on every token up to it, as real keys and values do. So each write stores
a tag of exactly that, and after every step reading each sequence through its block table must give the tags of its own
computed tokens: a wrong share, a missed copy or a stale hash shows as a foreign tag.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagegen.cache import BlockAllocator, OutOfBlocks, PagedKVCache
from pagegen.spec import CacheLayout

LAYERS = 2
TOKENS = st.integers(0, 1)  # two tokens only: equal prefixes, forks and divergence then come up all the time
CONTEXTS = st.sampled_from([b"", b"adapter-1"])
STEPS = {"count": 0}


@dataclass
class Naive:
    """A sequence as the model sees it."""

    tokens: list[int]
    context: bytes
    computed: int


class BookkeepingOnly:
    """Drives a `BlockAllocator` as its user would, over slots in a dictionary."""

    def __init__(self, num_blocks, block_size, prefix_caching, watermark):
        self.allocator = self.cache = BlockAllocator(num_blocks, block_size, prefix_caching, watermark=watermark)
        self.memory = {block: [None] * block_size for block in range(num_blocks)}

    def append(self, seq_id, tokens):
        self._copy(self.cache.append(seq_id, tokens))

    def append_each(self, ids, tokens):
        self._copy(self.cache.append_each(ids, tokens))

    def compute(self, ids, ends, tag):
        starts = [self.cache.computed(seq_id) for seq_id in ids]
        if len(ids) == 1:
            self._copy(self.cache.mark_computed(ids[0], ends[0]))
        else:
            self._copy(self.cache.mark_all_computed(ids, ends))
        for seq_id, start, end in zip(ids, starts, ends, strict=True):
            blocks = self.cache.block_ids(seq_id)
            for position in range(start, end):
                block, offset = divmod(position, self.cache.block_size)
                self.memory[blocks[block]][offset] = tag(seq_id, position)

    def read(self, seq_id, position):
        block, offset = divmod(position, self.cache.block_size)
        return self.memory[self.cache.block_ids(seq_id)[block]][offset]

    def _copy(self, pairs):
        for source, target in pairs:
            self.memory[target] = list(self.memory[source])


class WithTensors:
    """Drives a `PagedKVCache` through `batch`, writing tags into its real tensors by slot."""

    def __init__(self, num_blocks, block_size, prefix_caching, watermark):
        layout = CacheLayout(block_size=block_size, order="HND" if block_size % 2 else "NHD")
        self.cache = PagedKVCache(
            LAYERS, num_blocks, layout, 1, 1, dtype=torch.float32, prefix_caching=prefix_caching, watermark=watermark
        )
        self.allocator = self.cache.allocator

    def append(self, seq_id, tokens):
        self.cache.append(seq_id, torch.tensor(tokens, dtype=torch.int32))

    def append_each(self, ids, tokens):
        self.cache.append_each(ids, tokens)

    def compute(self, ids, ends, tag):
        starts = [self.cache.computed(seq_id) for seq_id in ids]
        batch = self.cache.batch(ids, query_lens=[end - start for start, end in zip(starts, ends, strict=True)])
        queries = [(i, p) for i, (a, b) in enumerate(zip(starts, ends, strict=True)) for p in range(a, b)]
        assert batch.positions.tolist() == [position for _, position in queries]
        assert batch.seq_lens.tolist() == list(ends)
        assert len(set(batch.slot_mapping.tolist())) == len(queries)
        assert all(self.allocator.pool.refs[slot // self.allocator.block_size] == 1 for slot in batch.slot_mapping)
        for shared, rows in batch.prefix_groups:
            assert len({tuple(batch.block_table[row, :shared].tolist()) for row in rows}) == 1 and shared
            assert all(starts[row] >= shared * self.allocator.block_size for row in rows)
        tags = torch.tensor([tag(ids[i], position) for i, position in queries], dtype=torch.float32)
        size = self.allocator.block_size
        for layer in range(LAYERS):
            at = (batch.slot_mapping // size, batch.slot_mapping % size)
            self.cache.k_cache(layer)[at] = tags[:, None, None] + layer
            self.cache.v_cache(layer)[at] = -tags[:, None, None] - layer

    def read(self, seq_id, position):
        block, offset = divmod(position, self.allocator.block_size)
        block = self.cache.block_ids(seq_id)[block]
        keys = {float(self.cache.k_cache(layer)[block, offset]) - layer for layer in range(LAYERS)}
        values = {-float(self.cache.v_cache(layer)[block, offset]) - layer for layer in range(LAYERS)}
        assert keys == values and len(keys) == 1
        return int(keys.pop())


class CacheMachine(RuleBasedStateMachine):
    driver_class = BookkeepingOnly

    @initialize(
        num_blocks=st.integers(5, 16),
        block_size=st.integers(1, 4),
        prefix_caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0, 0, 1]),
    )
    def start(self, num_blocks, block_size, prefix_caching, watermark):
        self.driver = self.driver_class(num_blocks, block_size, prefix_caching, watermark)
        self.cache, self.allocator = self.driver.cache, self.driver.allocator
        self.model: dict[int, Naive] = {}
        self.tags: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.seen: list[tuple[list[int], bytes]] = []  # what sequences held, freed ones too
        self.next_id = 0

    def tag(self, seq_id, position):
        naive = self.model[seq_id]
        content = (naive.context, tuple(naive.tokens[: position + 1]))
        return self.tags.setdefault(content, len(self.tags) + 1)

    def blocks_for(self, tokens):
        return -(-tokens // self.allocator.block_size)

    def available(self):
        stats = self.cache.stats()
        return stats.free_blocks + stats.cached_blocks

    def attempt(self, operation):
        """The OutOfBlocks that `operation` raises, having changed nothing, or None."""
        before = snapshot(self.allocator)
        try:
            operation()
        except OutOfBlocks as error:
            assert error.needed > error.free and snapshot(self.allocator) == before
            return error
        return None

    def least_hit(self, tokens, context):
        """Tokens that live sequences alone must let a new one find."""
        size, best = self.allocator.block_size, 0
        for other in self.model.values() if self.allocator.prefix_caching else ():
            if other.context == context:
                common = 0
                for mine, theirs in zip(tokens[:-1], other.tokens[: other.computed], strict=False):
                    if mine != theirs:
                        break
                    common += 1
                best = max(best, common // size * size)
        return best

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=14), context=CONTEXTS)
    def add(self, tokens, context):
        self.admit(tokens, context)

    @precondition(lambda self: self.seen)
    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=3), data=st.data())
    def add_what_begins_like_another(self, tokens, data):
        like, context = data.draw(st.sampled_from(self.seen[-6:]))
        self.admit(like[: len(like) - data.draw(st.integers(0, min(3, len(like))))] + tokens, context)

    def admit(self, tokens, context):
        seq_id, self.next_id = self.next_id, self.next_id + 1
        least = self.least_hit(tokens, context)
        admitted = self.cache.can_admit(len(tokens), tokens=tokens, context=context)
        hit = []
        error = self.attempt(lambda: hit.append(self.cache.add(seq_id, tokens, context=context)))
        assert admitted == (error is None)
        if error is not None:
            assert error.needed <= self.blocks_for(len(tokens)) and error.free <= self.available()
            return
        assert least <= hit[0] <= max(0, len(tokens) - 1) and hit[0] % self.allocator.block_size == 0
        self.model[seq_id] = Naive(list(tokens), context, hit[0])

    @precondition(lambda self: self.model)
    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=7), data=st.data())
    def append(self, tokens, data):
        self.extend(data.draw(st.sampled_from(sorted(self.model))), tokens)

    @precondition(lambda self: self.model)
    @rule(tokens=st.lists(TOKENS, min_size=8, max_size=8))
    def decode(self, tokens):
        ids = sorted(self.model)[: len(tokens)]
        each = list(zip(ids, tokens, strict=False))
        available = self.available()
        error = self.attempt(lambda: self.driver.append_each(ids, [token for _, token in each]))
        if error is None:
            for seq_id, token in each:
                self.model[seq_id].tokens.append(token)
            self.compute_everything()
        else:
            assert error.free == available < error.needed <= len(each)

    @precondition(lambda self: self.model)
    @rule(tokens=st.lists(TOKENS, min_size=2, max_size=6), data=st.data())
    def speculate(self, tokens, data):
        seq_id = data.draw(st.sampled_from(sorted(self.model)))
        before = len(self.model[seq_id].tokens)
        self.extend(seq_id, tokens)
        self.compute_everything()
        self.cut(seq_id, data.draw(st.integers(before, len(self.model[seq_id].tokens))))

    def extend(self, seq_id, tokens):
        naive, size = self.model[seq_id], self.allocator.block_size
        held = [block for other in self.model for block in self.cache.block_ids(other)]
        shared_tail = len(naive.tokens) % size and held.count(self.cache.block_ids(seq_id)[-1]) > 1
        grown = self.blocks_for(len(naive.tokens) + len(tokens)) - self.blocks_for(len(naive.tokens))
        needed = grown + bool(shared_tail)
        available = self.available()
        error = self.attempt(lambda: self.driver.append(seq_id, tokens))
        assert (error is None) == (needed <= available)
        if error is None:
            naive.tokens.extend(tokens)
        else:
            assert (error.needed, error.free) == (needed, available)

    @precondition(lambda self: self.model and len(self.model) < 6)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.model)))
        child, self.next_id = self.next_id, self.next_id + 1
        self.cache.fork(parent, child)
        assert self.cache.block_ids(child) == self.cache.block_ids(parent)
        naive = self.model[parent]
        self.model[child] = Naive(list(naive.tokens), naive.context, naive.computed)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.model)))
        self.cut(seq_id, data.draw(st.integers(0, len(self.model[seq_id].tokens))))

    def cut(self, seq_id, length):
        naive = self.model[seq_id]
        self.cache.truncate(seq_id, length)
        del naive.tokens[length:]
        naive.computed = min(naive.computed, length)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.model)))
        self.cache.free(seq_id)
        del self.model[seq_id]
        with pytest.raises(KeyError, match=repr(seq_id)):
            self.cache.free(seq_id)

    @precondition(lambda self: self.model)
    @rule()
    def compute_everything(self):
        self.run_step(sorted(self.model), [len(naive.tokens) for _, naive in sorted(self.model.items())])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def compute_some(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        left = [len(self.model[seq_id].tokens) - self.model[seq_id].computed for seq_id in ids]
        counts = [data.draw(st.integers(0, most)) for most in left]
        self.run_step(ids, [self.model[seq_id].computed + count for seq_id, count in zip(ids, counts, strict=True)])

    def run_step(self, ids, ends):
        shared = self.cache.stats().shared_blocks
        error = self.attempt(lambda: self.driver.compute(ids, ends, self.tag))
        if error is not None:
            assert shared  # only a fork of uncomputed tokens makes computing need blocks
            return
        for seq_id, end in zip(ids, ends, strict=True):
            self.model[seq_id].computed = end
            self.seen.append((list(self.model[seq_id].tokens), self.model[seq_id].context))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def refused_calls_change_nothing(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.model)))
        before = snapshot(self.allocator)
        for call in (
            lambda: self.cache.add(seq_id, [1]),
            lambda: self.cache.fork(seq_id, seq_id),
            lambda: self.cache.fork("nobody", "child"),
            lambda: self.cache.append("nobody", [1]),
            lambda: self.cache.append(seq_id, [1, -1]),
            lambda: self.cache.add("new", [1, 2**32]),
            lambda: self.cache.truncate(seq_id, len(self.model[seq_id].tokens) + 1),
        ):
            with pytest.raises((KeyError, ValueError)):
                call()
        assert snapshot(self.allocator) == before

    @invariant()
    def bookkeeping_agrees_with_itself(self):
        STEPS["count"] += 1
        if hasattr(self, "cache"):
            self.cache.check_invariants()

    @invariant()
    def every_sequence_reads_its_own_computed_tokens(self):
        for seq_id, naive in getattr(self, "model", {}).items():
            assert (self.cache.length(seq_id), self.cache.computed(seq_id)) == (len(naive.tokens), naive.computed)
            assert self.allocator.sequence(seq_id).tokens == naive.tokens
            for position in range(naive.computed):
                assert self.driver.read(seq_id, position) == self.tag(seq_id, position), (seq_id, position)


class TensorMachine(CacheMachine):
    driver_class = WithTensors


def snapshot(allocator):
    """Everything the allocator knows, as plain values."""
    pool = allocator.pool
    return (
        list(pool.refs),
        list(pool.free),
        list(pool.cached),
        {digest: (list(node.blocks), node.users) for digest, node in pool.index.nodes.items()},
        {seq_id: allocator.sequence(seq_id) for seq_id in allocator.sequences},
        allocator.stats(),
    )


@pytest.mark.parametrize(("machine", "examples", "least"), [(CacheMachine, 120, 3000), (TensorMachine, 50, 1000)])
def test_random_operations_never_mix_up_what_sequences_read(machine, examples, least):
    STEPS["count"] = 0
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=60, deadline=None, suppress_health_check=checks),
    )
    assert STEPS["count"] >= least
