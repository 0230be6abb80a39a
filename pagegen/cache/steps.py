"""A step: what is about to be computed is owned, counts as computed, and gets its names; or the step is abandoned."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagegen.cache.arrays import Ids, Ints
from pagegen.cache.growth import BlockPairs, copies_needed, own_block
from pagegen.cache.sequence import SequenceState, integer
from pagegen.cache.table import spread
from pagegen.cache.window import first_seen_block, release_unseen

if TYPE_CHECKING:
    from pagegen.cache.allocator import BlockAllocator

_NONE: Ints = np.zeros(0, dtype=np.int64)


class Work(NamedTuple):
    """What a step computes: where each row starts, and the blocks it writes that others refer to or find, as places in
    the rows and indices of blocks."""

    starts: Ints
    places: Ints
    indices: Ints


def ends_of(allocator: BlockAllocator, rows: Ints, lengths: list[int] | None) -> Ints:
    """How far `rows` are computed once they are up to `lengths`; None stands for all that there is of each. Raises
    ValueError or TypeError for a wrong one."""
    most: Ints = allocator.table.lengths.take(rows)
    if lengths is None:
        return most
    if len(lengths) != len(rows):
        raise ValueError(f"lengths must be one a sequence ({len(rows)}), got {len(lengths)}")
    checked = [integer("length", length, 0, of) for length, of in zip(lengths, most.tolist(), strict=True)]
    ends: Ints = np.maximum(np.array(checked, dtype=np.int64), allocator.table.computed.take(rows))
    return ends


def plan(allocator: BlockAllocator, rows: Ints, ends: Ints) -> Work:
    """What computing `rows` up to `ends`, or as far as they are, takes. Raises OutOfBlocks where it lacks blocks for
    its copies."""
    table, pool = allocator.table, allocator.pool
    starts = table.computed.take(rows)
    if not table.any_sharing(rows):
        return Work(starts, _NONE, _NONE)
    first = starts // table.block_size
    counts = np.where(ends > starts, (ends - 1) // table.block_size - first + 1, 0)
    places, indices = spread(np.arange(len(rows)), first, counts)
    blocks = table.blocks[rows[places], indices]
    unowned = pool.not_own(blocks)
    pool.require(copies_needed(allocator, blocks[unowned]))
    return Work(starts, places[unowned], indices[unowned])


def announce(allocator: BlockAllocator, rows: Ints, ends: Ints) -> BlockPairs:
    """The tokens of `rows` before `ends`, at least those already computed, are about to be computed: either all or, on
    OutOfBlocks, none. Returns the pairs to copy first."""
    table = allocator.table
    if allocator.compiled and not table.any_sharing(rows):
        allocator.compiled.announce(allocator, rows, ends)
        release_unseen(allocator, rows)
        return []
    starts, places, indices = plan(allocator, rows, ends)
    pairs: BlockPairs = []
    for place, index in zip(places.tolist(), indices.tolist(), strict=True):
        pair = own_block(allocator, rows.item(place), index)
        if index * table.block_size < starts.item(place):  # else nothing of the block is kept
            pairs += pair
    if table.sharing:  # what a row wrote up to its end is its own
        table.sharing.difference_update(rows[(starts < ends) & (ends == table.lengths.take(rows))].tolist())
    table.announced[rows] = starts
    table.computed[rows] = ends
    if allocator.prefix_caching:
        _name_blocks(allocator, rows, ends // table.block_size)
    release_unseen(allocator, rows)
    return pairs


def announce_one(allocator: BlockAllocator, row: int, end: int) -> BlockPairs:
    """`announce` of a single row: without arrays where nothing more is computed."""
    table = allocator.table
    start = table.computed.item(row)
    if end > start or row in table.sharing or allocator.window is not None:
        return announce(allocator, np.array([row]), np.array([max(start, end)]))
    table.announced[row] = start
    return []


def _name_blocks(allocator: BlockAllocator, rows: Ints, full: Ints) -> None:
    """Offers the blocks of `rows` before `full`, now computed, to the prefix index, in order."""
    table = allocator.table
    indexed = table.indexed.take(rows)
    counts = full - indexed
    behind = counts.nonzero()[0]
    if not len(behind):
        return
    rows, first, counts = rows[behind], indexed[behind], counts[behind]
    # one block each, as in decode: they are as `spread` would give them
    writers, indices = (rows, first) if np.maximum.reduce(counts) == 1 else spread(rows, first, counts)
    _name(allocator, rows, counts, table.blocks[writers, indices])


def _name(allocator: BlockAllocator, rows: Ints, counts: Ints, blocks: Ids) -> None:
    """Offers each row's next counts[i] of `blocks`."""
    table = allocator.table
    named = allocator.pool.name(table.nodes[rows], counts, blocks)
    table.nodes[rows] = named.last
    table.indexed[rows] += named.done


