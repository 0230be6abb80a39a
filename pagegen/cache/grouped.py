"""`GroupedKVCache`: several paged caches as one, for models whose layers differ in window or block size."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pagegen.cache import steps
from pagegen.cache.batch import Batch
from pagegen.cache.buffers import BatchBuffers
from pagegen.cache.groups import GroupedAllocator
from pagegen.cache.growth import BlockPairs
from pagegen.cache.sequence import listed
from pagegen.cache.stats import CacheStats
from pagegen.cache.tensors import PagedKVCache, as_tokens


class GroupedKVCache:
    """The calls of `PagedKVCache` on several caches at once, one a group of layers: all of them or, where one raises,
    none. See `GroupedAllocator`, the bookkeeping."""

    def __init__(self, caches: Sequence[PagedKVCache]) -> None:
        self.caches = list(caches)
        for each in self.caches:
            if not isinstance(each, PagedKVCache):
                raise TypeError(f"caches must be PagedKVCaches, got {type(each).__name__}")
        self.allocator = GroupedAllocator([cache.allocator for cache in self.caches])

    def add(self, seq_id: Hashable, tokens: Any, *, context: bytes = b"", most_cached: int | None = None) -> int:
        """Admits a sequence to every group; returns how many of its leading tokens are cached in all of them."""
        return self.allocator.add(seq_id, as_tokens(tokens), context=context, most_cached=most_cached)

    def can_admit(self, num_tokens: int, *, tokens: Any = None, context: bytes = b"", lookahead: int = 0) -> bool:
        """Whether `add` would succeed now in every group."""
        known = None if tokens is None else as_tokens(tokens)
        return self.allocator.can_admit(num_tokens, tokens=known, context=context, lookahead=lookahead)

    def append(self, seq_id: Hashable, tokens: Any) -> None:
        """Makes room for `tokens` at the end, in every group."""
        self._copy(self.allocator.append(seq_id, as_tokens(tokens)))

    def append_each(self, seq_ids: Iterable[Hashable], tokens: Any) -> None:
        """Makes room for one token more in each of many sequences, in every group."""
        self._copy(self.allocator.append_each(seq_ids, as_tokens(tokens)))

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Starts `child` as a copy of `parent`, in every group."""
        self.allocator.fork(parent, child)

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Takes back all tokens from `length` on, in every group."""
        self.allocator.truncate(seq_id, length)

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence in every group."""
        self.allocator.free(seq_id)

    def batch(
        self,
        seq_ids: Iterable[Hashable],
        *,
        query_lens: Sequence[int] | None = None,
        buffers: Sequence[BatchBuffers] | None = None,
    ) -> tuple[Batch, ...]:
        """One `Batch` a group, with the same `input_ids` and `positions` tensors. See `PagedKVCache.batch`; `buffers`
        are one a group."""
        ids = listed("seq_ids", seq_ids)
        if buffers is not None and len(buffers) != len(self.caches):
            raise ValueError(f"buffers must be one a group ({len(self.caches)}), got {len(buffers)}")
        each_buffers = [None] * len(self.caches) if buffers is None else buffers
        asked = [cache.ask(ids, query_lens, given) for cache, given in zip(self.caches, each_buffers, strict=True)]
        self.allocator.check_each(lambda a: steps.plan(a, a.rows(ids), asked[0].ends))
        first, *others = [
            cache.make(each, given) for cache, each, given in zip(self.caches, asked, each_buffers, strict=True)
        ]
        return first, *(replace(other, input_ids=first.input_ids, positions=first.positions) for other in others)

    def abandon(self, seq_ids: Iterable[Hashable]) -> None:
        """Says that the last step batched for `seq_ids` failed before it wrote, in every group."""
        self.allocator.abandon(seq_ids)

    def swap_out(self, seq_id: Hashable) -> None:
        """Copies a sequence to host memory, and gives back its blocks, in every group."""
        for cache, pairs in zip(self.caches, self.allocator.swap_out(seq_id), strict=True):
            cache.storage.to_host(pairs)

    def swap_in(self, seq_id: Hashable) -> None:
        """Brings a sequence back from host memory, in every group."""
        for cache, pairs in zip(self.caches, self.allocator.swap_in(seq_id), strict=True):
            cache.storage.from_host(pairs)

    def can_swap_in(self, seq_id: Hashable, *, lookahead: int = 0) -> bool:
        """Whether `swap_in` would succeed now, with room for `lookahead` tokens more."""
        return self.allocator.can_swap_in(seq_id, lookahead=lookahead)

    def is_swapped(self, seq_id: Hashable) -> bool:
        """Whether a sequence is swapped out."""
        return self.allocator.is_swapped(seq_id)

    def block_ids(self, seq_id: Hashable) -> list[list[int]]:
        """The blocks of a sequence in each group."""
        return self.allocator.block_ids(seq_id)

    def length(self, seq_id: Hashable) -> int:
        """Tokens of a sequence, computed or not."""
        return self.allocator.length(seq_id)

    def computed(self, seq_id: Hashable) -> int:
        """Leading tokens of a sequence that are computed."""
        return self.allocator.computed(seq_id)

    def stats(self) -> list[CacheStats]:
        """The stats of each group."""
        return self.allocator.stats()

    def check_invariants(self) -> None:
        """Raises `InvariantBroken` if a group contradicts itself or another one."""
        self.allocator.check_invariants()

    def _copy(self, pairs: list[BlockPairs]) -> None:
        for cache, of_group in zip(self.caches, pairs, strict=True):
            cache.storage.copy(of_group)
