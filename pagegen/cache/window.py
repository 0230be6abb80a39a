"""Sliding windows: which blocks a query still sees, and what becomes of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagegen.cache.arrays import Ids, Ints
from pagegen.cache.growth import forget_tokens
from pagegen.cache.prefix import NO_BLOCK

if TYPE_CHECKING:
    from pagegen.cache.allocator import BlockAllocator


def first_seen_block(position: int, block_size: int, window: int | None) -> int:
    """The first block that a query at `position` sees keys in: with a window of W it sees position-W+1 to itself."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def cached_blocks(blocks: Ids, block_size: int, window: int | None, multiple: int = 1) -> int:
    """How many leading ones of a chain's `blocks`, NO_BLOCK for one that is gone, need not be computed: the most, a
    multiple of `multiple`, such that all that the next query sees of them are there."""
    found, gap = 0, -1  # gap: the last block that is not there
    for count, block in enumerate(blocks.tolist(), 1):
        if block == NO_BLOCK:
            gap = count - 1
        if count % multiple == 0 and gap < first_seen_block(count * block_size, block_size, window):
            found = count
    return found


def release_unseen(allocator: BlockAllocator, rows: Ints) -> None:
    """Gives back the blocks of `rows` that no query of the step now announced sees, nor a later one."""
    if allocator.window is None:
        return
    table, size = allocator.table, allocator.block_size
    starts = table.announced.take(rows)
    # `first_seen_block`, of all rows at once
    firsts = (starts - (allocator.window - 1)).clip(min=0) // size
    for i in (firsts > table.released.take(rows)).nonzero()[0].tolist():
        row, first = rows.item(i), firsts.item(i)
        unseen = slice(table.released.item(row), first)
        forget_tokens(allocator, row, unseen.start * size, unseen.stop * size)
        allocator.pool.release(table.blocks[row, unseen][::-1])
        table.blocks[row, unseen] = 0
        table.released[row] = first
        table.reshape(row)


def check_truncate(allocator: BlockAllocator, row: int, length: int) -> None:
    """Raises ValueError where the tokens before `length` cannot be gone on from, since the window gave blocks back that
    the next query would see."""
    released = allocator.table.released.item(row)
    if not released:
        return
    start = min(length, allocator.table.computed.item(row))
    if start and released > first_seen_block(start, allocator.block_size, allocator.window):
        least = released * allocator.block_size + (allocator.window or 1) - 1
        raise ValueError(
            f"length must be 0 or at least {least}, got {length}: the window of {allocator.window} tokens gave back "
            f"the first {released} blocks"
        )
