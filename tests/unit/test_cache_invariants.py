"""Each invariant is broken on purpose, and the check must name it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagegen.cache import BlockAllocator, InvariantBroken
from pagegen.cache.invariants import INVARIANTS


def alter(target, **changes):
    for name, value in changes.items():
        setattr(target, name, value)


def misreport(a, **figures):
    said = replace(a.stats(), **figures)
    a.stats = lambda: said


def node_of(a, block):
    return a.pool.index.node_of[block]


# State: "a" has 0..9 computed, "b" is its fork with one token more, "gone" left two cached blocks behind.
FAULTS = {
    "every_logical_block_maps_to_storage": [
        lambda a: a.sequences["a"].blocks.__setitem__(0, 99),
        lambda a: a.sequences["a"].blocks.__setitem__(0, -1),
        lambda a: a.sequences["a"].blocks.__setitem__(0, a.sequences["a"].blocks[1]),
    ],
    "no_slot_past_a_length_can_be_read": [
        lambda a: a.sequences["a"].blocks.append(a.pool.free[-1]),
        lambda a: a.sequences["a"].blocks.pop(),
        lambda a: alter(a.sequences["a"], computed=11),
        lambda a: alter(a.sequences["a"], indexed=3),
    ],
    "refcounts_equal_references": [
        lambda a: a.pool.refs.__setitem__(a.sequences["a"].blocks[0], 1),  # a skipped reference
        lambda a: a.pool.refs.__setitem__(a.sequences["a"].blocks[0], 9),  # a leak
        lambda a: a.sequences.pop("a"),
        lambda a: a.pool.refs.__setitem__(a.pool.free[0], 1),
    ],
    "a_referenced_block_is_never_free": [
        lambda a: a.pool.free.append(a.sequences["a"].blocks[0]),
        lambda a: a.pool.cached.__setitem__(a.sequences["b"].blocks[-1], None),
    ],
    "a_block_is_free_live_or_cached": [
        lambda a: a.pool.free.pop(),  # a leak
        lambda a: a.pool.free.append(a.pool.free[0]),  # freed twice
        lambda a: a.pool.free.append(next(iter(a.pool.cached))),
        lambda a: a.pool.free.append(99),
    ],
    "only_findable_blocks_are_cached": [
        lambda a: a.pool.index.remove(next(iter(a.pool.cached))),
        lambda a: a.pool.index.node_of.__setitem__(a.pool.free[0], node_of(a, a.sequences["a"].blocks[0])),
    ],
    "the_index_names_blocks_by_their_content": [
        lambda a: a.sequences["a"].tokens.__setitem__(0, 77),  # a stale hash
        lambda a: alter(a.sequences["a"], context=b"other"),
        lambda a: alter(node_of(a, a.sequences["a"].blocks[1]), parent=None),
        lambda a: a.pool.index.nodes.pop(node_of(a, a.sequences["a"].blocks[0]).digest),
        lambda a: node_of(a, a.sequences["a"].blocks[0]).blocks.append(a.sequences["b"].blocks[-1]),
        lambda a: a.sequences["a"].blocks.reverse() or a.sequences["b"].blocks.reverse(),
    ],
    "shared_blocks_hold_the_same_tokens": [
        lambda a: a.sequences["c"].tokens.__setitem__(8, 77),  # a partial tail shared, then written by one
        lambda a: alter(a.sequences["c"], context=b"other") or forget_all(a),
    ],
    "eviction_takes_the_deepest_first": [
        lambda a: a.pool.cached.move_to_end(next(iter(a.pool.cached))),
    ],
    "sums_of_slots_agree": [
        lambda a: misreport(a, used_slots=1),
        lambda a: misreport(a, used_blocks=1),
        lambda a: misreport(a, free_blocks=1),
    ],
}


def forget_all(a):
    for sequence in a.sequences.values():
        for block in sequence.blocks:
            a.pool.make_writable(block)


def allocator():
    made = BlockAllocator(12, 4)
    for seq_id, tokens in (("a", range(10)), ("gone", range(50, 58))):
        made.add(seq_id, tokens)
        made.mark_computed(seq_id, len(tokens))
    made.free("gone")
    made.fork("a", "b")
    made.append("b", [10])
    made.fork("a", "c")
    made.check_invariants()
    return made


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, faults in FAULTS.items() for number in range(len(faults))]
)
def test_a_broken_invariant_is_named(name, number):
    broken = allocator()
    FAULTS[name][number](broken)
    with pytest.raises(InvariantBroken):
        broken.check_invariants()
    assert list(INVARIANTS[name](broken))


def test_the_error_says_which_invariant_and_what_contradicts_it():
    broken = allocator()
    broken.pool.free.append(broken.pool.free[0])
    with pytest.raises(InvariantBroken, match="a_block_is_free_live_or_cached: block 11 is in 2 of") as error:
        broken.check_invariants()
    assert error.value.invariant == "a_block_is_free_live_or_cached"


def test_every_invariant_has_a_fault_that_breaks_it():
    assert set(FAULTS) == set(INVARIANTS)
