"""`SequenceTable`: the numbers and the blocks of all sequences, one a row: a step is a few array operations."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from pagegen.cache.arrays import Ids, Ints
from pagegen.cache.sequence import SequenceState

_COLUMNS = 9
_COPIED_COLUMNS = 7  # by a fork: all but the two that say when


class Appended(NamedTuple):
    """One token more for each of `rows`, of which nothing in the table's blocks has changed since while its clock still
    says `version`; it said `since` before. `tokens` stand at `positions`, in `slots`; the rows at the places `growing`
    got a block for them, at `indices` in their rows."""

    rows: Ints
    since: int
    version: int
    positions: Ints
    slots: Ints
    tokens: Ints
    growing: Ints
    indices: Ints

    def describes(self, table: SequenceTable, rows: Ints, positions: Ints) -> bool:
        """Whether this is where the tokens of `rows` at `positions` are now."""
        as_it_is = table.version == self.version and rows is self.rows
        return as_it_is and positions.tobytes() == self.positions.tobytes()


class SequenceTable:
    """One row a sequence; rows are used again. Every column is int64 [rows]:

    `lengths` tokens; `computed` those that are in the cache, or will be once the step now announced has run;
    `announced` how many were computed before that step; `indexed` blocks offered to the prefix index; `nodes` the
    last of those there (the root of the context at first, NO_NODE without prefix caching); `released` leading blocks
    given back because no query sees them any more; `sums` the sum of `token_sums` over the tokens in
    the others; `changed` and `reshaped` when the row's blocks last changed in any way, respectively otherwise than by
    growing at the end, on the clock `version`. `blocks` is int32 [rows, widest], 0 where a row holds no block. Both
    grow by doubling.

    `sharing` are the rows whose next write may go into a block that others refer to or find: after a fork, a
    truncation or an abandoned step, until they have written up to their end. All other rows own what they write.
    `appended` is the last step's tokens, so that its batch need not look them up.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.version = 0
        self.last_reshaped = 0
        self.sharing: set[int] = set()
        self.appended: Appended | None = None
        self.states: list[SequenceState | None] = []
        self.blocks: Ids = np.zeros((0, 16), dtype=np.int32)
        self._free: list[int] = []
        self._set_numbers(np.zeros((_COLUMNS, 0), dtype=np.int64))

    def __getstate__(self) -> dict[str, Any]:
        views = {name for name, value in self.__dict__.items() if getattr(value, "base", None) is self.numbers}
        return {name: value for name, value in self.__dict__.items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled table: a view that is copied on its own has other memory."""
        self.__dict__.update(state)
        self._set_numbers(self.numbers)

    def claim(self, state: SequenceState) -> int:
        """A row for `state`, all zero."""
        if not self._free:
            self._add_rows()
        row = self._free.pop()
        self.states[row] = state
        state.row = row
        self.numbers[:, row] = 0
        self.reshape(row)
        return row

    def copy_row(self, source: int, target: int) -> None:
        """Makes `target` hold what `source` does; of a step now announced, it computes nothing itself."""
        self.numbers[:_COPIED_COLUMNS, target] = self.numbers[:_COPIED_COLUMNS, source]
        self.announced[target] = self.computed[source]
        self.blocks[target] = self.blocks[source]

    def give_back(self, row: int) -> None:
        """Ends the use of a row."""
        self.blocks[row] = 0
        self.states[row] = None
        self.sharing.discard(row)
        self._free.append(row)

    def reserve(self, width: int) -> None:
        """Makes rows longer than `width` blocks: behind its last block, every row has a 0."""
        old = self.blocks.shape[1]
        if width >= old:
            wider: Ids = np.zeros((len(self.blocks), max(width + 1, 2 * old)), dtype=np.int32)
            wider[:, :old] = self.blocks
            self.blocks = wider

    def touch(self, rows: Ints | int) -> None:
        """Notes that `rows` grew by fresh blocks."""
        self.version += 1
        self.changed[rows] = self.version

    def reshape(self, rows: Ints | int) -> None:
        """Notes that the blocks of `rows` changed otherwise."""
        self.touch(rows)
        self.reshaped[rows] = self.last_reshaped = self.version

    def add_to_sum(self, row: int, value: int) -> None:
        """Adds to a row's sum, modulo 2^64: `value` may be any integer, the sum is an int64."""
        self.sums[row] = (self.sums.item(row) + value + 2**63) % 2**64 - 2**63

    def any_sharing(self, rows: Ints) -> bool:
        """Whether one of `rows` may have to copy a block before it writes."""
        return bool(self.sharing) and not self.sharing.isdisjoint(rows.tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and the blocks."""
        return self.numbers.nbytes + self.blocks.nbytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def held(self, row: int) -> Ids:
        """The blocks that a row refers to: a view."""
        return self.blocks[row, self.released.item(row) : self.blocks_for(self.lengths.item(row))]

    def holders(self, index: int, block: int) -> list[Hashable]:
        """The sequences on the device whose block `index` is `block`."""
        held = (self.released <= index) & (index * self.block_size < self.lengths)
        found = [self.states[row] for row in (held & (self.blocks[:, index] == block)).nonzero()[0].tolist()]
        return [state.seq_id for state in found if state is not None and state.host is None]

    def _add_rows(self) -> None:
        old = len(self.states)
        new = max(16, 2 * old)
        numbers = np.zeros((_COLUMNS, new), dtype=np.int64)
        numbers[:, :old] = self.numbers
        self._set_numbers(numbers)
        blocks: Ids = np.zeros((new, self.blocks.shape[1]), dtype=np.int32)
        blocks[:old] = self.blocks
        self.blocks = blocks
        self.states.extend([None] * (new - old))
        self._free.extend(range(new - 1, old - 1, -1))

    def _set_numbers(self, numbers: Ints) -> None:
        """Makes the columns views of `numbers`, [_COLUMNS, rows]."""
        self.numbers = numbers
        self.lengths, self.computed, self.announced, self.indexed, self.nodes, self.released, self.sums = numbers[
            :_COPIED_COLUMNS
        ]
        self.changed, self.reshaped = numbers[_COPIED_COLUMNS:]


def spread(values: Ints, first: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """`counts[i]` times values[i] for each i, and with it first[i], first[i] + 1, ..."""
    repeated = np.repeat(values, counts)
    before = counts.cumsum() - counts  # how many stand before those of i
    return repeated, np.arange(len(repeated)) + np.repeat(first - before, counts)
