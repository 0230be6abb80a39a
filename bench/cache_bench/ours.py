"""A recording through pagegen's `BlockAllocator`."""

from __future__ import annotations

from collections.abc import Callable

from cache_bench.recording import ADD, STEP, Operation, Recording
from pagegen import __version__
from pagegen.cache import BlockAllocator

INCLUDED = (
    "add: BlockAllocator.add (packs the list of token ids, finds what is known, compares its tokens, takes blocks) and "
    "mark_computed (hashes and names the full blocks); step: append_each and, as PagedKVCache.batch does it, announce "
    "(names blocks that are now full); free"
)


def version() -> str:
    return __version__


def prepare(recording: Recording) -> Callable[[Operation], int]:
    """A fresh allocator's way to do one operation; returns the cached tokens of an add, else 0."""
    allocator = BlockAllocator(recording.num_blocks, recording.block_size)

    def do(operation: Operation) -> int:
        kind, requests, tokens = operation
        if kind == ADD:
            cached = allocator.add(requests[0], tokens)
            allocator.mark_computed(requests[0], len(tokens))
            return cached
        if kind == STEP:
            allocator.append_each(requests, tokens)
            rows = allocator.rows(requests)
            allocator.announce(rows, allocator.table.lengths.take(rows))
        else:
            allocator.free(requests[0])
        return 0

    return do
