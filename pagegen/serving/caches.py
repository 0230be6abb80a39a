"""What a scheduler asks of a cache, and how large the cache is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagegen.cache import BlockAllocator, GroupedAllocator
from pagegen.serving.counting import CountingCache


class ServableCache(Protocol):
    """The calls that the scheduler makes. `BlockAllocator`, `PagedKVCache`, their grouped kinds and `CountingCache`
    have them; what each call means is said there."""

    def add(self, seq_id: Hashable, tokens: Any, *, context: bytes = b"") -> int:
        """Admits a sequence; returns how many of its leading tokens are cached. Raises OutOfBlocks."""

    def can_admit(self, num_tokens: int, *, tokens: Any = None, context: bytes = b"", lookahead: int = 0) -> bool:
        """Whether `add` of so many tokens would succeed now, with room for `lookahead` tokens more."""

    def append(self, seq_id: Hashable, tokens: Any) -> object:
        """Makes room for tokens at the end. Raises OutOfBlocks, changing nothing."""

    def append_each(self, seq_ids: Sequence[Hashable], tokens: Sequence[int]) -> object:
        """Makes room for one token more in each sequence: all or, on OutOfBlocks, none."""

    def abandon(self, seq_ids: Sequence[Hashable]) -> object:
        """Says that the last step of these sequences failed before it wrote: it is to be computed again."""

    def computed(self, seq_id: Hashable) -> int:
        """Leading tokens that are computed."""

    def length(self, seq_id: Hashable) -> int:
        """Tokens of a sequence, computed or not."""

    def truncate(self, seq_id: Hashable, length: int) -> object:
        """Takes back all tokens from `length` on."""

    def free(self, seq_id: Hashable) -> object:
        """Ends a sequence."""

    def swap_out(self, seq_id: Hashable) -> Any:
        """Moves a sequence to host memory. Raises OutOfBlocks where there is no room, changing nothing."""

    def swap_in(self, seq_id: Hashable) -> Any:
        """Brings a sequence back. Raises OutOfBlocks where there is no room, changing nothing."""


@dataclass(frozen=True)
class Group:
    """One group of blocks' bookkeeping, for what no call says: its size, and how many blocks can be had now."""

    books: BlockAllocator | CountingCache

    @property
    def block_size(self) -> int:
        return self.books.block_size

    @property
    def num_blocks(self) -> int:
        return self.books.num_blocks

    @property
    def watermark(self) -> int:
        """Blocks kept back from admissions."""
        return self.books.watermark

    @property
    def available(self) -> int:
        """Blocks that growing sequences can still get, those kept for their content included."""
        return self.books.free_blocks if isinstance(self.books, CountingCache) else self.books.pool.available

    @property
    def host_available(self) -> int:
        """Host blocks that sequences swapped out can still get."""
        if isinstance(self.books, CountingCache):
            return self.books.free_host_blocks
        return len(self.books.pool.host_free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def groups_of(cache: Any) -> tuple[Group, ...]:
    """The groups of blocks behind `cache`: one for most caches. Raises TypeError for what is no cache."""
    books = getattr(cache, "allocator", cache)
    if isinstance(books, GroupedAllocator):
        return tuple(Group(allocator) for allocator in books.allocators)
    if not isinstance(books, (BlockAllocator, CountingCache)):
        raise TypeError(
            "cache must be a BlockAllocator, PagedKVCache, GroupedAllocator, GroupedKVCache or CountingCache, "
            f"got {type(cache).__name__}"
        )
    return (Group(books),)


def holds(cache: Any, seq_id: Hashable) -> bool:
    """Whether `seq_id` names a sequence in `cache`, swapped out or not."""
    return any(seq_id in group.books.sequences for group in groups_of(cache))
