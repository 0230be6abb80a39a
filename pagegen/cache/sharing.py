"""Which rows of a batch share leading blocks, so that attending those once saves the most."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagegen.cache.allocator import BlockAllocator
from pagegen.cache.arrays import Ids, Ints
from pagegen.cache.table import SequenceTable

PrefixGroups = tuple[tuple[int, tuple[int, ...]], ...]


class SharedPrefixes:
    """Finds a batch's prefix groups, and keeps them for the next batch: they are found anew only where other rows
    share blocks, or where the blocks of one of those changed otherwise than by growing at its end.

    That is enough. A block comes to be shared when a row is claimed (add, fork, swap in), since what a step writes it
    owns; and what was shared at that time and is not written any more was full and computed already.
    """

    def __init__(self) -> None:
        self._table: SequenceTable | None = None
        self._rows: Ints | None = None
        self._as_of = -1
        self._key = b""
        self._groups: PrefixGroups = ()

    def find(self, allocator: BlockAllocator, rows: Ints, starts: Ints) -> PrefixGroups:
        """The groups of `rows`, of which the first `starts` tokens are computed: (num_shared_blocks, places)."""
        table = allocator.table
        if allocator.window is not None:  # a prefix that all see whole ends with the window
            return ()
        if table is self._table and rows is self._rows and table.last_reshaped == self._as_of:
            return self._groups
        full = starts // table.block_size
        sharing = ((allocator.pool.refs.take(table.blocks[rows, 0]) > 1) & (full > 0)).nonzero()[0]
        shared = rows[sharing]
        key = b"".join([sharing.tobytes(), shared.tobytes(), table.reshaped.take(shared).tobytes()])
        if key != self._key or table is not self._table:
            self._groups = _groups_of(table.blocks[shared], full[sharing], sharing.tolist())
        self._table, self._rows, self._as_of, self._key = table, rows, table.last_reshaped, key
        return self._groups


def _groups_of(blocks: Ids, full: Ints, places: list[int]) -> PrefixGroups:
    """The groups among rows of blocks, which stand at `places` in their batch."""
    if len(places) < 2:
        return ()
    found = prefix_groups(blocks[:, : int(full.max())], full)
    return tuple((count, tuple(places[i] for i in group)) for count, group in found)


@dataclass
class _Subtree:
    """Rows that share a longer prefix than others do: the groups found among them, (num_shared_blocks, rows), what
    those save in blocks, and the rows in none of them."""

    rows: list[int]
    alone: list[int]
    saved: int = 0
    groups: list[tuple[int, list[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, shared: int, parts: list[_Subtree]) -> _Subtree:
        """The subtree of `parts` that all share `shared` blocks: one more group, of the parts and single rows that save
        more in it than among themselves, if it saves anything."""
        joined, apart = [], []
        for part in parts:
            whole = shared * len(part.rows) >= part.saved + shared * len(part.alone)
            joined += part.rows if whole else part.alone
            apart += [] if whole else [part]
        with_group = sum(part.saved for part in apart) + shared * (len(joined) - 1)
        rows = [row for part in parts for row in part.rows]
        if len(joined) > 1 and with_group >= sum(part.saved for part in parts):
            groups = [group for part in apart for group in part.groups]
            return cls(rows=rows, alone=[], saved=with_group, groups=[*groups, (shared, joined)])
        return cls(
            rows=rows, alone=[row for part in parts for row in part.alone],
            saved=sum(part.saved for part in parts), groups=[group for part in parts for group in part.groups],
        )  # fmt: skip


def prefix_groups(table: Ids, full_blocks: Ints) -> PrefixGroups:
    """Groups of rows with common leading blocks, each row in one at most, chosen so that attending each group's blocks
    once saves many: one system prompt under several documents does not hide what the rows of a document share. Block i
    of a row counts only if i < full_blocks[row]."""
    rows = np.flatnonzero(full_blocks)
    if not len(rows) or len(np.unique(table[rows, 0])) == len(rows):
        return ()
    # in the order of their blocks, rows with a common prefix stand together, and those with a longer one within
    rows = np.array(sorted(rows.tolist(), key=lambda row: table[row, : full_blocks[row]].tobytes()))
    same = table[rows[:-1]] == table[rows[1:]]
    same &= np.arange(table.shape[1]) < np.minimum(full_blocks[rows[:-1]], full_blocks[rows[1:]])[:, None]
    common = np.where(same.all(axis=1), table.shape[1], same.argmin(axis=1)).tolist()  # of neighbours
    # a stack, each entry behind the one it lies in: the blocks that its parts share, and the parts found so far
    unfinished: list[tuple[int, list[_Subtree]]] = [(0, [])]
    for row, shared in zip(rows.tolist(), [*common, 0], strict=True):
        subtree = _Subtree(rows=[row], alone=[row])
        while unfinished[-1][0] > shared:
            depth, parts = unfinished.pop()
            subtree = _Subtree.of(depth, [*parts, subtree])
        if unfinished[-1][0] < shared:
            unfinished.append((shared, []))
        unfinished[-1][1].append(subtree)
    found = [(shared, tuple(sorted(group))) for part in unfinished[0][1] for shared, group in part.groups]
    return tuple(sorted(found, key=lambda group: group[1]))
