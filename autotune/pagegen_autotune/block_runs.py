"""Blocks of equal content in a row, and who holds which of them: one `Run` in place of many nodes of an index.

A trace names 512 tokens by one id where a cache has blocks of 16, and the outputs of a simulation are all alike: tokens
come in long stretches of one value. What `pagegen.cache` keeps a block, is kept here a stretch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Content = int | bytes  # of a block: the token that fills it, or all of its tokens
Contents = list[tuple[Content, int]]  # each with how many blocks in a row have it, neighbours different


def contents(tokens: npt.NDArray[np.uint32], block_size: int) -> Contents:
    """What the full blocks of `tokens` hold."""
    full = len(tokens) // block_size
    if not full:
        return []
    rows = tokens[: full * block_size].reshape(full, block_size)
    first = rows[:, 0]
    alike = (rows == first[:, None]).all(axis=1)
    changes = np.flatnonzero((first[1:] != first[:-1]) | ~alike[1:] | ~alike[:-1]) + 1
    begins = [0, *changes.tolist()]
    found: Contents = []
    for begin, end in zip(begins, [*begins[1:], full], strict=True):
        content: Content = first.item(begin) if alike[begin] else rows[begin].tobytes()
        append_run(found, content, end - begin)
    return found


def append_run(to: Contents, content: Content, count: int) -> None:
    """`count` blocks of `content` more at the end."""
    if to and to[-1][0] == content:
        to[-1] = (content, to[-1][1] + count)
    else:
        to.append((content, count))


@dataclass(slots=True, eq=False)
class Piece:
    """The blocks at places `low` to `high` of a run that one writer wrote, with `refs` references to each; with none
    they are kept for their content, in the queue's entry `kept`. `serial` grows from naming to naming."""

    run: Run
    low: int
    high: int
    writer: int
    serial: int
    refs: int = 1
    kept: int = -1

    def __len__(self) -> int:
        return self.high - self.low + 1


@dataclass(slots=True, eq=False)
class Run:
    """Blocks of equal `content` behind place `place` of `parent`; places count from 1, and the run has as many as
    anybody wrote. `pieces` are in order of `low`: several at one place are copies, written side by side, of which the
    one named first is found. `users` are the sequences whose last named block stands here."""

    content: Content | None = None
    parent: Run | None = None
    place: int = 0
    children: dict[tuple[int, Content], Run] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    users: int = 0

    def child(self, place: int, content: Content) -> Run:
        """The run of `content` behind a place of this one, made if need be."""
        found = self.children.get((place, content))
        if found is None:
            found = self.children[place, content] = Run(content, self, place)
        return found

    def find(self, last: int) -> Iterator[tuple[Piece, int, int]]:
        """What holds the places from 1 to `last` at most, up to the first that nobody holds: a piece, and the first and
        last of its places that are meant."""
        at = 1
        while at <= last:
            oldest, end = None, last
            for piece in self.pieces:
                if piece.low > at:
                    end = min(end, piece.low - 1)  # from there on it may be the older copy
                    break
                if piece.high >= at and (oldest is None or piece.serial < oldest.serial):
                    oldest = piece
            if oldest is None:
                return
            end = min(end, oldest.high)
            yield oldest, at, end
            at = end + 1

    def overlapping(self, low: int, high: int) -> list[Piece]:
        """The pieces with a place from `low` to `high`."""
        return [piece for piece in self.pieces if piece.low <= high and piece.high >= low]

    def insert(self, piece: Piece) -> None:
        """Takes in a piece, behind others that begin where it does."""
        i = len(self.pieces)
        while i and self.pieces[i - 1].low > piece.low:
            i -= 1
        self.pieces.insert(i, piece)

    def join(self) -> None:
        """Makes one piece of neighbours that have ceased to differ, where there are no copies to tell apart."""
        pieces = self.pieces
        if len({piece.writer for piece in pieces}) > 1:
            return
        i = 1
        while i < len(pieces):
            left, right = pieces[i - 1], pieces[i]
            if left.high + 1 == right.low and left.refs == right.refs and left.refs:
                left.high, left.serial = right.high, max(left.serial, right.serial)
                del pieces[i]
            else:
                i += 1

    def prune(self) -> None:
        """Forgets this run, and those before it, where nobody needs them any more."""
        run = self
        while run.parent is not None and run.content is not None and not (run.pieces or run.children or run.users):
            del run.parent.children[run.place, run.content]
            run = run.parent
