"""The state machine's second part: sequences grow, are computed, fork and are cut."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule
from machine import BITS, CHOICE, COUNTS, MOST_SEQUENCES, WHO, AdmittingMachine, tokens_of


def written(group, spans):
    """The places (sequence, block index) that a step writes which computes from start to end what `spans` says."""
    return [
        (seq_id, index)
        for seq_id, (start, end) in spans.items()
        for index in range(start // group.size, group.blocks_for(end))
        if end > start
    ]


class GrowingMachine(AdmittingMachine):
    """What an engine does all the time."""

    # growth

    @precondition(lambda self: self.resident())
    @rule(who=WHO, bits=BITS, count=st.integers(0, 7))
    def append(self, who, bits, count):
        ids = self.resident()
        self.extend(ids[who % len(ids)], tokens_of(bits, count))

    @precondition(lambda self: self.resident())
    @rule(which=CHOICE, bits=BITS, times=st.integers(0, 3))
    def decode(self, which, bits, times):
        """Steps of a token each, of the same sequences; 0: a token each, and no step."""
        ids = self.some(which)
        for i in range(max(1, times)):
            if not self.extend_each(ids, tokens_of(bits >> i, len(ids))):
                return
            if times:
                self.run_step(ids, [len(self.model[seq_id].tokens) for seq_id in ids])

    @precondition(lambda self: self.resident())
    @rule(who=WHO, bits=BITS, count=st.integers(1, 6), kept=st.integers(0, 6))
    def speculate(self, who, bits, count, kept):
        seq_id = self.resident()[who % len(self.resident())]
        before = len(self.model[seq_id].tokens)
        everything = before == self.model[seq_id].computed
        if self.extend(seq_id, tokens_of(bits, count)) and self.run_step([seq_id], [before + count]) and everything:
            self.cut(seq_id, before + min(kept, count))

    @precondition(lambda self: self.resident())
    @rule(which=CHOICE, bits=BITS)
    def feed_ahead(self, which, bits):
        """Two tokens are known of each, and computed one after the other."""
        ids = self.some(which)
        if self.extend_each(ids, tokens_of(bits, len(ids))) and self.extend_each(ids, tokens_of(bits >> 6, len(ids))):
            lengths = [len(self.model[seq_id].tokens) for seq_id in ids]
            if self.run_step(ids, [length - 1 for length in lengths]):
                self.run_step(ids, lengths)

    @precondition(lambda self: self.resident())
    @rule(who=WHO, share=st.integers(1, 12), bits=BITS, count=st.integers(1, 5))
    def rewrite(self, who, share, bits, count):
        """Between two steps of everyone, one is taken back and goes on otherwise; then its old tokens are asked for."""
        ids = self.resident()
        seq_id = ids[who % len(ids)]
        old, context = list(self.model[seq_id].tokens), self.model[seq_id].context
        self.run_step(ids, [len(self.model[seq_id].tokens) for seq_id in ids])
        self.cut(seq_id, max(0, len(old) - share))
        if self.extend(seq_id, tokens_of(bits, count)):
            self.run_step(ids, [len(self.model[seq_id].tokens) for seq_id in ids])
        self.admit(old, context)

    def last_block(self, group, seq_id):
        """The partly filled last block of a sequence, if it has one."""
        partial = len(self.model[seq_id].tokens) % group.size
        return group.seen[seq_id][-1] if partial else None

    def extend(self, seq_id, tokens):
        naive, count = self.model[seq_id], len(tokens)
        needs = []
        for group in self.groups:
            last = self.last_block(group, seq_id)
            copied = bool(count) and last is not None and group.refs()[last] > 1
            grown = group.blocks_for(len(naive.tokens) + count) - group.blocks_for(len(naive.tokens))
            needs.append((grown + copied, group.available()))
            COUNTS["copies on write"] += copied
        if not self.attempt(lambda: self.driver.append(seq_id, tokens), needs):
            return False
        self.grown([seq_id], needs, [tokens])
        return True

    def extend_each(self, ids, tokens):
        needs = []
        for group in self.groups:
            lasts = [self.last_block(group, seq_id) for seq_id in ids]
            refs = group.refs()
            writers = Counter(last for last in lasts if last is not None)
            copies = sum(min(count, refs[block] - 1) for block, count in writers.items())
            needs.append((lasts.count(None) + copies, group.available()))
            COUNTS["copies on write"] += copies
        if not self.attempt(lambda: self.driver.append_each(ids, tokens), needs):
            return False
        self.grown(ids, needs, [[token] for token in tokens])
        return True

    def grown(self, ids, needs, tokens):
        lengths = {seq_id: len(self.model[seq_id].tokens) for seq_id in ids}
        for seq_id, more in zip(ids, tokens, strict=True):
            self.model[seq_id].extend(self.chains, more)
        writes = any(tokens)
        fresh = self.settle(
            ids,
            rewritten=lambda group: [(i, n // group.size) for i, n in lengths.items() if n % group.size and writes],
        )
        assert fresh == [needed for needed, _ in needs], "a block was copied needlessly, or not at all"

    # steps

    @precondition(lambda self: self.resident())
    @rule(which=CHOICE, shares=BITS)
    def compute(self, which, shares):
        ids = self.some(which)
        self.run_step(ids, self.ends(ids, shares))

    def ends(self, ids, shares):
        """How far each is computed: no, a third, two thirds or all of what is left."""
        ends = []
        for i, seq_id in enumerate(ids):
            naive = self.model[seq_id]
            left = len(naive.tokens) - naive.computed
            ends.append(naive.computed + left * (3 - (shares >> 2 * i & 3)) // 3)
        return ends

    def run_step(self, ids, ends):
        starts = [self.model[seq_id].computed for seq_id in ids]
        if starts == list(ends):
            return True  # nothing to compute is no step
        slots = self.announce(ids, starts, ends)
        if slots is None:
            return False
        for group, contents, places in zip(self.groups, self.driver.contents, slots, strict=True):
            contents.write(places, self.computed_values(group, contents, ids, starts, ends))
        self.past.extend((list(self.model[seq_id].tokens), self.model[seq_id].context) for seq_id in ids)
        return True

    def announce(self, ids, starts, ends):
        """The slots that the step writes, a list a group, or None where it lacks blocks."""
        needs, spans = [], dict(zip(ids, zip(starts, ends, strict=True), strict=True))
        for group in self.groups:
            refs, writers = group.refs(), Counter()
            for seq_id, index in written(group, spans):
                writers[group.seen[seq_id][index]] += 1
            needs.append((sum(min(count, refs[b] - 1) for b, count in writers.items()), group.available()))
        slots = []
        if not self.attempt(lambda: slots.extend(self.driver.announce(self.model, ids, starts, ends)), needs):
            return None
        for seq_id, end in zip(ids, ends, strict=True):
            self.model[seq_id].computed = end
        released = sum(sum(group.released.values()) for group in self.groups)
        fresh = self.settle(
            ids,
            starts=lambda group, seq_id: max(group.released[seq_id], group.first_seen(spans[seq_id][0])),
            rewritten=lambda group: written(group, spans),
            named=ids,
        )
        assert fresh == [needed for needed, _ in needs]
        COUNTS["copies for uncomputed forks"] += sum(fresh)
        COUNTS["blocks behind a window"] += sum(sum(group.released.values()) for group in self.groups) - released
        return slots

    def computed_values(self, group, contents, ids, starts, ends):
        """What a model would write: it reads the token before from the cache, not from what it should be."""
        values = []
        for seq_id, start, end in zip(ids, starts, ends, strict=True):
            naive, value = self.model[seq_id], self.model[seq_id].root
            index, offset = divmod(start - 1, group.size)
            if start and index >= group.released[seq_id]:
                value = contents.read([group.seen[seq_id][index]])[offset]
            elif start:  # with a window of one block the token before is seen no more
                value = naive.names[start - 1]
            for token in naive.tokens[start:end]:
                value = self.chains.after(value, token)
                values.append(value)
        return values

    # forks, truncation, the end

    @precondition(lambda self: self.resident() and len(self.model) < MOST_SEQUENCES)
    @rule(who=WHO)
    def fork(self, who):
        self.fork_of(self.resident()[who % len(self.resident())])

    def fork_of(self, parent):
        child, self.next_id = self.next_id, self.next_id + 1
        self.cache.fork(parent, child)
        self.model[child] = self.model[parent].copy()
        for group in self.groups:
            group.stands[child] = list(group.stands[parent])
            table, start = group.books.block_ids(child), group.released[parent]
            assert table == group.seen[parent]
            group.let_go([child], {child: table}, {child: start})
        return child

    @precondition(lambda self: self.resident())
    @rule(who=WHO, share=st.integers(0, 12))
    def truncate(self, who, share):
        seq_id = self.resident()[who % len(self.resident())]
        length = len(self.model[seq_id].tokens)
        self.cut(seq_id, max(0, length - share))

    def cut(self, seq_id, length):
        naive = self.model[seq_id]
        start = min(length, naive.computed)
        if start and any(group.released[seq_id] > group.first_seen(start) for group in self.groups):
            before = self.snapshot()
            with pytest.raises(ValueError, match="length must be 0 or at least"):
                self.cache.truncate(seq_id, length)
            assert self.snapshot() == before
            return
        self.cache.truncate(seq_id, length)
        naive.cut(length)
        for group in self.groups:
            del group.stands[seq_id][length // group.size :]
        fresh = self.settle([seq_id], starts=lambda group, i: min(group.released[i], group.blocks_for(length)))
        assert not any(fresh)
        COUNTS["truncations"] += 1
