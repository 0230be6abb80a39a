"""`SequenceView`: a sequence in plain values, for whoever looks from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagegen.cache.sequence import SequenceState

if TYPE_CHECKING:
    from pagegen.cache.allocator import BlockAllocator


@dataclass(frozen=True, kw_only=True)
class SequenceView:
    """A sequence as it is now, in plain values. `blocks` are in the device's pool, or in the host's while `swapped`;
    the first `released` of them are given back (0 stands for each), and `tokens` are those of the blocks behind. The
    first `computed` tokens are in the cache, or will be once the step now announced has run, which began at
    `announced`; the first `indexed` blocks were offered to the prefix index."""

    tokens: list[int]
    context: bytes
    blocks: list[int]
    length: int
    computed: int
    announced: int
    indexed: int
    released: int
    swapped: bool

    @classmethod
    def of(cls, allocator: BlockAllocator, state: SequenceState) -> SequenceView:
        """The view of a sequence of `allocator`."""
        table, pool, row = allocator.table, allocator.pool, state.row
        length, released = table.lengths.item(row), table.released.item(row)
        held = table.held(row) if state.host is None else np.array(state.host, dtype=np.int64) + allocator.num_blocks
        tokens = pool.tokens.take(held, axis=0, mode="clip")  # so that a broken table can be looked at as well
        return cls(
            tokens=tokens.reshape(-1)[: max(0, length - released * allocator.block_size)].tolist(),
            context=state.context,
            blocks=[0] * released + (held.tolist() if state.host is None else state.host),
            length=length,
            computed=table.computed.item(row),
            announced=table.announced.item(row),
            indexed=table.indexed.item(row),
            released=released,
            swapped=state.host is not None,
        )
