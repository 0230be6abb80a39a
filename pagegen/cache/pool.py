"""The blocks: who is free, referred to, or kept for its content, and who is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pagegen.cache.prefix import Node, PrefixIndex


class BlockPool:
    """Every block is in exactly one state: free, live (`refs` > 0) or cached (no reference, but in the index).

    `cached` is ordered by last release, oldest first. A sequence releases its blocks last to first, and whoever
    refers to a block refers to the blocks before it, so a block always stands before its parent in that order: the
    oldest is a leaf of the index, and evicting it breaks no chain. The blocks of one index node are either all live
    or a single cached one: a copy that nobody refers to is freed as soon as another will do.
    """

    def __init__(self, num_blocks: int) -> None:
        self.refs: list[int] = [0] * num_blocks
        self.free: list[int] = list(range(num_blocks - 1, -1, -1))  # a stack: the block used last is taken first
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.index = PrefixIndex(num_blocks)

    @property
    def available(self) -> int:
        """Blocks that `take` can still give: the free and the cached ones."""
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each and no name in the index; at most `available`."""
        blocks = []
        for _ in range(count):
            if not self.free:
                oldest = next(iter(self.cached))
                self._unname(oldest)
                self._discard(oldest)
            block = self.free.pop()
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """One more reference to a live or cached block."""
        if not self.refs[block]:
            del self.cached[block]
        self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each of `blocks`, in the order given: a sequence's last block first."""
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            copies = self.index.copies(block)
            if len(copies) == 1:
                self.cached[block] = None
                continue
            if copies:
                self.index.remove(block)
            self.free.append(block)

    def name(self, parent: Node | None, tokens: bytes, context: bytes, block: int) -> bool:
        """Lets others find the live `block` by its content. False where a hash collision forbids it."""
        if not self.index.insert(parent, tokens, context, block):
            return False
        for other in [copy for copy in self.index.copies(block) if not self.refs[copy]]:
            self.index.remove(other)
            self._discard(other)
        return True

    def make_writable(self, block: int) -> None:
        """Forgets the name of a block with one reference, whose content is about to change."""
        if self.index.node_of[block] is not None:
            self._unname(block)

    def _unname(self, block: int) -> None:
        for orphan in self.index.remove(block):
            if not self.refs[orphan]:
                self._discard(orphan)

    def _discard(self, block: int) -> None:
        del self.cached[block]
        self.free.append(block)
