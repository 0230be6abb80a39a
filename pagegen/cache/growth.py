"""Growing at the end: room for new tokens, and a copy of the last block where others refer to it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagegen.cache.arrays import Ids, Ints, Packed
from pagegen.cache.sequence import FEW_TOKENS, token_sum, token_sums
from pagegen.cache.table import Appended

if TYPE_CHECKING:
    from pagegen.cache.allocator import BlockAllocator

BlockPairs = list[tuple[int, int]]


class Growth(NamedTuple):
    """One token more for each of several rows: their lengths, the index of the block and the slot in it where it goes,
    and that block; the places in the rows of those that need a block more, and of those whose last block others refer
    to or find."""

    lengths: Ints
    indices: Ints
    offsets: Ints
    blocks: Ids
    growing: Ints
    unowned: list[int]


def check_append(allocator: BlockAllocator, row: int, count: int) -> None:
    """Raises OutOfBlocks where there is no room for `count` tokens more."""
    table, pool = allocator.table, allocator.pool
    length = table.lengths.item(row)
    held = table.blocks_for(length)
    copied = count > 0 and length % table.block_size > 0 and pool.refs.item(table.blocks.item(row, held - 1)) > 1
    pool.require(table.blocks_for(length + count) - held + copied)


def append(allocator: BlockAllocator, row: int, packed: Packed) -> BlockPairs:
    """`BlockAllocator.append`."""
    check_append(allocator, row, len(packed))
    table = allocator.table
    length = table.lengths.item(row)
    end = length + len(packed)
    held, needed = table.blocks_for(length), table.blocks_for(end)
    pairs = own_block(allocator, row, held - 1) if len(packed) and length % table.block_size else []
    if needed > held:
        table.reserve(needed)
        table.blocks[row, held:needed] = allocator.pool.take(needed - held)
        table.touch(row)
    write_tokens(allocator, row, length, packed)
    table.lengths[row] = end
    return pairs


def plan_each(allocator: BlockAllocator, rows: Ints, packed: Packed) -> Growth:
    """What one token of `packed` more for each of `rows` takes. Raises ValueError for another number of tokens, and
    OutOfBlocks."""
    if len(packed) != len(rows):
        raise ValueError(f"tokens must be one a sequence ({len(rows)}), got {len(packed)}")
    table, pool = allocator.table, allocator.pool
    lengths = table.lengths.take(rows)
    indices = lengths // table.block_size
    offsets = lengths - indices * table.block_size
    growing = (offsets == 0).nonzero()[0]
    blocks = table.blocks[rows, indices]  # of those that grow, it is the one behind their last: 0
    unowned: list[int] = []
    needed = len(growing)
    if table.any_sharing(rows):
        not_own = pool.not_own(blocks)
        not_own[growing] = False
        unowned = not_own.nonzero()[0].tolist()
        needed += copies_needed(allocator, blocks[unowned])
    pool.require(needed)
    return Growth(lengths, indices, offsets, blocks, growing, unowned)


def append_each(allocator: BlockAllocator, rows: Ints, packed: Packed) -> BlockPairs:
    """`BlockAllocator.append_each`."""
    table, pool = allocator.table, allocator.pool
    if allocator.compiled and len(packed) == len(rows) and not table.any_sharing(rows):
        allocator.compiled.append_each(allocator, rows, packed)
        return []
    lengths, indices, offsets, blocks, growing, unowned = plan_each(allocator, rows, packed)
    pairs: BlockPairs = []
    for i in unowned:
        pairs += own_block(allocator, rows.item(i), indices.item(i))
        blocks[i] = table.blocks[rows[i], indices[i]]
    since, indices = table.version, indices[growing]
    if len(growing):
        grown = rows[growing]
        table.reserve(int(np.maximum.reduce(indices)) + 1)
        table.blocks[grown, indices] = blocks[growing] = pool.take(len(growing))
        table.touch(grown)
    slots = blocks.astype(np.int64) * table.block_size + offsets
    pool.slots[slots] = packed
    table.sums[rows] += token_sums(lengths, packed)
    table.lengths[rows] = lengths + 1
    table.appended = Appended(rows, since, table.version, lengths, slots, packed.astype(np.int64), growing, indices)
    return pairs


def copies_needed(allocator: BlockAllocator, blocks: Ids) -> int:
    """How many copies it takes until each that is about to write one of `blocks`, named once for each, has its own: of
    those who share a block, the last may keep it if nobody but them refers to it."""
    writers = Counter(blocks.tolist())
    return sum(min(count, allocator.pool.refs.item(block) - 1) for block, count in writers.items())


def own_block(allocator: BlockAllocator, row: int, index: int) -> BlockPairs:
    """Makes a block of `row` writable: its own alone, and without a name. Returns the pair to copy, if there is one."""
    table, pool = allocator.table, allocator.pool
    source = table.blocks.item(row, index)
    if pool.refs.item(source) == 1:
        pool.make_writable(source)
        return []
    target = pool.take(1).item()
    pool.tokens[target] = pool.tokens[source]
    table.blocks[row, index] = target
    table.reshape(row)
    pool.release(np.array([source], dtype=np.int32))
    return [(source, target)]


def write_tokens(allocator: BlockAllocator, row: int, first: int, packed: Packed, *, written: int = 0) -> None:
    """Notes `packed` as the tokens from position `first` on, in blocks that the row has; the leading `written` of them
    stand there already."""
    if allocator.compiled:
        allocator.compiled.write(allocator, row, first, packed, written)
        return
    end = first + len(packed)
    allocator.pool.slots[_slots(allocator, row, first + written, end)] = packed[written:]
    allocator.table.add_to_sum(row, token_sum(first, packed))


def forget_tokens(allocator: BlockAllocator, row: int, start: int, end: int) -> None:
    """Notes that the tokens from `start` to `end` are the row's no more, which still has the blocks."""
    packed = allocator.pool.slots[_slots(allocator, row, start, end)]
    allocator.table.add_to_sum(row, -token_sum(start, packed))


def _slots(allocator: BlockAllocator, row: int, start: int, end: int) -> Ints:
    """The slots of a row's positions from `start` to `end`."""
    table, size = allocator.table, allocator.block_size
    if end - start <= FEW_TOKENS:
        return np.array(
            [table.blocks.item(row, i // size) * size + i % size for i in range(start, end)], dtype=np.int64
        )
    first = start // size
    blocks = table.blocks[row, first : table.blocks_for(end)].astype(np.int64)
    slots: Ints = (blocks[:, None] * size + np.arange(size)).reshape(-1)
    return slots[start - first * size : end - first * size]
