"""The prefix index in C++ (prefix_index.cpp), which names and finds whole runs of blocks in one call.

Its library has the functions of steps.cpp too, which name blocks by the same code: `steps_compiled` calls those.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagegen.cache.arrays import Bytes, Flags, Ids, Ints
from pagegen.cache.prefix import DIGEST_BYTES, NO_BLOCK, NO_NODE, Named, PrefixIndex, root_digest

log = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("prefix_index.cpp", "steps.cpp"))  # one text, in order
_NODE_COLUMNS = ("states", "parents", "users", "latest", "first", "digests", "packed")
_POINTERS = (*_NODE_COLUMNS, "free", "table", "node_of", "next_copy")
_SPARE = 64  # rows for roots, and for nodes without blocks

_NUMBER, _ADDRESS, _DATA = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # what each returns, and takes behind the struct
    "index_rehash": (None,),
    "index_find": (_NUMBER, _DATA),
    "index_enter_root": (_NUMBER, _DATA),
    "index_walk": (_NUMBER, _NUMBER, _DATA, _NUMBER, _NUMBER, _ADDRESS),
    "index_name": (_NUMBER, _NUMBER, _DATA, _DATA, _DATA, _DATA, _ADDRESS, _ADDRESS, _ADDRESS),
    "index_fill": (_NUMBER, _NUMBER, _NUMBER),
    "index_remove": (None, _NUMBER, _DATA),
    "index_leave": (None, _NUMBER),
    "index_forget_behind": (_NUMBER, _NUMBER, _DATA, _ADDRESS),
    "steps_growing": (_NUMBER, _NUMBER, _DATA, _ADDRESS),
    "steps_append": (None, _NUMBER, _DATA, _DATA, _NUMBER, _DATA, _NUMBER, _ADDRESS),
    "steps_announce": (_NUMBER, _ADDRESS, _NUMBER, _DATA, _DATA, _ADDRESS, _NUMBER),
    "steps_write": (None, _NUMBER, _NUMBER, _NUMBER, _ADDRESS, _NUMBER),
}


class _Arrays(ctypes.Structure):
    """`struct Index` of the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("block_bytes", "capacity", "mask", "free_count")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


def open_index(num_blocks: int, block_bytes: int) -> PrefixIndex:
    """An empty index of the fastest kind that there is here."""
    return (CompiledIndex if available() else PrefixIndex)(num_blocks, block_bytes)


@functools.cache
def available() -> bool:
    """Whether the compiled index can be had, which takes torch's OpenMP as all of pagegen's C++ does, and a compiler.
    The log says once why not."""
    why: Exception
    try:
        from pagegen.targets.errors import CompileError
    except ImportError as error:
        why = error
    else:
        try:
            library()
            return True
        except CompileError as error:
            why = error
    log.warning("the prefix index runs in Python, which takes longer: %s", why)
    return False


@functools.cache
def library() -> ctypes.PyDLL:
    """The compiled functions. Raises CompileError."""
    return load(source())


def source() -> str:
    """The text of all that is compiled."""
    return "".join(path.read_text(encoding="utf-8") for path in SOURCES)


def load(text: str) -> ctypes.PyDLL:
    """The functions of a text, to be called without letting go of the interpreter's lock. Raises CompileError."""
    from pagegen.targets import cpp_build
    from pagegen.targets.errors import CompileError

    if sys.byteorder != "little":
        raise CompileError("cpu", "the prefix index", "it hashes words as they lie, little-endian")
    loaded = cpp_build.load(text, "the prefix index")
    found = ctypes.PyDLL(str(loaded._name), handle=loaded._handle)
    for name, (returned, *arguments) in _FUNCTIONS.items():
        function = getattr(found, f"pagegen_{name}")
        function.restype, function.argtypes = returned, [_ADDRESS, *arguments]
    return found