def stand_on(allocator: BlockAllocator, row: int, node: int) -> None:
    """Makes `node` the last named block of a sequence."""
    index, left = allocator.pool.index, allocator.table.nodes.item(row)
    allocator.table.nodes[row] = node
    if node:
        index.enter(node)
    if left:
        index.leave(left)


def step_back(allocator: BlockAllocator, state: SequenceState, length: int) -> None:
    """Takes back what a sequence computed and offered to the index behind `length` tokens."""
    table, row = allocator.table, state.row
    for column in (table.computed, table.announced):
        column[row] = min(column.item(row), length)
    indexed = min(table.indexed.item(row), length // allocator.block_size)
    if indexed < table.indexed.item(row):
        node = table.nodes.item(row)
        for _ in range(table.indexed.item(row) - indexed):
            node = allocator.pool.index.parent(node)
        stand_on(allocator, row, node)
        table.indexed[row] = indexed


def plan_abandon(allocator: BlockAllocator, lengths: dict[Hashable, int]) -> dict[Hashable, int]:
    """How much of each sequence remains computed if those of `lengths` wrote nothing behind that: of them, and of
    whoever refers to a block that they were to write. Raises ValueError where a window gave back what computing again
    would see."""
    table, size = allocator.table, allocator.block_size
    found: dict[Hashable, int] = {}
    pending = list(lengths.items())
    while pending:
        seq_id, length = pending.pop()
        row = allocator.sequences[seq_id].row
        before = found.get(seq_id, table.computed.item(row))
        if length >= before:
            continue
        found[seq_id] = length
        if allocator.sequences[seq_id].host is not None:
            continue
        for place, _, holders in _written(allocator, seq_id, range(length // size, table.blocks_for(before))):
            pending += [(other, max(length, place * size)) for other in holders]
    gone = [
        seq_id
        for seq_id, length in found.items()
        if table.released.item(allocator.sequences[seq_id].row) > first_seen_block(length, size, allocator.window)
    ]
    if gone:
        raise ValueError(
            f"abandon needs what the window of {allocator.window} tokens gave back of {gone}, which would have to "
            "compute it again: free those first"
        )
    return found


def take_back(allocator: BlockAllocator, lengths: dict[Hashable, int]) -> None:
    """Takes back what the sequences of `lengths`, as `plan_abandon` found them, computed behind that: nobody finds it,
    nor what was computed on top of it."""
    index, table = allocator.pool.index, allocator.table
    written = list(dict.fromkeys(_written_behind(allocator, lengths)))
    for seq_id, length in lengths.items():
        state = allocator.sequences[seq_id]
        step_back(allocator, state, length)
        table.sharing.add(state.row)
        table.reshape(state.row)
    named = [block for block in written if index.node_of[block]]
    tainted = index.node_of[named].tolist()
    index.remove(named)
    allocator.pool.forget_behind(tainted)
    for state in allocator.sequences.values():  # what they computed rightly gets new names with their next step
        node, indexed = table.nodes.item(state.row), table.indexed.item(state.row)
        while node and not index.is_known(node):
            node, indexed = index.parent(node), indexed - 1
        if indexed >= table.released.item(state.row):
            stand_on(allocator, state.row, node)
            table.indexed[state.row] = indexed


def _written_behind(allocator: BlockAllocator, lengths: dict[Hashable, int]) -> Iterator[int]:
    """The blocks that sequences on the device wrote and that hold computed tokens of theirs behind `lengths`."""
    table = allocator.table
    for seq_id, length in lengths.items():
        state = allocator.sequences[seq_id]
        if state.host is None:
            places = range(length // table.block_size, table.blocks_for(table.computed.item(state.row)))
            yield from (block for _, block, _ in _written(allocator, seq_id, places))


def _written(
    allocator: BlockAllocator, seq_id: Hashable, places: Iterable[int]
) -> Iterator[tuple[int, int, list[Hashable]]]:
    """(place, block, who refers to it) of the blocks among `places` that a sequence wrote, as far as can be told:
    nobody who refers to one came before it. Others' it may lose alone: for another group's sake, where it found other
    blocks."""
    sequences, table = allocator.sequences, allocator.table
    for place in places:
        block = table.blocks.item(sequences[seq_id].row, place)
        holders = table.holders(place, block)
        if all(sequences[seq_id].came <= sequences[other].came for other in holders):
            yield place, block, holders
