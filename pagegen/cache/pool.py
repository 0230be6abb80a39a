"""The blocks: who is free, referred to, or kept for its content, who is evicted first, and which tokens each holds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from pagegen.cache.prefix import Node, PrefixIndex
from pagegen.cache.sequence import Ints, Packed


class OutOfBlocks(RuntimeError):
    """An operation needs `needed` more blocks of a `pool` ("device" or "host"; of which `group` where there are
    several), but only `free` can be had. Nothing was changed."""

    def __init__(self, needed: int, free: int, pool: str = "device", group: int | None = None) -> None:
        super().__init__(needed, free, pool, group)
        self.needed = needed
        self.free = free
        self.pool = pool
        self.group = group

    def __str__(self) -> str:
        kind = "blocks" if self.pool == "device" else f"{self.pool} blocks"
        where = "" if self.group is None else f" in group {self.group}"
        return f"{self.needed} {kind} are needed{where} but {self.free} are free: free a sequence, or admit fewer"


class BlockPool:
    """Every block is in exactly one state: free, live (`refs` > 0) or cached (no reference, but in the index).

    `cached` is ordered by last release, oldest first. A sequence releases its blocks last to first, and whoever
    refers to a block refers to the blocks before it (but for those a window gave back), so a block always stands before
    its parent in that order: the oldest is a leaf of the index, and evicting it breaks no chain. The blocks of one
    index node are either all live or a single cached one: a copy that nobody refers to is freed as soon as another
    will do. `tokens` are those of every block's slots, the `num_host_blocks` blocks of the host behind the others.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.refs: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self.free: list[int] = list(range(num_blocks - 1, -1, -1))  # a stack: the block used last is taken first
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.index = PrefixIndex(num_blocks)
        self.host_free: list[int] = list(range(num_host_blocks - 1, -1, -1))
        self.tokens: Packed = np.zeros((num_blocks + num_host_blocks, block_size), dtype=np.uint32)
        self.slots: Packed = self.tokens.reshape(-1)  # the same memory, by slot

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "slots"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled pool: a view that is copied on its own has other memory."""
        self.__dict__.update(state)
        self.slots = self.tokens.reshape(-1)

    @property
    def available(self) -> int:
        """Blocks that `take` can still give: the free and the cached ones."""
        return len(self.free) + len(self.cached)

    def available_beside(self, blocks: npt.NDArray[np.int32]) -> int:
        """`available` once `blocks` are acquired: a cached one among them can no longer be evicted to make room."""
        return self.available - (len(blocks) - int(np.count_nonzero(self.refs[blocks])))

    def not_own(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Of each of `blocks`, all referred to, whether others refer to it too, or find it by its name."""
        found: npt.NDArray[np.bool_] = (self.refs.take(blocks) != 1) | self.index.named.take(blocks)
        return found

    def require(self, needed: int, free: int | None = None) -> None:
        """Raises OutOfBlocks unless `needed` blocks can be had, of `free` or of all that are available."""
        free = self.available if free is None else free
        if needed > free:
            raise OutOfBlocks(needed, free)

    def take(self, count: int) -> Ints:
        """`count` blocks with one reference each and no name in the index; at most `available`."""
        for _ in range(count - len(self.free)):
            oldest, _ = self.cached.popitem(last=False)
            self.index.remove(oldest)
            self.free.append(oldest)
        left = len(self.free) - count
        blocks: Ints = np.array(self.free[left:][::-1], dtype=np.int64)
        del self.free[left:]
        self.refs[blocks] = 1
        return blocks

    def acquire(self, blocks: npt.NDArray[np.int32]) -> None:
        """One more reference to each of `blocks`, live or cached ones."""
        for block in blocks[self.refs[blocks] == 0].tolist():
            del self.cached[block]
        self.refs[blocks] += 1

    def release(self, blocks: npt.NDArray[np.int32]) -> None:
        """One reference less to each of `blocks`, in the order given: a sequence's last block first."""
        self.refs[blocks] -= 1
        for block in blocks[self.refs[blocks] == 0].tolist():
            node = self.index.node_of[block]
            if node is not None and len(node.blocks) == 1:
                self.cached[block] = None
                continue
            if node is not None:
                self.index.remove(block)
            self.free.append(block)

    def name(self, parent: Node, tokens: bytes, block: int) -> Node | None:
        """Lets others find the live `block` by its content: its node. None where a hash collision forbids it."""
        node = self.index.insert(parent, tokens, block)
        if node is not None and len(node.blocks) > 1:
            self._free_spare_copies(node)
        return node

    def name_again(self, node: Node, block: int) -> None:
        """Lets others find the live `block` as one that holds the tokens of `node`."""
        self.index.fill(node, block)
        self._free_spare_copies(node)

    def make_writable(self, block: int) -> None:
        """Forgets the name of a block with one reference, whose content is about to change."""
        if self.index.node_of[block] is not None:
            self.index.remove(block)

    def forget_behind(self, nodes: list[Node]) -> None:
        """Nothing that stands behind `nodes` can be found any more."""
        for block in self.index.forget_behind(nodes):
            if not self.refs[block]:
                del self.cached[block]
                self.free.append(block)

    def _free_spare_copies(self, node: Node) -> None:
        """Frees the blocks of a node that nobody refers to, since a live one now holds the same tokens."""
        for spare in [block for block in node.blocks if not self.refs[block]]:
            self.index.remove(spare)
            del self.cached[spare]
            self.free.append(spare)
