"""Random operations on the cache. What each may answer is worked out naively beforehand; this part admits sequences."""

from __future__ import annotations

import math
from collections import Counter

import hypothesis.strategies as st
import pytest
from drivers import Books, Shape
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from naive_content import Chains, Naive
from naive_group import NaiveGroup

from pagegen.cache import OutOfBlocks

MOST_SEQUENCES = 7
COUNTS: Counter[str] = Counter()  # steps, and how often what is rare came about

# Two tokens only, drawn as the bits of a number: equal beginnings, forks and divergence then come up all the time.
BITS = st.integers(0, 2**12 - 1)
CHOICE = st.just(2**12 - 2) | BITS  # of sequences, as the bits of a number: often everyone, as engines do
WHO = st.integers(0, 11)
SHAPES = st.builds(
    Shape,
    num_blocks=st.integers(5, 18),
    block_size=st.integers(1, 4),
    window=st.sampled_from([None, None, None, 2, 3, 6]),
    num_host_blocks=st.sampled_from([0, 3, 9]),
    watermark=st.sampled_from([0, 0, 0, 1, 2]),
    prefix_caching=st.sampled_from([True, True, True, True, False]),
)


def tokens_of(bits, count):
    return [bits >> i & 1 for i in range(count)]


class AdmittingMachine(RuleBasedStateMachine):
    """The state, how it is followed, and admission. `machine_growth` and `machine_faults` add the other operations."""

    driver_class = Books

    @initialize(shapes=st.lists(SHAPES, min_size=1, max_size=2))
    def start(self, shapes):
        self.driver = self.driver_class(shapes)
        self.cache = self.driver.cache
        self.groups = [NaiveGroup(books) for books in self.driver.books]
        self.windows = any(group.window for group in self.groups)
        self.chains = Chains()
        self.model: dict[int, Naive] = {}
        self.past: list[tuple[list[int], bytes]] = []  # what sequences held, freed ones too
        self.next_id = 0

    # helpers

    def resident(self):
        return [seq_id for seq_id, naive in self.model.items() if not naive.swapped]

    def swapped(self):
        return [seq_id for seq_id, naive in self.model.items() if naive.swapped]

    def some(self, bits):
        """Some of the sequences on the device, one at least; backwards where the first bit says so."""
        ids = self.resident()
        chosen = [seq_id for i, seq_id in enumerate(ids, 1) if bits >> i & 1]
        return chosen[:: -1 if bits & 1 else 1] or ids[:1]

    def snapshot(self):
        """All that a user can see."""
        ids = self.resident()
        seen = [(self.cache.length(seq_id), self.cache.computed(seq_id)) for seq_id in self.model]
        return seen, [self.cache.block_ids(seq_id) for seq_id in ids], [group.books.stats() for group in self.groups]

    def attempt(self, operation, needs, pool="device"):
        """Whether `operation` succeeds, which it must where every group has the blocks that it `needs`: (needed, free)
        pairs. Else it must say so, and have changed nothing."""
        lacking = [(*need, group) for group, need in enumerate(needs) if need[0] > need[1]]
        before = self.snapshot() if lacking else None
        try:
            operation()
        except OutOfBlocks as error:
            assert lacking, f"{error} in spite of {needs}"
            needed, free, group = lacking[0]
            said = (error.needed, error.free, error.pool, error.group)
            assert said == (needed, free, pool, group if len(self.groups) > 1 else None)
            assert self.snapshot() == before, "OutOfBlocks after a change"
            COUNTS["refused for want of blocks"] += 1
            return False
        assert not lacking, f"it takes {lacking[0][0]} blocks, and {lacking[0][1]} are free"
        return True

    def settle(self, moved, *, starts=None, found=None, rewritten=(), named=()):
        """Follows what an operation did to the tables of `moved`, group by group; returns how many fresh blocks it
        took in each. `starts`, `found` and `rewritten` answer for a group."""
        taken = []
        for group in self.groups:
            there = [i for i in moved if i in self.model and not self.model[i].swapped]
            tables = {seq_id: group.books.block_ids(seq_id) for seq_id in there}
            begin = {seq_id: starts(group, seq_id) if starts else group.released[seq_id] for seq_id in there}
            places = found(group) if found else ()
            for seq_id, index in places:
                name = group.named.get(tables[seq_id][index])
                assert name == group.end_name(self.model[seq_id], index), f"{seq_id} shares what holds something else"
            taken.append(group.take(tables, begin, places))
            for seq_id, index in rewritten(group) if rewritten else ():
                group.rewrite(tables[seq_id][index])
            for seq_id in named:
                before = group.seen[seq_id][: begin[seq_id]]  # what a window takes now is named first
                group.name(seq_id, self.model[seq_id], before + tables[seq_id][len(before) :])
            group.let_go(moved, tables, begin)
        return [len(places) for places in taken]

    # admission

    @rule(bits=BITS, count=st.integers(0, 12), other=st.sampled_from([False, False, True]), compute=st.booleans())
    def add(self, bits, count, other, compute):
        self.serve(tokens_of(bits, count), b"adapter" if other else b"", compute=compute)

    @precondition(lambda self: self.past)
    @rule(which=WHO, less=st.integers(0, 4), bits=BITS, more=st.integers(0, 4), compute=st.booleans())
    def add_what_begins_like_another(self, which, less, bits, more, compute):
        tokens, context = self.past[-1 - which % len(self.past)]
        self.serve(tokens[: max(0, len(tokens) - less)] + tokens_of(bits, more), context, compute=compute)

    def serve(self, tokens, context, *, compute, room=True):
        """Admits a sequence and computes it if asked to; older ones make room for it then."""
        seq_id = self.admit(tokens, context)
        while seq_id is None and self.model and compute and room:
            self.end(next(iter(self.model)))
            seq_id = self.admit(tokens, context)
        if compute and seq_id is not None:
            self.run_step([seq_id], [len(tokens)])

    def cached(self, naive):
        """How many tokens of a new sequence every group has: the most that all can start at, but for the last."""
        step = math.lcm(*(group.size for group in self.groups))
        most = max(0, len(naive.tokens) - 1) // step * step
        return next(c for c in range(most, -1, -step) if all(group.can_start_at(naive, c) for group in self.groups))

    def admission(self, naive, cached, lookahead=0):
        """(needed, free) in each group."""
        needs = []
        for group in self.groups:
            ends = naive.names[group.size - 1 : cached : group.size][group.first_seen(cached) :]
            free = group.available() - group.revived(ends) - group.books.watermark
            needs.append((group.blocks_for(len(naive.tokens) + lookahead) - cached // group.size, max(0, free)))
        return needs

    def admit(self, tokens, context):
        naive = Naive(context, self.chains.root(context))
        naive.extend(self.chains, tokens)
        cached, hits = self.cached(naive), []
        for lookahead in (0, 3):
            fits = all(needed <= free for needed, free in self.admission(naive, cached, lookahead))
            said = self.cache.can_admit(len(tokens), tokens=tokens, context=context, lookahead=lookahead)
            assert said == fits, f"can_admit with {lookahead} more says {said}"
        fits = all(needed <= free for needed, free in self.admission(naive, 0, 2))
        assert self.cache.can_admit(len(tokens), lookahead=2) == fits or cached
        before = [group.available() for group in self.groups]
        needs, seq_id = self.admission(naive, cached), self.next_id
        if len(self.model) >= MOST_SEQUENCES or not self.attempt(
            lambda: hits.append(self.cache.add(seq_id, tokens, context=context)), needs
        ):
            return None
        assert hits == [cached], f"{hits[0]} tokens found of {cached} that can be"
        self.next_id += 1
        self.model[seq_id] = naive
        naive.computed = cached
        self.past.append((tokens, context))
        for group in self.groups:
            ends = naive.names[group.size - 1 : cached : group.size]
            group.stands[seq_id] = [(name, True) for name in ends]
        fresh = self.settle(
            [seq_id],
            starts=lambda group, _: group.first_seen(cached),
            found=lambda group: {(seq_id, i) for i in range(group.first_seen(cached), cached // group.size)},
        )
        assert fresh == [needed for needed, _ in needs]
        for group, free in zip(self.groups, before, strict=True):
            assert group.available() >= group.books.watermark or group.available() == free
        COUNTS["prefix hits"] += cached > 0
        COUNTS["prefix hits after evictions"] += cached > 0 and any(group.evictions for group in self.groups)
        return seq_id

    # the end

    @precondition(lambda self: self.model)
    @rule(who=WHO)
    def free(self, who):
        self.end(list(self.model)[who % len(self.model)])

    def end(self, seq_id):
        self.cache.free(seq_id)
        self.forget_sequence(seq_id)
        with pytest.raises(KeyError, match=str(seq_id)):
            self.cache.free(seq_id)

    def forget_sequence(self, seq_id):
        del self.model[seq_id]
        self.settle([seq_id])
        for group in self.groups:
            del group.stands[seq_id], group.released[seq_id]
            group.on_host.pop(seq_id, None)
