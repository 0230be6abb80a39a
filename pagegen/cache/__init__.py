"""The runtime cache: which block holds what, for whom, and the tensors behind the blocks.

The bookkeeping (`BlockAllocator`) needs the standard library alone; `PagedKVCache` loads torch when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagegen.cache.allocator import BlockAllocator, OutOfBlocks
from pagegen.cache.invariants import InvariantBroken
from pagegen.cache.stats import CacheStats

if TYPE_CHECKING:
    from pagegen.cache.batch import Batch
    from pagegen.cache.tensors import PagedKVCache

__all__ = ["Batch", "BlockAllocator", "CacheStats", "InvariantBroken", "OutOfBlocks", "PagedKVCache"]


def __getattr__(name: str) -> Any:
    if name == "PagedKVCache":
        from pagegen.cache.tensors import PagedKVCache

        return PagedKVCache
    if name == "Batch":
        from pagegen.cache.batch import Batch

        return Batch
    raise AttributeError(f"module 'pagegen.cache' has no attribute {name!r}")
