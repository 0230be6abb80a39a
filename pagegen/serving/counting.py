"""`CountingCache`: a cache that holds nothing, for simulations that know how many tokens there are but not which."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Sized
from dataclasses import dataclass

from pagegen.cache import InvariantBroken, OutOfBlocks
from pagegen.cache.sequence import integer


@dataclass(slots=True)
class _Held:
    length: int
    blocks: int
    computed: int = 0
    before: int = 0  # what was computed when the last step was announced
    swapped: bool = False


class CountingCache:
    """A `BlockAllocator` without prefixes, forks and block ids, as far as the scheduler can tell: the same answers from
    counts of blocks alone, so that a sequence of millions of tokens costs what one of a few does. Of tokens only the
    number is looked at."""

    def __init__(self, num_blocks: int, block_size: int, *, watermark: int = 0, num_host_blocks: int = 0) -> None:
        self.num_blocks = integer("num_blocks", num_blocks, 1)
        self.block_size = integer("block_size", block_size, 1)
        self.watermark = integer("watermark", watermark, 0, num_blocks)
        self.num_host_blocks = integer("num_host_blocks", num_host_blocks, 0)
        self.free_blocks = num_blocks
        self.free_host_blocks = num_host_blocks
        self.sequences: dict[Hashable, _Held] = {}

    def add(self, seq_id: Hashable, tokens: Sized, *, context: bytes = b"") -> int:
        if seq_id in self.sequences:
            raise ValueError(f"seq_id must be new, got {seq_id!r}, which is in the cache")
        needed = self._blocks_for(len(tokens))
        free = max(0, self.free_blocks - self.watermark)
        if needed > free:
            raise OutOfBlocks(needed, free)
        self.free_blocks -= needed
        self.sequences[seq_id] = _Held(len(tokens), needed)
        return 0

    def can_admit(self, num_tokens: int, *, tokens: object = None, context: bytes = b"", lookahead: int = 0) -> bool:
        return self._blocks_for(num_tokens + lookahead) <= self.free_blocks - self.watermark

    def append(self, seq_id: Hashable, tokens: Sized) -> None:
        self._grow([self._on_device(seq_id)], len(tokens))

    def append_each(self, seq_ids: Sequence[Hashable], tokens: Sequence[int]) -> None:
        self._grow([self._on_device(seq_id) for seq_id in seq_ids], 1)

    def mark_computed(self, seq_id: Hashable, length: int) -> None:
        held = self._on_device(seq_id)
        held.before, held.computed = held.computed, integer("length", length, 0, held.length)

    def computed(self, seq_id: Hashable) -> int:
        return self._held(seq_id).computed

    def abandon(self, seq_ids: Sequence[Hashable]) -> None:
        for held in [self._on_device(seq_id) for seq_id in seq_ids]:
            held.computed = held.before

    def free(self, seq_id: Hashable) -> None:
        held = self._held(seq_id)
        del self.sequences[seq_id]
        if held.swapped:
            self.free_host_blocks += held.blocks
        else:
            self.free_blocks += held.blocks

    def swap_out(self, seq_id: Hashable) -> None:
        held = self._on_device(seq_id)
        if held.blocks > self.free_host_blocks:
            raise OutOfBlocks(held.blocks, self.free_host_blocks, "host")
        self.free_host_blocks -= held.blocks
        self.free_blocks += held.blocks
        held.swapped = True

    def swap_in(self, seq_id: Hashable) -> None:
        held = self._held(seq_id)
        if not held.swapped:
            raise ValueError(f"seq_id must name a swapped sequence, got {seq_id!r}")
        if held.blocks > self.free_blocks:
            raise OutOfBlocks(held.blocks, self.free_blocks)
        self.free_blocks -= held.blocks
        self.free_host_blocks += held.blocks
        held.swapped = False

    def check_invariants(self) -> None:
        """Raises `InvariantBroken` where the counts contradict each other."""
        for name, swapped, free, of in (
            ("device", False, self.free_blocks, self.num_blocks),
            ("host", True, self.free_host_blocks, self.num_host_blocks),
        ):
            held = sum(h.blocks for h in self.sequences.values() if h.swapped is swapped)
            if free < 0 or free + held != of:
                raise InvariantBroken(f"{name} blocks add up", f"{free} free and {held} held of {of}")
        for seq_id, held_ in self.sequences.items():
            if held_.blocks != self._blocks_for(held_.length):
                raise InvariantBroken(
                    "blocks follow lengths", f"{held_.blocks} for the {held_.length} tokens of {seq_id!r}"
                )

    def _grow(self, grown: list[_Held], count: int) -> None:
        size = self.block_size
        needed = [-(-(held.length + count) // size) - held.blocks for held in grown]
        total = sum(needed)
        if total > self.free_blocks:
            raise OutOfBlocks(total, self.free_blocks)
        self.free_blocks -= total
        for held, blocks in zip(grown, needed, strict=True):
            held.length += count
            held.blocks += blocks

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
            raise ValueError(f"seq_id must name a sequence on the device, got {seq_id!r}, which is swapped out")
        return held
