"""Context parallelism, which rank holds what: sequences are cut into stripes of whole blocks, dealt out in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from pagegen.spec import check

Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True, kw_only=True)
class BlockSpread:
    """The blocks of every sequence over `ranks` ranks: the first `stripe_blocks` blocks are rank 0's, the next ones
    rank 1's, and so on, round and round. One block a stripe shares out the work of a growing sequence most evenly; a
    stripe of max_blocks / ranks blocks gives each rank one contiguous range.

    A rank keeps its blocks of a sequence in order, and its block table lists those alone. One allocator can serve all
    ranks: its block is a turn, `turn_tokens` tokens, of which every rank stores its stripe under the same number.
    """

    ranks: int
    block_size: int
    stripe_blocks: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "block_size", "stripe_blocks"):
            check.integer(name, getattr(self, name))

    @property
    def stripe_tokens(self) -> int:
        """Consecutive tokens that lie on one rank."""
        return self.block_size * self.stripe_blocks

    @property
    def turn_tokens(self) -> int:
        """Tokens after which it is rank 0's turn again: the block size of an allocator that serves all ranks."""
        return self.stripe_tokens * self.ranks

    def owner(self, position: int) -> int:
        """The rank that holds the token at `position` of a sequence."""
        return check.integer("position", position, at_least=0) // self.stripe_tokens % self.ranks

    def held(self, rank: int, length: Count) -> Count:
        """How many of a sequence's first `length` tokens the rank holds. `length` is an integer or a tensor of such."""
        self.check_rank(rank)
        rest = length % self.turn_tokens - rank * self.stripe_tokens
        if isinstance(rest, Tensor):
            return length // self.turn_tokens * self.stripe_tokens + rest.clamp(0, self.stripe_tokens)
        return length // self.turn_tokens * self.stripe_tokens + min(max(rest, 0), self.stripe_tokens)

    def local_table(self, turn_table: Tensor) -> Tensor:
        """The block table int32 [num_seqs, max_turns * stripe_blocks] of any rank, from that of an allocator whose
        blocks are turns, int32 [num_seqs, max_turns]: in a rank's cache stripe t is blocks t * stripe_blocks and on."""
        if self.stripe_blocks == 1:
            return turn_table
        inside = torch.arange(self.stripe_blocks, dtype=turn_table.dtype, device=turn_table.device)
        return (turn_table[..., None] * self.stripe_blocks + inside).flatten(1)

    def local_slots(self, rank: int, turn_slots: Tensor) -> Tensor:
        """Slots int64 [num_tokens] in the rank's cache, from those of an allocator whose blocks are turns: -1, which
        `write_kv` skips, for tokens that other ranks hold (and for -1)."""
        self.check_rank(rank)
        turn, inside = turn_slots // self.turn_tokens, turn_slots % self.turn_tokens
        own = (turn_slots >= 0) & (inside // self.stripe_tokens == rank)
        return torch.where(own, turn * self.stripe_tokens + inside % self.stripe_tokens, -1)

    def check_rank(self, rank: int) -> None:
        """Raises TypeError or ValueError unless `rank` is one of them."""
        if check.integer("rank", rank, at_least=0) >= self.ranks:
            raise ValueError(f"rank must be in 0..{self.ranks - 1}, got {rank}")