class CompiledIndex(PrefixIndex):
    """`PrefixIndex` with its columns as arrays. The blocks of a node are a list: `first` of the node, then `next_copy`
    of each block. There are rows enough for a node a block from the start, in memory that is given when it is first
    written."""

    def _set_columns(self) -> None:
        widths = {"digests": DIGEST_BYTES, "packed": self.block_bytes}
        for name in _NODE_COLUMNS:
            shape = (1, widths[name]) if name in widths else 1
            setattr(self, name, np.zeros(shape, dtype=np.uint8 if name in ("states", *widths) else np.int32))
        self.first: Ids
        self.digests: Bytes
        self.packed: Bytes
        self.first[NO_NODE] = NO_BLOCK
        self.next_copy: Ids = np.zeros(len(self.node_of), dtype=np.int32)
        self.free: Ids = np.zeros(0, dtype=np.int32)  # a stack of rows
        self._arrays = _Arrays()
        self._grow(len(self.node_of) + _SPARE)

    def _grow(self, more: int) -> None:
        """Makes `more` rows."""
        rows = len(self.states) + more
        left = self.free[: self._arrays.free_count]
        free = np.concatenate([np.arange(rows - 1, len(self.states) - 1, -1, dtype=np.int32), left])
        for name in _NODE_COLUMNS:
            old = getattr(self, name)
            wider = np.zeros((rows, *old.shape[1:]), dtype=old.dtype)
            wider[: len(old)] = old
            setattr(self, name, wider)
        self.free = np.concatenate([free, np.zeros(rows - len(free), dtype=np.int32)])
        self.table: Ids = np.zeros(2 << rows.bit_length(), dtype=np.int32)
        self._bind(len(free))
        self._library.pagegen_index_rehash(self.address)

    def _bind(self, free_count: int) -> None:
        """Tells the compiled functions where the arrays are."""
        self._library = library()
        self._arrays = _Arrays(
            self.block_bytes, len(self.states), len(self.table) - 1, free_count,
            *(getattr(self, name).ctypes.data for name in _POINTERS),
        )  # fmt: skip
        self.address = ctypes.addressof(self._arrays)
        self._set_answers(len(self.node_of))

    def _set_answers(self, size: int) -> None:
        """Room for what a call returns."""
        self._answers: Ids = np.zeros(size, dtype=np.int32)
        self._answers_at: int = self._answers.ctypes.data

    def __getstate__(self) -> dict[str, Any]:
        addresses = ("_library", "_arrays", "address", "_answers", "_answers_at")
        state = {name: value for name, value in self.__dict__.items() if name not in addresses}
        return {**state, "free": self.free[: self._arrays.free_count]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled index, whose arrays are elsewhere."""
        self.__dict__.update(state)
        free_count = len(self.free)
        self.free = np.concatenate([self.free, np.zeros(len(self.states) - free_count, dtype=np.int32)])
        self._bind(free_count)

    # what it holds

    def nodes(self) -> list[int]:
        found: list[int] = np.flatnonzero(self.states).tolist()
        return found

    def find(self, digest: bytes) -> int:
        node: int = self._library.pagegen_index_find(self.address, digest)
        return node

    def digest(self, node: int) -> bytes:
        return bytes(self.digests[node])

    def tokens(self, node: int) -> bytes:
        return bytes(self.packed[node])

    def copies(self, node: int) -> tuple[int, ...]:
        found = []
        block = self.first.item(node)
        while block != NO_BLOCK:
            found.append(block)
            block = self.next_copy.item(block)
        return tuple(found)

    def first_blocks(self, nodes: Ids) -> Ids:
        found: Ids = self.first.take(nodes)
        return found

    def only_copies(self, blocks: Ids) -> Flags:
        # of a node's blocks, the one that is the first and has no next
        found: Flags = self.first.take(self.node_of.take(blocks)) == blocks
        found &= self.next_copy.take(blocks) == NO_BLOCK
        return found

    @property
    def nbytes(self) -> int:
        return sum(int(getattr(self, name).nbytes) for name in _POINTERS) + self._answers.nbytes

    # looking up, naming and forgetting

    def walk(self, root: int, tokens: bytes, limit: int, *, through_gaps: bool) -> Ids:
        self._answer(limit)
        found = self._library.pagegen_index_walk(self.address, root, tokens, limit, through_gaps, self._answers_at)
        chain: Ids = self._answers[:found].copy()
        return chain

    def enter_root(self, context: bytes) -> int:
        self.reserve(1)
        node: int = self._library.pagegen_index_enter_root(self.address, root_digest(context))
        return node

    def name(self, nodes: Ints, counts: Ints, blocks: Ids, tokens: bytes) -> Named:
        rows, total = len(nodes), len(blocks)
        self.reserve(total)
        self._answer(2 * rows + total)
        last, done, joined = self._answers_at, self._answers_at + 4 * rows, self._answers_at + 8 * rows
        found = self._library.pagegen_index_name(
            self.address, rows, nodes.tobytes(), counts.tobytes(), blocks.tobytes(), tokens, last, done, joined
        )
        answers = self._answers[: 2 * rows + found].copy()
        return Named(answers[:rows], answers[rows : 2 * rows], answers[2 * rows :].tolist())

    def fill(self, node: int, block: int) -> bool:
        return bool(self._library.pagegen_index_fill(self.address, node, block))

    def remove(self, blocks: Ints | Ids | Sequence[int]) -> None:
        self._library.pagegen_index_remove(self.address, len(blocks), self._named(blocks).tobytes())

    def leave(self, node: int) -> None:
        self._library.pagegen_index_leave(self.address, node)

    def forget_behind(self, nodes: Sequence[int]) -> list[int]:
        self._answer(len(self.node_of))
        start = np.array(nodes, dtype=np.int32).tobytes()
        found = self._library.pagegen_index_forget_behind(self.address, len(nodes), start, self._answers_at)
        blocks: list[int] = self._answers[:found].tolist()
        return blocks

    def reserve(self, count: int) -> None:
        """Sees to it that `count` rows are free."""
        if count > self._arrays.free_count:
            self._grow(max(count, len(self.states)))

    def _answer(self, size: int) -> None:
        if size > len(self._answers):
            self._set_answers(2 * size)
