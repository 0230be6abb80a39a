"""`CountingCache`: a cache that holds nothing, for simulations that know how many tokens there are but not which."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from pagegen.cache import InvariantBroken, OutOfBlocks
from pagegen.cache.sequence import integer, listed, token_array


@dataclass(slots=True)
class _Held:
    """A sequence: tokens and blocks it has, tokens `computed`, and how many were when the last step was announced."""

    length: int
    blocks: int
    computed: int = 0
    announced: int = 0
    swapped: bool = False


class CountingCache:
    """A `BlockAllocator` without prefixes, forks and block ids, as far as the scheduler can tell: the same answers from
    counts of blocks alone, so that a sequence of millions of tokens costs what one of a few does: of a range's tokens
    only the ends are looked at. What is refused there is refused here, with the same errors."""

    def __init__(self, num_blocks: int, block_size: int, *, watermark: int = 0, num_host_blocks: int = 0) -> None:
        self.num_blocks = integer("num_blocks", num_blocks, 1, 2**31 - 1)
        self.block_size = integer("block_size", block_size, 1, 2**31 - 1)
        self.watermark = integer("watermark", watermark, 0, self.num_blocks)
        self.num_host_blocks = integer("num_host_blocks", num_host_blocks, 0, 2**31 - 1)
        self.free_blocks = self.num_blocks
        self.free_host_blocks = self.num_host_blocks
        self.sequences: dict[Hashable, _Held] = {}

    def add(self, seq_id: Hashable, tokens: Iterable[int], *, context: bytes = b"") -> int:
        """Admits a sequence; 0, since nothing is shared. Raises OutOfBlocks, or ValueError for an id that is in use."""
        if seq_id in self.sequences:
            raise ValueError(f"seq_id must be new, got {seq_id!r}, which is in the cache")
        length = _count(tokens)
        _check_context(context)
        needed, free = self._blocks_for(length), self._free_to_newcomers()
        if needed > free:
            raise OutOfBlocks(needed, free)
        self.free_blocks -= needed
        self.sequences[seq_id] = _Held(length, needed)
        return 0

    def can_admit(
        self, num_tokens: int, *, tokens: Iterable[int] | None = None, context: bytes = b"", lookahead: int = 0
    ) -> bool:
        """Whether `add` of so many tokens would succeed now, with room for `lookahead` tokens more."""
        wanted = integer("num_tokens", num_tokens, 0) + integer("lookahead", lookahead, 0)
        if tokens is not None and (count := _count(tokens)) != num_tokens:
            raise ValueError(f"tokens must be num_tokens = {num_tokens} tokens, got {count}")
        _check_context(context)
        return self._blocks_for(wanted) <= self._free_to_newcomers()

    def append(self, seq_id: Hashable, tokens: Iterable[int]) -> None:
        """Makes room for tokens at the end. Raises OutOfBlocks, changing nothing."""
        self._grow([self._on_device(seq_id)], _count(tokens))

    def append_each(self, seq_ids: Iterable[Hashable], tokens: Iterable[int]) -> None:
        """Makes room for one token more in each sequence: all or, on OutOfBlocks, none."""
        ids = listed("seq_ids", seq_ids)
        grown = [self._on_device(seq_id) for seq_id in ids]
        if len(set(ids)) != len(ids):
            twice = next(seq_id for seq_id in ids if ids.count(seq_id) > 1)
            raise ValueError(f"seq_ids must name each sequence once, got {twice!r} twice")
        if (count := _count(tokens)) != len(ids):
            raise ValueError(f"tokens must be one a sequence ({len(ids)}), got {count}")
        self._grow(grown, 1)

    def length(self, seq_id: Hashable) -> int:
        """Tokens of a sequence, computed or not."""
        return self._held(seq_id).length

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Takes back all tokens from `length` on."""
        held = self._on_device(seq_id)
        held.length = integer("length", length, 0, held.length)
        held.computed, held.announced = min(held.computed, held.length), min(held.announced, held.length)
        blocks = self._blocks_for(held.length)
        self.free_blocks += held.blocks - blocks
        held.blocks = blocks

    def mark_computed(self, seq_id: Hashable, length: int) -> None:
        """Says that the tokens before `length` are about to be computed."""
        held = self._on_device(seq_id)
        end = integer("length", length, 0, held.length)
        held.announced, held.computed = held.computed, max(held.computed, end)

    def computed(self, seq_id: Hashable) -> int:
        """Leading tokens that are computed."""
        return self._held(seq_id).computed

    def abandon(self, seq_ids: Iterable[Hashable]) -> None:
        """Says that the last step of these sequences failed before it wrote: it is to be computed again."""
        for held in [self._on_device(seq_id) for seq_id in seq_ids]:
            held.computed = held.announced

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence, swapped out or not."""
        held = self._held(seq_id)
        del self.sequences[seq_id]
        if held.swapped:
            self.free_host_blocks += held.blocks
        else:
            self.free_blocks += held.blocks

    def swap_out(self, seq_id: Hashable) -> None:
        """Moves a sequence to host blocks. Raises OutOfBlocks where there is no room, changing nothing."""
        held = self._on_device(seq_id)
        if held.blocks > self.free_host_blocks:
            raise OutOfBlocks(held.blocks, self.free_host_blocks, "host")
        self.free_host_blocks -= held.blocks
        self.free_blocks += held.blocks
        held.swapped = True

    def swap_in(self, seq_id: Hashable) -> None:
        """Brings a sequence back. Raises OutOfBlocks where there is no room, changing nothing."""
        held = self._held(seq_id)
        if not held.swapped:
            raise ValueError(f"seq_id must name a sequence that is swapped out, got {seq_id!r}, which is not")
        # one that grew into what is kept back must be able to come back
        free = self.free_blocks if self.free_blocks == self.num_blocks else self._free_to_newcomers()
        if held.blocks > free:
            raise OutOfBlocks(held.blocks, free)
        self.free_blocks -= held.blocks
        self.free_host_blocks += held.blocks
        held.swapped = False

    def check_invariants(self) -> None:
        """Raises `InvariantBroken` where the counts contradict each other."""
        for name, swapped, free, of in (
            ("device", False, self.free_blocks, self.num_blocks),
            ("host", True, self.free_host_blocks, self.num_host_blocks),
        ):
            taken = sum(held.blocks for held in self.sequences.values() if held.swapped is swapped)
            if free < 0 or free + taken != of:
                raise InvariantBroken(f"{name} blocks add up", f"{free} free and {taken} held of {of}")
        for seq_id, held in self.sequences.items():
            if held.blocks != self._blocks_for(held.length):
                raise InvariantBroken(
                    "blocks follow lengths", f"{held.blocks} for the {held.length} tokens of {seq_id!r}"
                )

    def _grow(self, grown: list[_Held], count: int) -> None:
        """`count` tokens more for each of `grown`: all or, on OutOfBlocks, none."""
        size = self.block_size
        needed = [-(-(held.length + count) // size) - held.blocks for held in grown]
        total = sum(needed)
        if total > self.free_blocks:
            raise OutOfBlocks(total, self.free_blocks)
        self.free_blocks -= total
        for held, blocks in zip(grown, needed, strict=True):
            held.length += count
            held.blocks += blocks

    def _free_to_newcomers(self) -> int:
        return max(0, self.free_blocks - self.watermark)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _held(self, seq_id: Hashable) -> _Held:
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise KeyError(f"seq_id must name a sequence in the cache, got {seq_id!r}: unknown or freed") from None

    def _on_device(self, seq_id: Hashable) -> _Held:
        held = self._held(seq_id)
        if held.swapped:
            raise ValueError(f"seq_id must name a sequence on the device, got {seq_id!r}: swap it in first")
        return held


def _count(tokens: Iterable[int]) -> int:
    """How many tokens there are. Raises TypeError or ValueError for what are none."""
    if isinstance(tokens, range):  # the ends say it all
        token_array((tokens[0], tokens[-1]) if tokens else ())
        return len(tokens)
    return len(token_array(tokens))


def _check_context(context: bytes) -> None:
    if not isinstance(context, bytes):
        raise TypeError(f"context must be bytes, got {type(context).__name__} {context!r}")
