"""A step's bookkeeping in C++ (steps.cpp): what `growth` and `steps` do with arrays, in one to three calls a step.

The arrays stay Python's, and those modules say what is meant: they serve where there is no compiled prefix index, and
always where a row may have to copy a block first.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from pagegen.cache import prefix_compiled
from pagegen.cache.arrays import Ids, Ints, Packed
from pagegen.cache.prefix_compiled import CompiledIndex
from pagegen.cache.table import Appended

if TYPE_CHECKING:
    from pagegen.cache.allocator import BlockAllocator
    from pagegen.cache.pool import BlockPool


class _Arrays(ctypes.Structure):
    """`struct Table` of the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("block_size", "rows", "width")),
        *((name, ctypes.c_void_p) for name in ("numbers", "blocks", "slots")),
    ]


def open_steps(pool: BlockPool) -> CompiledSteps | None:
    """What takes the steps of an allocator with this pool; None where Python does."""
    return CompiledSteps() if isinstance(pool.index, CompiledIndex) else None


class CompiledSteps:
    """Takes the steps of one allocator, whose rows own what they write. It keeps where the arrays are, and nothing
    else: a copy finds its own."""

    def __init__(self) -> None:
        self._library = prefix_compiled.library()
        self._numbers: Ints | None = None
        self._blocks: Ids | None = None
        self._found: Ints = np.zeros(0, dtype=np.int64)
        self._room_for(64)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledSteps, ()

    def append_each(self, allocator: BlockAllocator, rows: Ints, packed: Packed) -> None:
        """`growth.append_each` of as many tokens as rows, of which none is sharing. Raises OutOfBlocks."""
        table, pool, count, given = allocator.table, allocator.pool, len(rows), rows.tobytes()
        growing = self._library.pagegen_steps_growing(self._bind(allocator), count, given, self._found_at)
        pool.require(growing)
        since, fresh = table.version, b""
        if growing:
            table.reserve(self._found.item(0) + 1)
            table.version += 1
            fresh = pool.take(growing).tobytes()
        size = 3 * count + 2 * growing
        self._room_for(size)
        self._library.pagegen_steps_append(
            self._bind(allocator), count, given, packed.tobytes(), growing, fresh, table.version, self._found_at
        )
        found = self._found[:size].copy()
        positions, slots, tokens = found[: 3 * count].reshape(3, count)
        grown, indices = found[3 * count : size - growing], found[size - growing :]
        table.appended = Appended(rows, since, table.version, positions, slots, tokens, grown, indices)

    def announce(self, allocator: BlockAllocator, rows: Ints, ends: Ints) -> None:
        """`steps.announce` of rows of which none is sharing, but for what their window gives back."""
        index = allocator.pool.index
        assert isinstance(index, CompiledIndex)
        found = self._announce(allocator, index, rows, ends)
        if found < 0:
            index.reserve(-1 - found)
            self._room_for(-1 - found)
            found = self._announce(allocator, index, rows, ends)
        if found:
            allocator.pool.free_spare(self._found[:found].tolist())

    def _announce(self, allocator: BlockAllocator, index: CompiledIndex, rows: Ints, ends: Ints) -> int:
        found: int = self._library.pagegen_steps_announce(
            self._bind(allocator), index.address, len(rows), rows.tobytes(), ends.tobytes(), self._found_at,
            len(self._found),
        )  # fmt: skip
        return found

    def write(self, allocator: BlockAllocator, row: int, first: int, packed: Packed, written: int) -> None:
        """`growth.write_tokens`: `packed` from position `first` on; the leading `written` stand there already."""
        self._library.pagegen_steps_write(
            self._bind(allocator), row, first, first + written, packed.ctypes.data, len(packed)
        )

    def _bind(self, allocator: BlockAllocator) -> int:
        """The address of the struct, which says where the arrays lie now."""
        table = allocator.table
        if table.numbers is not self._numbers or table.blocks is not self._blocks:
            self._numbers, self._blocks = table.numbers, table.blocks
            arrays = (table.numbers, table.blocks, allocator.pool.slots)
            self._arrays = _Arrays(
                table.block_size, *table.numbers.shape[1:], *table.blocks.shape[1:],
                *(array.ctypes.data for array in arrays),
            )  # fmt: skip
            self._address = ctypes.addressof(self._arrays)
        return self._address

    def _room_for(self, size: int) -> None:
        """Makes room for `size` numbers that a call returns."""
        if size > len(self._found):
            self._found = np.zeros(2 * size, dtype=np.int64)
            self._found_at: int = self._found.ctypes.data
