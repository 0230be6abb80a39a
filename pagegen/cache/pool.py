"""The blocks: who is free, referred to, or kept for its content, who is evicted first, and which tokens each holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from pagegen.cache.arrays import Flags, Ids, Ints, Packed
from pagegen.cache.eviction import EvictionOrder
from pagegen.cache.prefix import NO_NODE, Named, PrefixIndex
from pagegen.cache.prefix_compiled import open_index
from pagegen.cache.sequence import TOKEN_BYTES

BLOCK_CODE = "i"  # the type of a block's number in an array: C's int, numpy's int32


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

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int = 0, *, prefix_caching: bool = True
    ) -> None:
        self.refs: Ids = np.zeros(num_blocks, dtype=np.int32)
        # a stack: the block used last is taken first
        self.free: array[int] = array(BLOCK_CODE, range(num_blocks - 1, -1, -1))
        self.cached = EvictionOrder(num_blocks)
        make_index = open_index if prefix_caching else PrefixIndex  # in which nothing is named
        self.index = make_index(num_blocks, block_size * TOKEN_BYTES)
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

    def available_beside(self, blocks: Ids) -> int:
        """`available` once `blocks` are acquired: a cached one among them can no longer be evicted to make room."""
        return self.available - (len(blocks) - int(np.count_nonzero(self.refs.take(blocks))))

    def not_own(self, blocks: Ids) -> Flags:
        """Of each of `blocks`, all referred to, whether others refer to it too, or find it by its name."""
        found: Flags = (self.refs.take(blocks) != 1) | (self.index.node_of.take(blocks) != NO_NODE)
        return found

    def require(self, needed: int, free: int | None = None) -> None:
        """Raises OutOfBlocks unless `needed` blocks can be had, of `free` or of all that are available."""
        free = self.available if free is None else free
        if needed > free:
            raise OutOfBlocks(needed, free)

    def take(self, count: int) -> Ints:
        """`count` blocks with one reference each and no name in the index; at most `available`."""
        if count > len(self.free):
            oldest = self.cached.pop(count - len(self.free))
            self.index.remove(oldest)
            self._put(oldest)
        left = len(self.free) - count
        blocks: Ints = np.frombuffer(self.free[left:], dtype=np.int32)[::-1].astype(np.int64)
        del self.free[left:]
        self.refs[blocks] = 1
        return blocks

    def acquire(self, blocks: Ids) -> None:
        """One more reference to each of `blocks`, live or cached ones."""
        places = blocks.astype(np.int64)  # numpy looks up and writes by int32 at a fifth of the speed
        refs = self.refs.take(places)
        self.cached.withdraw(places[refs == 0])
        self.refs[places] = refs + 1

    def release(self, blocks: Ids) -> None:
        """One reference less to each of `blocks`, in the order given: a sequence's last block first."""
        places = blocks.astype(np.int64)
        refs = self.refs.take(places) - 1
        self.refs[places] = refs
        unused = places[refs == 0]
        kept = self.index.only_copies(unused)
        if kept.all():
            self.cached.push(unused)
            return
        self.cached.push(unused[kept])
        spare = unused[~kept]
        named = spare[self.index.node_of.take(spare) != NO_NODE]
        if len(named):
            self.index.remove(named)
        self._put(spare)

    def name(self, nodes: Ints, counts: Ints, blocks: Ids) -> Named:
        """Lets others find live blocks by their content: runs of counts[i] of `blocks`, behind nodes[i]. The last nodes
        of the runs, and how many of each were named."""
        named = self.index.name(nodes, counts, blocks, self.tokens[blocks].tobytes())
        if named.joined:
            self.free_spare(named.joined)
        return named

    def name_again(self, node: int, block: int) -> None:
        """Lets others find the live `block` as one that holds the tokens of `node`."""
        self.index.fill(node, block)
        self.free_spare(self.index.copies(node))

    def make_writable(self, block: int) -> None:
        """Forgets the name of a block with one reference, whose content is about to change."""
        if self.index.node_of[block]:
            self.index.remove([block])

    def forget_behind(self, nodes: list[int]) -> None:
        """Nothing that stands behind `nodes` can be found any more."""
        self._free_cached(self.index.forget_behind(nodes))

    def free_spare(self, blocks: Iterable[int]) -> None:
        """Frees those of `blocks` that nobody refers to, since a live one now holds the same tokens."""
        self.index.remove(self._free_cached(dict.fromkeys(blocks)))

    def _put(self, blocks: Ints | Ids) -> None:
        """Puts `blocks` on the stack of free ones, in order."""
        self.free.frombytes(blocks.astype(np.int32).tobytes())

    def _free_cached(self, blocks: Iterable[int]) -> list[int]:
        """Makes the cached ones of `blocks` free ones, and returns them."""
        cached = [block for block in blocks if not self.refs[block]]
        self.cached.withdraw(np.array(cached, dtype=np.int32))
        self.free.extend(cached)
        return cached
