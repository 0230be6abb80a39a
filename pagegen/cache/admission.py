"""Admitting a sequence: what of it is cached already, what it needs besides, and taking both."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagegen.cache.arrays import Ids, Packed
from pagegen.cache.growth import write_tokens
from pagegen.cache.prefix import NO_NODE
from pagegen.cache.sequence import SequenceState
from pagegen.cache.window import cached_blocks, first_seen_block

if TYPE_CHECKING:
    from pagegen.cache.allocator import BlockAllocator


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What admitting takes, in blocks: the first `cached` need not be computed, and `last` is the node of the last of
    them; those from `first` on are still seen and taken over (`shared`); `fresh` more are needed, and `free` can be had
    for them."""

    cached: int
    first: int
    shared: Ids
    last: int
    fresh: int
    free: int


def known_chain(allocator: BlockAllocator, packed: Packed, context: bytes, most_cached: int | None = None) -> Ids:
    """The index nodes of the full blocks at the start of `packed`: of the first `most_cached` tokens, and never of the
    last, which is left to compute."""
    if not isinstance(context, bytes):
        raise TypeError(f"context must be bytes, got {type(context).__name__} {context!r}")
    limit = (len(packed) - 1) // allocator.block_size if allocator.prefix_caching and len(packed) else 0
    if most_cached is not None:
        limit = min(limit, most_cached // allocator.block_size)
    index = allocator.pool.index
    root = index.root(context) if limit else NO_NODE
    if not root:
        return np.zeros(0, dtype=np.int32)
    return index.walk(root, packed.tobytes(), limit, through_gaps=allocator.window is not None)


def plan(allocator: BlockAllocator, chain: Ids, num_tokens: int) -> Admission:
    """How a sequence of `num_tokens` tokens that begins like `chain` would be admitted now."""
    size, window, pool = allocator.block_size, allocator.window, allocator.pool
    blocks = pool.index.first_blocks(chain)
    cached = len(chain) if window is None else cached_blocks(blocks, size, window)
    first = first_seen_block(cached * size, size, window)
    shared = blocks[first:cached]
    return Admission(
        cached=cached,
        first=first,
        shared=shared,
        last=chain.item(cached - 1) if cached else NO_NODE,
        fresh=allocator.table.blocks_for(num_tokens) - cached,
        free=max(0, pool.available_beside(shared) - allocator.watermark),
    )


def admit(allocator: BlockAllocator, seq_id: Hashable, packed: Packed, context: bytes, found: Admission) -> int:
    """Makes `packed` a sequence as `found` has it, and returns how many of its tokens are cached."""
    pool, table = allocator.pool, allocator.table
    pool.acquire(found.shared)
    if found.last:  # before blocks are taken: behind a window the one of this node is not shared, and may be evicted
        pool.index.enter(found.last)
    fresh = pool.take(found.fresh)
    allocator.arrivals += 1
    state = SequenceState(seq_id, context, allocator.arrivals)
    row = table.claim(state)
    if found.last:
        table.nodes[row] = found.last
    elif allocator.prefix_caching:
        table.nodes[row] = pool.index.enter_root(context)
    table.reserve(found.cached + found.fresh)
    table.blocks[row, found.first : found.cached] = found.shared
    table.blocks[row, found.cached : found.cached + found.fresh] = fresh
    cached_tokens, first_token = found.cached * allocator.block_size, found.first * allocator.block_size
    table.lengths[row] = len(packed)
    table.computed[row] = table.announced[row] = cached_tokens
    table.indexed[row] = found.cached
    table.released[row] = found.first
    write_tokens(allocator, row, first_token, packed[first_token:], written=cached_tokens - first_token)
    allocator.sequences[seq_id] = state
    return cached_tokens
