"""The whole state machine: swapping, failed steps and refused calls besides, and the check after every operation."""

from __future__ import annotations

import re
import sys

import hypothesis.strategies as st
import pytest
from drivers import Tensors
from hypothesis.stateful import invariant, precondition, rule
from machine import BITS, CHOICE, COUNTS, WHO, tokens_of
from machine_growth import GrowingMachine
from naive_content import POISON

from pagegen.cache import OutOfBlocks


class CacheMachine(GrowingMachine):
    """`Books`: the allocator alone, or several as one."""

    checks_invariants = True

    # swapping

    @precondition(lambda self: self.resident())
    @rule(who=WHO)
    def swap_out(self, who):
        seq_id = self.resident()[who % len(self.resident())]
        held = [len(group.seen[seq_id]) - group.released[seq_id] for group in self.groups]
        needs = [
            (count, group.books.num_host_blocks - sum(group.on_host.values()))
            for count, group in zip(held, self.groups, strict=True)
        ]
        if not self.attempt(lambda: self.driver.swap_out(seq_id), needs, pool="host"):
            return
        self.model[seq_id].swapped = True
        self.settle([seq_id])
        for count, group in zip(held, self.groups, strict=True):
            group.on_host[seq_id] = count
        COUNTS["swaps out"] += 1

    @precondition(lambda self: self.swapped())
    @rule(who=WHO)
    def swap_in(self, who):
        seq_id = self.swapped()[who % len(self.swapped())]
        naive = self.model[seq_id]
        shared = [set(self.shared_again(group, seq_id)) for group in self.groups]
        needs = []
        for group, indices in zip(self.groups, shared, strict=True):
            revived = group.revived([group.end_name(naive, i) for i in indices])
            kept_back = group.books.watermark if group.refs() else 0  # alone on the device, it may always come back
            needs.append((group.on_host[seq_id] - len(indices), max(0, group.available() - revived - kept_back)))
        assert self.cache.can_swap_in(seq_id) == all(needed <= free for needed, free in needs)
        if not self.attempt(lambda: self.driver.swap_in(seq_id), needs):
            return
        naive.swapped = False
        places = {id(group): {(seq_id, i) for i in indices} for group, indices in zip(self.groups, shared, strict=True)}
        fresh = self.settle([seq_id], found=lambda group: places[id(group)])
        assert fresh == [needed for needed, _ in needs]
        for group, indices in zip(self.groups, shared, strict=True):
            del group.on_host[seq_id]
            for i in range(group.released[seq_id], len(group.stands[seq_id])):
                if i not in indices and group.stands[seq_id][i][1]:
                    group.name_block(group.seen[seq_id][i], group.end_name(naive, i))
            COUNTS["blocks shared again"] += len(indices)
        COUNTS["swaps in"] += 1

    def shared_again(self, group, seq_id):
        """Which blocks of a swapped sequence can still be found on the device."""
        stands = group.stands[seq_id]
        there = set(group.named.values())
        return [i for i in range(group.released[seq_id], len(stands)) if stands[i][1] and stands[i][0] in there]

    # steps that fail

    @precondition(lambda self: self.resident())
    @rule(which=CHOICE, shares=BITS, found=st.booleans(), bits=BITS, more=st.integers(1, 4), again=st.booleans())
    def fail(self, which, shares, found, bits, more, again):
        """A step leaves garbage where it was to write; somebody may have found that before it is known, and computed on
        top of it."""
        ids = self.some(which)
        self.extend_each(ids, tokens_of(bits, len(ids)))
        starts, ends = [self.model[seq_id].computed for seq_id in ids], self.ends(ids, shares)
        slots = self.announce(ids, starts, ends) if starts != ends else None
        if slots is None:
            return
        for contents, places in zip(self.driver.contents, slots, strict=True):
            contents.write(places, [POISON] * len(places))
        if found:
            naive = self.model[ids[-1]]
            self.serve(naive.tokens[: naive.computed] + tokens_of(bits, more), naive.context, compute=True, room=False)
        COUNTS["failed steps that somebody found" if found else "failed steps"] += 1
        self.abandon(ids)
        for seq_id, start in zip(ids, starts, strict=True):
            assert seq_id not in self.model or self.cache.computed(seq_id) <= start
        ids = self.resident()
        if again and ids:
            self.run_step(ids, [len(self.model[seq_id].tokens) for seq_id in ids])

    def abandon(self, ids):
        expected = {seq_id: self.intact(seq_id) for seq_id in self.model}
        before = {seq_id: naive.computed for seq_id, naive in self.model.items()}
        try:
            self.cache.abandon(ids)
        except ValueError as error:  # what would be computed again is behind somebody's window
            assert self.windows, error
            named = re.search(r"gave back of \[([\d, ]+)\]", str(error))
            assert named and before == {seq_id: self.cache.computed(seq_id) for seq_id in self.model}
            for seq_id in map(int, named[1].split(",")):
                self.end(seq_id)
            COUNTS["windows that passed a failed step"] += 1
            self.abandon([seq_id for seq_id in ids if seq_id in self.model])
            return
        left = {seq_id: self.cache.computed(seq_id) for seq_id in self.model}
        for seq_id, naive in self.model.items():
            assert left[seq_id] <= expected[seq_id] or naive.swapped, f"{seq_id} keeps what was never written"
            assert left[seq_id] == expected[seq_id] or naive.swapped or self.windows, f"{seq_id} loses too much"
            assert left[seq_id] <= before[seq_id]
        for group, contents in zip(self.groups, self.driver.contents, strict=True):
            group.forget(self.model, contents)
        for seq_id, naive in self.model.items():
            naive.computed = left[seq_id]

    def intact(self, seq_id):
        """How much of what a sequence on the device has computed is really there, as far as it can be read."""
        naive = self.model[seq_id]
        found = naive.computed
        for group, contents in zip(self.groups, self.driver.contents, strict=True):
            start = group.released.get(seq_id, 0) * group.size
            values = [] if naive.swapped else contents.read(group.seen[seq_id][group.released[seq_id] :])
            found = min([found, *(start + i for i, value in enumerate(values) if value == POISON)])
        return found

    # refusals

    @precondition(lambda self: self.model)
    @rule(who=WHO)
    def refused_calls_change_nothing(self, who):
        seq_id = list(self.model)[who % len(self.model)]
        before, cache, length = self.snapshot(), self.cache, len(self.model[seq_id].tokens)
        calls = [
            lambda: cache.add(seq_id, [1]),
            lambda: cache.fork(seq_id, seq_id),
            lambda: cache.fork("nobody", "child"),
            lambda: cache.append("nobody", [1]),
            lambda: cache.append(seq_id, [1, -1]),
            lambda: cache.append_each([seq_id, seq_id], [1, 1]),
            lambda: cache.append_each([seq_id], [1, 1]),
            lambda: cache.append_each([seq_id, "nobody"], [1, 1]),
            lambda: cache.add("new", [1, 2**32]),
            lambda: cache.truncate(seq_id, length + 1),
            lambda: cache.abandon(["nobody"]),
            lambda: cache.swap_out("nobody"),
        ]
        if self.model[seq_id].swapped:
            calls += [
                lambda: cache.append(seq_id, [1]),
                lambda: cache.append_each([seq_id], [1]),
                lambda: cache.fork(seq_id, "child"),
                lambda: cache.truncate(seq_id, 0),
                lambda: cache.block_ids(seq_id),
                lambda: cache.swap_out(seq_id),
                lambda: cache.abandon([seq_id]),
                lambda: self.driver.announce(self.model, [seq_id], [length], [length]),
            ]
        else:
            calls += [lambda: cache.swap_in(seq_id)]
        for call in calls:
            with pytest.raises((KeyError, ValueError, OutOfBlocks)):  # whichever is looked at first
                call()
        assert self.snapshot() == before

    # what must be so

    @invariant()
    def check(self):
        COUNTS["steps"] += 1
        if not hasattr(self, "cache"):
            return
        for group, contents in zip(self.groups, self.driver.contents, strict=True):
            group.check(self.model, contents)
        for seq_id, naive in self.model.items():
            assert (self.cache.length(seq_id), self.cache.computed(seq_id)) == (len(naive.tokens), naive.computed)
            assert self.cache.is_swapped(seq_id) == naive.swapped
        if self.checks_invariants:
            self.cache.check_invariants()

    def teardown(self):
        """Once everybody has left, every block can be had again."""
        if not hasattr(self, "cache") or sys.exc_info()[0] is not None:  # an error must not be hidden by another
            return
        COUNTS["evictions"] += sum(group.evictions for group in self.groups)
        for seq_id in list(self.model):
            self.end(seq_id)
        for group in self.groups:
            group.check(self.model, None)
            assert group.available() == group.books.num_blocks
        self.cache.check_invariants()


class TensorMachine(CacheMachine):
    """`Tensors`: the same with every slot of real tensors written and read."""

    driver_class = Tensors


OPERATIONS = {
    "append", "compute", "decode", "fail", "feed_ahead", "fork", "free", "refused_calls_change_nothing", "rewrite",
    "speculate", "swap_in", "swap_out", "truncate",
}  # fmt: skip

# Those that matter to a fault, besides admission: without the others it shows sooner.
FOCUS = {
    "all": OPERATIONS,
    "evict": {"append", "compute", "free"},
    "fail": {"append", "fail", "fork", "free", "swap_in"},
    "fork": {"append", "compute", "decode", "fork", "free", "truncate"},
    "steps": {"compute", "decode", "feed_ahead", "fork", "free", "rewrite", "truncate"},
    "swap": {"compute", "decode", "fork", "free", "swap_in", "swap_out"},
    "rewrite": {"append", "free", "rewrite", "truncate"},
    "window": {"compute", "decode", "free", "speculate", "truncate"},
}


def focused(machine, focus):
    """`machine` with the operations of `focus` alone."""
    return type(f"{machine.__name__}On{focus.title()}", (machine,), dict.fromkeys(OPERATIONS - FOCUS[focus]))
