"""The runtime cache: which block holds what, for whom, and the tensors behind the blocks.

The bookkeeping (`BlockAllocator`, `GroupedAllocator`) needs numpy alone; what has tensors loads torch when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagegen.cache.allocator import BlockAllocator
from pagegen.cache.groups import GroupedAllocator
from pagegen.cache.invariants import InvariantBroken
from pagegen.cache.pool import OutOfBlocks
from pagegen.cache.stats import CacheStats
from pagegen.cache.view import SequenceView

if TYPE_CHECKING:
    from pagegen.cache.batch import Batch
    from pagegen.cache.buffers import BatchBuffers
    from pagegen.cache.grouped import GroupedKVCache
    from pagegen.cache.tensors import PagedKVCache

__all__ = [
    "Batch",
    "BatchBuffers",
    "BlockAllocator",
    "CacheStats",
    "GroupedAllocator",
    "GroupedKVCache",
    "InvariantBroken",
    "OutOfBlocks",
    "PagedKVCache",
    "SequenceView",
]

_HOME_OF = {
    "Batch": "pagegen.cache.batch",
    "BatchBuffers": "pagegen.cache.buffers",
    "GroupedKVCache": "pagegen.cache.grouped",
    "PagedKVCache": "pagegen.cache.tensors",
}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'pagegen.cache' has no attribute {name!r}")
