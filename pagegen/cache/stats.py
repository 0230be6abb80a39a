"""`CacheStats`: where the memory is, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from sys import getsizeof
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pagegen.cache.allocator import BlockAllocator


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """A snapshot. Blocks are free, used (referred to) or cached (kept for their content); `shared_blocks` of the used
    ones have several references. Slots count storage once, however many sequences share it, so that
    allocated_slots = used_slots + wasted_slots; without sharing, the waste is b*ceil(n/b) - n summed over sequences.
    `queried_tokens` were given to `add`, `hit_tokens` of them were found cached. `num_swapped` of the sequences are in
    host blocks."""

    num_sequences: int
    num_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    shared_blocks: int
    allocated_slots: int
    used_slots: int
    wasted_slots: int
    queried_tokens: int
    hit_tokens: int
    num_swapped: int
    num_host_blocks: int
    free_host_blocks: int

    @property
    def hit_rate(self) -> float:
        """The share of all tokens given to `add` that was found cached; 0 before the first."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


def collect(allocator: BlockAllocator, *, queried_tokens: int, hit_tokens: int) -> CacheStats:
    """The stats of `allocator` now, in time linear in its sequences."""
    pool = allocator.pool
    used = allocator.num_blocks - pool.available
    wasted = _wasted_slots(allocator)
    return CacheStats(
        num_sequences=len(allocator.sequences),
        num_blocks=allocator.num_blocks,
        free_blocks=len(pool.free),
        used_blocks=used,
        cached_blocks=len(pool.cached),
        shared_blocks=int(np.count_nonzero(pool.refs > 1)),
        allocated_slots=used * allocator.block_size,
        used_slots=used * allocator.block_size - wasted,
        wasted_slots=wasted,
        queried_tokens=queried_tokens,
        hit_tokens=hit_tokens,
        num_swapped=sum(state.host is not None for state in allocator.sequences.values()),
        num_host_blocks=allocator.num_host_blocks,
        free_host_blocks=len(pool.host_free),
    )


def _wasted_slots(allocator: BlockAllocator) -> int:
    """Slots of live blocks that no sequence uses. Only last blocks have any, and only where every owner's view ends
    inside the block: the longest view counts."""
    table, size = allocator.table, allocator.block_size
    views: dict[int, list[int]] = {}
    for state in allocator.sequences.values():
        length = table.lengths.item(state.row)
        if state.host is None and length % size:
            views.setdefault(table.blocks.item(state.row, length // size), []).append(length % size)
    return sum(size - max(tails) for block, tails in views.items() if len(tails) == allocator.pool.refs.item(block))


def bookkeeping_bytes(allocator: BlockAllocator) -> int:
    """Memory of the bookkeeping in bytes: what `BlockAllocator.bookkeeping_bytes` says."""
    pool, table = allocator.pool, allocator.table
    arrays = pool.refs.nbytes + pool.tokens.nbytes + pool.index.nbytes + pool.cached.nbytes + table.nbytes
    containers = (pool.free, pool.host_free, table.states, allocator.sequences)
    held = sum(getsizeof(state) for state in allocator.sequences.values())
    return arrays + sum(getsizeof(container) for container in containers) + held
