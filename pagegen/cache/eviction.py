"""`EvictionOrder`: the blocks that are kept for their content alone, longest unused first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagegen.cache.arrays import Ids, Ints

_LEAST = 64


class EvictionOrder:
    """A queue of blocks, each in it once, from which any can be withdrawn: what an `OrderedDict` does, with operations
    that take many blocks at once.

    The queue is `_queue` from `_head` to `_tail`, and `_place[block]` is where in it a block stands, -1 for one that
    does not: an entry that says otherwise was withdrawn. What is left is moved to the front when the end is reached.
    """

    def __init__(self, num_blocks: int) -> None:
        self._place: Ints = np.full(num_blocks, -1, dtype=np.int64)
        self._queue: Ints = np.zeros(2 * num_blocks + _LEAST, dtype=np.int64)
        self._head = self._tail = self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self._left().tolist())

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._place.nbytes + self._queue.nbytes

    def push(self, blocks: Ints | Ids) -> None:
        """Puts blocks, in order, behind all others."""
        if self._tail + len(blocks) > len(self._queue):
            left = self._left()
            self._queue[: len(left)] = left
            self._head, self._tail = 0, len(left)
            self._place[left] = np.arange(len(left))
        end = self._tail + len(blocks)
        self._queue[self._tail : end] = blocks
        self._place[blocks] = np.arange(self._tail, end)
        self._tail = end
        self._count += len(blocks)

    def withdraw(self, blocks: Ints | Ids) -> None:
        """Takes out blocks that are in it."""
        self._place[blocks] = -1
        self._count -= len(blocks)

    def pop(self, count: int) -> Ints:
        """Takes out the first `count` blocks: at least one, at most as many as there are."""
        size = count
        while True:
            end = min(self._head + size, self._tail)
            queue = self._queue[self._head : end]
            there = (self._place[queue] == np.arange(self._head, end)).nonzero()[0]
            if len(there) >= count or end == self._tail:
                break
            size *= 2  # some of them were withdrawn
        found: Ints = queue[there[:count]]
        self._head += there.item(count - 1) + 1
        self.withdraw(found)
        return found

    def _left(self) -> Ints:
        queue = self._queue[self._head : self._tail]
        left: Ints = queue[self._place[queue] == np.arange(self._head, self._tail)]
        return left
