"""`GroupedAllocator`: a sequence in several pools at once, for models whose layers differ in window or block size."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from pagegen.cache import admission, growth, steps, swap
from pagegen.cache.allocator import BlockAllocator
from pagegen.cache.arrays import Ids, Packed
from pagegen.cache.growth import BlockPairs
from pagegen.cache.invariants import InvariantBroken
from pagegen.cache.pool import OutOfBlocks
from pagegen.cache.sequence import integer, listed, token_array
from pagegen.cache.stats import CacheStats
from pagegen.cache.window import cached_blocks

_T = TypeVar("_T")


class GroupedAllocator:
    """The calls of `BlockAllocator` on several at once, one a group of layers: all of them or, where one raises, none.

    Every sequence is in every group, under the same id and with the same tokens; its blocks differ. What `add` finds
    cached is cached in every group. Pairs, block ids and stats come as a list with one entry a group. `OutOfBlocks`
    says which group lacks them.
    """

    def __init__(self, allocators: Sequence[BlockAllocator]) -> None:
        self.allocators = list(allocators)
        for each in self.allocators:
            if not isinstance(each, BlockAllocator):
                raise TypeError(f"allocators must be BlockAllocators, got {type(each).__name__} {each!r}")
            if each.sequences:
                raise ValueError(f"allocators must have no sequences yet, got one with {len(each.sequences)}")
        if not self.allocators or len(set(map(id, self.allocators))) != len(self.allocators):
            raise ValueError(f"allocators must be one or more, each a different one, got {len(self.allocators)}")

    def add(
        self, seq_id: Hashable, tokens: Iterable[int], *, context: bytes = b"", most_cached: int | None = None
    ) -> int:
        """Admits a sequence to every group; returns how many of its leading tokens are cached in all of them: a
        multiple of every block size."""
        packed = token_array(tokens)
        for allocator in self.allocators:
            allocator.check_new("seq_id", seq_id)
        if most_cached is not None:
            most_cached = integer("most_cached", most_cached, 0)
        cached, plans = self._admissions(packed, context, len(packed), most_cached)
        for group, (allocator, found) in enumerate(zip(self.allocators, plans, strict=True)):
            with _in_group(group):
                allocator.pool.require(found.fresh, found.free)
        for allocator in self.allocators:
            allocator.add(seq_id, packed, context=context, most_cached=cached)
        return cached

    def can_admit(
        self, num_tokens: int, *, tokens: Iterable[int] | None = None, context: bytes = b"", lookahead: int = 0
    ) -> bool:
        """Whether `add` would succeed now in every group. See `BlockAllocator.can_admit`."""
        num_tokens, lookahead = integer("num_tokens", num_tokens, 0), integer("lookahead", lookahead, 0)
        packed = None if tokens is None else token_array(tokens)
        for allocator in self.allocators:  # checks them; without tokens, that is all
            if not allocator.can_admit(num_tokens, tokens=packed, context=context, lookahead=lookahead):
                return False
        if packed is None:
            return True
        _, plans = self._admissions(packed, context, num_tokens + lookahead)
        return all(found.fresh <= found.free for found in plans)

    def append(self, seq_id: Hashable, tokens: Iterable[int]) -> list[BlockPairs]:
        """Makes room for `tokens` at the end, in every group."""
        packed = token_array(tokens)
        self.check_each(lambda a: growth.check_append(a, a.resident(seq_id).row, len(packed)))
        return [allocator.append(seq_id, packed) for allocator in self.allocators]

    def append_each(self, seq_ids: Iterable[Hashable], tokens: Iterable[int]) -> list[BlockPairs]:
        """One token more for each of many sequences, in every group."""
        ids, packed = listed("seq_ids", seq_ids), token_array(tokens)
        self.check_each(lambda a: growth.plan_each(a, a.rows(ids), packed))
        return [allocator.append_each(ids, packed) for allocator in self.allocators]

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Starts `child` as a copy of `parent`, in every group."""
        for allocator in self.allocators:
            allocator.fork(parent, child)

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Takes back all tokens from `length` on, in every group."""
        self.check_each(lambda a: a.check_truncate(seq_id, length))
        for allocator in self.allocators:
            allocator.truncate(seq_id, length)

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence in every group."""
        for allocator in self.allocators:
            allocator.free(seq_id)

    def mark_computed(self, seq_id: Hashable, length: int) -> list[BlockPairs]:
        """Says that the tokens before `length` are about to be computed, in every group."""
        return self.mark_all_computed([seq_id], [length])

    def mark_all_computed(self, seq_ids: Iterable[Hashable], lengths: Sequence[int] | None = None) -> list[BlockPairs]:
        """`mark_computed` for one step's sequences at once, up to `lengths` or their ends."""
        ids, ends = listed("seq_ids", seq_ids), None if lengths is None else listed("lengths", lengths)
        self.check_each(lambda a: steps.plan(a, a.rows(ids), steps.ends_of(a, a.rows(ids), ends)))
        return [allocator.mark_all_computed(ids, ends) for allocator in self.allocators]

    def abandon(self, seq_ids: Iterable[Hashable]) -> None:
        """Says that the last step announced for `seq_ids` failed, in every group. See `BlockAllocator.abandon`. Whoever
        loses computed tokens in one group loses them in all."""
        lengths: dict[Hashable, int] = {}
        ids = listed("seq_ids", seq_ids)
        found = {i: min(a.table.announced.item(a.resident(i).row) for a in self.allocators) for i in ids}
        while found != lengths:
            lengths, found = found, {}
            for plan in self.check_each(partial(steps.plan_abandon, lengths=lengths)):
                found.update({i: min(length, found.get(i, length)) for i, length in plan.items()})
        for allocator in self.allocators:
            allocator.take_back(lengths)

    def swap_out(self, seq_id: Hashable) -> list[BlockPairs]:
        """Moves a sequence to host blocks, in every group."""
        self.check_each(lambda a: swap.check_out(a, a.resident(seq_id)))
        return [allocator.swap_out(seq_id) for allocator in self.allocators]

    def swap_in(self, seq_id: Hashable) -> list[BlockPairs]:
        """Brings a sequence back, in every group."""
        self.check_each(lambda a: swap.check_in(a, a.swapped(seq_id)))
        return [allocator.swap_in(seq_id) for allocator in self.allocators]

    def can_swap_in(self, seq_id: Hashable, *, lookahead: int = 0) -> bool:
        """Whether `swap_in` would succeed now in every group, with room for `lookahead` tokens more."""
        return all(allocator.can_swap_in(seq_id, lookahead=lookahead) for allocator in self.allocators)

    def is_swapped(self, seq_id: Hashable) -> bool:
        """Whether a sequence is swapped out."""
        return self.allocators[0].is_swapped(seq_id)

    def block_ids(self, seq_id: Hashable) -> list[list[int]]:
        """The blocks of a sequence in each group."""
        return [allocator.block_ids(seq_id) for allocator in self.allocators]

    def length(self, seq_id: Hashable) -> int:
        """Tokens of a sequence, computed or not."""
        return self.allocators[0].length(seq_id)

    def computed(self, seq_id: Hashable) -> int:
        """Leading tokens of a sequence that are computed."""
        return self.allocators[0].computed(seq_id)

    def stats(self) -> list[CacheStats]:
        """The stats of each group."""
        return [allocator.stats() for allocator in self.allocators]

    def check_invariants(self) -> None:
        """Raises `InvariantBroken` if a group contradicts itself or another one."""
        for allocator in self.allocators:
            allocator.check_invariants()
        first, *others = (
            {i: (a.length(i), a.computed(i), a.is_swapped(i)) for i in a.sequences} for a in self.allocators
        )
        for group, other in enumerate(others, 1):
            if other != first:
                raise InvariantBroken("groups_hold_the_same_sequences", f"group {group} has {other}, group 0 {first}")

    def check_each(self, check: Callable[[BlockAllocator], _T]) -> list[_T]:
        """What `check` says of each group, which raises or changes nothing: OutOfBlocks then names the group."""
        found = []
        for group, allocator in enumerate(self.allocators):
            with _in_group(group):
                found.append(check(allocator))
        return found

    def _admissions(
        self, packed: Packed, context: bytes, num_tokens: int, most_cached: int | None = None
    ) -> tuple[int, list[admission.Admission]]:
        """The tokens cached in every group, and how each would admit a sequence of which just those are."""
        chains = [admission.known_chain(allocator, packed, context, most_cached) for allocator in self.allocators]
        cached = self._cached_everywhere(chains)
        return cached, [
            admission.plan(allocator, chain[: cached // allocator.block_size], num_tokens)
            for allocator, chain in zip(self.allocators, chains, strict=True)
        ]

    def _cached_everywhere(self, chains: list[Ids]) -> int:
        """The most tokens, whole blocks in every group, that need computing in none."""
        step = math.lcm(*(allocator.block_size for allocator in self.allocators))
        cached = min(len(chain) * a.block_size for a, chain in zip(self.allocators, chains, strict=True))
        while True:  # with a window, a shorter beginning may lack what a longer one does not
            found = cached
            for allocator, chain in zip(self.allocators, chains, strict=True):
                size = allocator.block_size
                blocks = allocator.pool.index.first_blocks(chain[: found // size])
                found = cached_blocks(blocks, size, allocator.window, step // size) * size
            if found == cached:
                return cached
            cached = found


@contextmanager
def _in_group(group: int) -> Iterator[None]:
    """Says in OutOfBlocks which group it comes from."""
    try:
        yield
    except OutOfBlocks as error:
        raise OutOfBlocks(error.needed, error.free, error.pool, group) from None
