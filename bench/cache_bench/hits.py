"""Hit rates: what a prefix cache of a given size gives back of a trace's prompt tokens.

Requests come one after the other in the trace's order: each is added, computed whole and ended before the next one, so
that the whole memory serves as cache. Blocks go by the allocator's own rule, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache_bench.traces import Request, packed, prompt_of
from pagegen.cache import BlockAllocator, OutOfBlocks


@dataclass(frozen=True)
class Hits:
    """Prompt tokens asked for and found; `refused` requests, larger than the memory, count as asked for."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    refused: int = 0
    blocks: int = 0  # distinct ones named by the trace, or in the cache at the end

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def named(requests: Iterable[Request], block: int, *, partial: bool) -> Hits:
    """What the ids alone say of an infinite cache: tokens of leading blocks whose id came before. Without `partial`,
    of full blocks only and never the last token, which is what a cache of blocks can give back."""
    seen: set[int] = set()
    count = asked = found = 0
    for request in requests:
        hit = 0
        for name in request.ids:
            if name not in seen:
                break
            hit += 1
        seen.update(request.ids)
        count += 1
        asked += request.prompt_tokens
        found += min(request.prompt_tokens, hit * block) if partial else min(hit, _most(request, block)) * block
    return Hits(count, asked, found, blocks=len(seen))


def replay(requests: Iterable[Request], block: int, num_blocks: int) -> Hits:
    """The trace through a `BlockAllocator` of `num_blocks` blocks of `block` tokens."""
    allocator = BlockAllocator(num_blocks, block)
    count = asked = found = refused = 0
    for request in requests:
        count += 1
        asked += request.prompt_tokens
        try:
            found += allocator.add(request.row, packed(prompt_of(request, block)))
        except OutOfBlocks:
            refused += 1
            continue
        allocator.mark_computed(request.row, request.prompt_tokens)
        allocator.free(request.row)
    return Hits(count, asked, found, refused, allocator.stats().cached_blocks)


def _most(request: Request, block: int) -> int:
    return (request.prompt_tokens - 1) // block
