"""Swapping a sequence out to host memory and in again: which blocks move where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagegen.cache.growth import BlockPairs
from pagegen.cache.pool import OutOfBlocks
from pagegen.cache.prefix import NO_BLOCK, NO_NODE
from pagegen.cache.sequence import SequenceState

if TYPE_CHECKING:
    from pagegen.cache.allocator import BlockAllocator


def check_out(allocator: BlockAllocator, state: SequenceState) -> None:
    """Raises OutOfBlocks where the host has no room for a sequence."""
    needed, free = len(allocator.table.held(state.row)), len(allocator.pool.host_free)
    if needed > free:
        raise OutOfBlocks(needed, free, "host")


def swap_out(allocator: BlockAllocator, state: SequenceState) -> BlockPairs:
    """`BlockAllocator.swap_out`."""
    check_out(allocator, state)
    table, pool = allocator.table, allocator.pool
    held = table.held(state.row).copy()
    host = [pool.host_free.pop() for _ in held]
    pool.tokens[np.array(host, dtype=np.int64) + allocator.num_blocks] = pool.tokens[held]
    pool.release(held[::-1])
    table.held(state.row)[:] = 0
    table.announced[state.row] = table.computed[state.row]  # what was copied is there: that step has run
    table.reshape(state.row)
    state.host = host
    return list(zip(held.tolist(), host, strict=True))


def swap_in(allocator: BlockAllocator, state: SequenceState) -> BlockPairs:
    """`BlockAllocator.swap_in`."""
    check_in(allocator, state)
    table, pool = allocator.table, allocator.pool
    nodes, host = _nodes(allocator, state), state.host or []
    found = _findable(allocator, nodes)
    pool.acquire(np.array(list(found.values()), dtype=np.int32))
    fresh = dict(
        zip([i for i in range(len(host)) if i not in found], pool.take(len(host) - len(found)).tolist(), strict=True)
    )
    state.host = None
    allocator.arrivals += 1
    state.came = allocator.arrivals
    table.held(state.row)[:] = [found[i] if i in found else fresh[i] for i in range(len(host))]
    table.reshape(state.row)
    for i, block in fresh.items():
        pool.tokens[block] = pool.tokens[allocator.num_blocks + host[i]]
        node = nodes[i] if i < len(nodes) else NO_NODE
        if node:
            pool.name_again(node, block)
    pool.host_free.extend(reversed(host))
    return [(block, host[i]) for i, block in fresh.items()]


def check_in(allocator: BlockAllocator, state: SequenceState, lookahead: int = 0) -> None:
    """Raises OutOfBlocks where the device has no room for a sequence and `lookahead` tokens more. The watermark is kept
    back, unless nothing else is on the device: a sequence that grew into it must be able to come back."""
    pool, table = allocator.pool, allocator.table
    length = table.lengths.item(state.row)
    needed = len(state.host or ()) + table.blocks_for(length + lookahead) - table.blocks_for(length)
    found = np.array(list(_findable(allocator, _nodes(allocator, state)).values()), dtype=np.int32)
    kept_back = allocator.watermark if pool.available < allocator.num_blocks else 0
    pool.require(needed - len(found), max(0, pool.available_beside(found) - kept_back))


def _nodes(allocator: BlockAllocator, state: SequenceState) -> list[int]:
    """The index nodes of the first blocks that a sequence holds, NO_NODE for one that was forgotten."""
    table, index = allocator.table, allocator.pool.index
    nodes, node = list[int](), table.nodes.item(state.row)
    for _ in range(table.indexed.item(state.row) - table.released.item(state.row)):
        nodes.append(node if index.is_known(node) else NO_NODE)
        node = index.parent(node)
    return nodes[::-1]


def _findable(allocator: BlockAllocator, nodes: list[int]) -> dict[int, int]:
    """Of the nodes that still have a block, a block, by their place in `nodes`."""
    blocks = allocator.pool.index.first_blocks(np.array(nodes, dtype=np.int32)).tolist()
    return {i: block for i, block in enumerate(blocks) if block != NO_BLOCK}
