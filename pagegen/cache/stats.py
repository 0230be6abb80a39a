"""`CacheStats`: where the memory is, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagegen.cache.sequence import SequenceState

if TYPE_CHECKING:
    from pagegen.cache.allocator import BlockAllocator


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """A snapshot. Blocks are free, used (referred to) or cached (kept for their content); `shared_blocks` of the used
    ones have several references. Slots count storage once, however many sequences share it, so that
    allocated_slots = used_slots + wasted_slots; without sharing, the waste is b*ceil(n/b) - n summed over sequences.
    `queried_tokens` were given to `add`, `hit_tokens` of them were found cached."""

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

    @property
    def hit_rate(self) -> float:
        """The share of all tokens given to `add` that was found cached; 0 before the first."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


def collect(allocator: BlockAllocator, *, queried_tokens: int, hit_tokens: int) -> CacheStats:
    """The stats of `allocator` now, in time linear in its blocks."""
    pool = allocator.pool
    used = allocator.num_blocks - pool.available
    wasted = _wasted_slots(allocator.sequences.values(), pool.refs, allocator.block_size)
    return CacheStats(
        num_sequences=len(allocator.sequences),
        num_blocks=allocator.num_blocks,
        free_blocks=len(pool.free),
        used_blocks=used,
        cached_blocks=len(pool.cached),
        shared_blocks=sum(count > 1 for count in pool.refs),
        allocated_slots=used * allocator.block_size,
        used_slots=used * allocator.block_size - wasted,
        wasted_slots=wasted,
        queried_tokens=queried_tokens,
        hit_tokens=hit_tokens,
    )


def _wasted_slots(sequences: Iterable[SequenceState], refs: list[int], block_size: int) -> int:
    """Slots of live blocks that no sequence uses. Only last blocks have any, and only where every owner's view ends
    inside the block: the longest view counts."""
    views: dict[int, list[int]] = {}
    for sequence in sequences:
        tail = len(sequence.tokens) % block_size
        if tail:
            views.setdefault(sequence.blocks[-1], []).append(tail)
    return sum(block_size - max(tails) for block, tails in views.items() if len(tails) == refs[block])
