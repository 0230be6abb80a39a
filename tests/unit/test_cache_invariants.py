"""Each invariant is broken on purpose, and the check must name it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagegen.cache import BlockAllocator, InvariantBroken
from pagegen.cache.invariants import INVARIANTS
from pagegen.cache.prefix import FORGOTTEN, NO_NODE

pytestmark = pytest.mark.usefixtures("index_class")


def alter(target, **changes):
    for name, value in changes.items():
        setattr(target, name, value)


def misreport(a, **figures):
    said = replace(a.stats(), **figures)
    a.stats = lambda: said


def node_of(a, block):
    return a.pool.index.node_of.item(block)


def set_node(a, block, **columns):
    """Changes the node of a block."""
    for name, value in columns.items():
        getattr(a.pool.index, name)[node_of(a, block)] = value


def rename(a, block):
    """Makes the index hold other tokens, or an other name, than it gave a node."""
    index, node = a.pool.index, node_of(a, block)
    names = getattr(index, "_digests", None) or index.digests
    names[node] = names[index.root(b"")]


def row_of(a, seq_id):
    return a.sequences[seq_id].row


def blocks_of(a, seq_id):
    """The blocks of a sequence, to be changed in place."""
    return a.table.held(row_of(a, seq_id))


def set_block(a, seq_id, index, block):
    a.table.blocks[row_of(a, seq_id), index] = block


def set_number(a, seq_id, **numbers):
    for name, value in numbers.items():
        getattr(a.table, name)[row_of(a, seq_id)] = value


def set_token(a, seq_id, position, token):
    """Writes a slot behind the back of whoever else reads it."""
    block = blocks_of(a, seq_id)[position // a.block_size]
    a.pool.tokens[block, position % a.block_size] = token


def swap_blocks(a, *seq_ids):
    for seq_id in seq_ids:
        blocks_of(a, seq_id)[:2] = blocks_of(a, seq_id)[1::-1].copy()


# State: "a" has 0..9 computed, "b" and "c" are forks of it, "b" with one token more; "gone" left two cached blocks
# behind; "out", 70..75, is swapped out.
FAULTS = {
    "a_row_belongs_to_one_sequence": [
        lambda a: alter(a.sequences["a"], row=row_of(a, "b")),
        lambda a: a.table.states.__setitem__(row_of(a, "a"), None),
        lambda a: a.sequences.pop("c"),
    ],
    "every_logical_block_maps_to_storage": [
        lambda a: set_block(a, "a", 0, 99),
        lambda a: set_block(a, "a", 0, -1),
        lambda a: set_block(a, "a", 0, blocks_of(a, "a")[1]),
        lambda a: a.sequences["out"].host.__setitem__(0, 9),
        lambda a: a.sequences["out"].host.__setitem__(0, a.sequences["out"].host[1]),
    ],
    "no_slot_past_a_length_can_be_read": [
        lambda a: set_block(a, "a", 3, a.pool.free[-1]),  # a block more than its tokens fill
        lambda a: set_number(a, "a", computed=11),
        lambda a: set_number(a, "a", indexed=3),
        lambda a: set_number(a, "a", announced=11),
        lambda a: set_number(a, "a", lengths=8),  # the third block is still in the table
        lambda a: set_block(a, "out", 0, 3),
    ],
    "refcounts_equal_references": [
        lambda a: a.pool.refs.__setitem__(blocks_of(a, "a")[0], 1),  # a skipped reference
        lambda a: a.pool.refs.__setitem__(blocks_of(a, "a")[0], 9),  # a leak
        lambda a: a.sequences.pop("a"),
        lambda a: a.pool.refs.__setitem__(a.pool.free[0], 1),
    ],
    "a_referenced_block_is_never_free": [
        lambda a: a.pool.free.append(blocks_of(a, "a").item(0)),
        lambda a: a.pool.cached.push(blocks_of(a, "b")[-1:]),
    ],
    "a_block_is_free_live_or_cached": [
        lambda a: a.pool.free.pop(),  # a leak
        lambda a: a.pool.free.append(a.pool.free[0]),  # freed twice
        lambda a: a.pool.free.append(next(iter(a.pool.cached))),
        lambda a: a.pool.free.append(99),
    ],
    "a_host_block_is_free_or_holds_one_sequence": [
        lambda a: a.pool.host_free.pop(),
        lambda a: a.pool.host_free.append(a.sequences["out"].host[0]),
        lambda a: a.pool.host_free.append(99),
    ],
    "a_block_written_by_a_step_has_one_writer": [
        lambda a: set_number(a, "c", announced=9),  # computes into the tail that it shares with "a"
    ],
    "a_writable_block_has_one_owner": [
        lambda a: a.table.sharing.discard(row_of(a, "c")),  # its tail is that of "a"
        lambda a: a.pool.index.fill(node_of(a, blocks_of(a, "a")[0]), blocks_of(a, "b").item(-1)),
    ],
    "a_sequence_reads_the_tokens_it_was_given": [
        lambda a: set_token(a, "c", 9, 77),  # a partial tail shared, then written by one
        lambda a: set_token(a, "a", 0, 77),
        lambda a: a.pool.tokens.__setitem__((a.num_blocks + a.sequences["out"].host[1], 0), 7),
        lambda a: swap_blocks(a, "a", "b", "c"),
        lambda a: set_block(a, "b", 2, a.pool.free[-1]),  # a missed copy
    ],
    "only_findable_blocks_are_cached": [
        lambda a: a.pool.index.remove([next(iter(a.pool.cached))]),
        lambda a: a.pool.index.node_of.__setitem__(a.pool.free[0], node_of(a, blocks_of(a, "a")[0])),
    ],
    "the_index_names_blocks_by_their_content": [
        lambda a: set_token(a, "a", 0, 77),  # a stale hash
        lambda a: alter(a.sequences["a"], context=b"other"),
        lambda a: set_node(a, blocks_of(a, "a")[1], parents=a.pool.index.root(b"")),
        lambda a: rename(a, blocks_of(a, "a")[0]),
        lambda a: set_node(a, blocks_of(a, "a")[0], states=FORGOTTEN),
        lambda a: a.pool.index.fill(node_of(a, blocks_of(a, "a")[0]), blocks_of(a, "b").item(-1)),
        lambda a: a.pool.index.node_of.__setitem__(a.pool.free[0], a.pool.index.root(b"")),
        lambda a: a.pool.index.node_of.__setitem__(blocks_of(a, "a")[0], NO_NODE),
        lambda a: swap_blocks(a, "a", "b", "c"),
    ],
    "index_nodes_stay_while_they_are_used": [
        lambda a: set_node(a, blocks_of(a, "a")[0], users=0),
        lambda a: set_number(a, "a", nodes=node_of(a, blocks_of(a, "a")[0])),
        lambda a: a.pool.index.latest.__setitem__(a.pool.index.root(b""), node_of(a, blocks_of(a, "a")[1])),
    ],
    "eviction_takes_the_deepest_first": [
        lambda a: a.pool.cached.push(a.pool.cached.pop(1)),
        lambda a: a.pool.index.remove([blocks_of(a, "a").item(0)]),  # what stands behind is live
    ],
    "a_window_keeps_what_a_query_sees": [
        lambda a: set_number(a, "a", released=1),
        lambda a: set_number(a, "a", released=-1),
    ],
    "sums_of_slots_agree": [
        lambda a: misreport(a, used_slots=1),
        lambda a: misreport(a, used_blocks=1),
        lambda a: misreport(a, free_blocks=1),
    ],
}


def allocator():
    made = BlockAllocator(12, 4, num_host_blocks=4)
    for seq_id, tokens in (("a", range(10)), ("gone", range(50, 58)), ("out", range(70, 76))):
        made.add(seq_id, tokens)
        made.mark_computed(seq_id, len(tokens))
    made.free("gone")
    made.swap_out("out")
    made.fork("a", "b")
    made.append("b", [10])
    made.mark_computed("b", 11)
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
