"""`RunIndex`: which blocks are held or kept for their content, and which of the kept are evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from pagegen.cache import InvariantBroken
from pagegen_autotune.block_runs import Contents, Piece, Run

Found = tuple[Piece, int, int]  # a piece, and the first and last of its places that are meant


class RunIndex:
    """The runs of every context, and the queue of the pieces that nobody refers to: `kept_blocks` blocks, the oldest
    entry first and of an entry its end, as sequences give their blocks back."""

    def __init__(self) -> None:
        self.kept_blocks = 0
        self._roots: dict[bytes, Run] = {}
        self._queue: OrderedDict[int, list[Piece]] = OrderedDict()  # of an entry in order of places
        self._entries = self._serials = 0

    def root(self, context: bytes) -> Run:
        """Where sequences of a context begin. Raises TypeError for what is none."""
        if not isinstance(context, bytes):
            raise TypeError(f"context must be bytes, got {type(context).__name__} {context!r}")
        return self._roots.setdefault(context, Run())

    def known(self, root: Run, made: Contents, most: int) -> list[Found]:
        """What is known of blocks of these contents behind a root, of the first `most`."""
        run: Run | None = root
        found: list[Found] = []
        place = 0
        for content, count in made:
            run = run.children.get((place, content)) if run is not None and most else None
            if run is None:
                break
            place = 0
            for piece, low, high in run.find(min(count, most)):
                found.append((piece, low, high))
                place = high
            most -= place
            if place < count:
                break
        return found

    def acquire(self, run: Run, low: int, high: int, writer: int) -> int:
        """One more reference to places of a run that `writer` wrote; returns how many blocks nobody referred to."""
        revived = 0
        for piece in run.overlapping(low, high):
            if piece.writer == writer:
                part = self._cut(piece, max(low, piece.low), min(high, piece.high))
                if not part.refs:
                    self._unkeep(part)
                    revived += len(part)
                part.refs += 1
        run.join()
        return revived

    def release(self, run: Run, low: int, high: int, writer: int) -> int:
        """One reference less to places of a run that `writer` wrote; returns how many blocks nobody refers to any more.
        They are kept, but where there is another copy of them."""
        entry: list[Piece] = []
        freed = 0
        for piece in run.overlapping(low, high):
            if piece.writer != writer:
                continue
            part = self._cut(piece, max(low, piece.low), min(high, piece.high))
            part.refs -= 1
            if not part.refs:
                freed += len(part)
                entry += self._without_copies(part)
        if entry:
            self._entries += 1
            self._queue[self._entries] = entry
            for piece in entry:
                piece.kept = self._entries
                self.kept_blocks += len(piece)
        run.join()
        return freed

    def write(self, run: Run, low: int, high: int, writer: int) -> None:
        """The places of a run that `writer` has just written can be found. Who is kept there is needed no more."""
        for piece in run.overlapping(low, high):
            if not piece.refs:
                spare = self._cut(piece, max(low, piece.low), min(high, piece.high))
                self._unkeep(spare)
                run.pieces.remove(spare)
        self._serials += 1
        run.insert(Piece(run, low, high, writer, self._serials))
        run.join()

    def evict(self, count: int) -> None:
        """Forgets the `count` oldest of the kept blocks."""
        while count > 0:
            piece = next(iter(self._queue.values()))[-1]
            gone = min(count, len(piece))
            if gone == len(piece):
                self._unkeep(piece)
                piece.run.pieces.remove(piece)
                piece.run.prune()
            else:
                piece.high -= gone
                self.kept_blocks -= gone
            count -= gone

    def check_invariants(self) -> int:
        """How many blocks are referred to. Raises `InvariantBroken`."""
        live = kept = 0
        for piece in self._pieces():
            live += len(piece) if piece.refs else 0
            kept += 0 if piece.refs else len(piece)
            if (piece.refs == 0) != (piece in self._queue.get(piece.kept, ())):
                raise InvariantBroken("kept pieces are in the queue", f"places {piece.low} to {piece.high}")
        if kept != self.kept_blocks:
            raise InvariantBroken("kept blocks add up", f"{self.kept_blocks} counted, {kept} kept")
        return live

    def _pieces(self) -> Iterator[Piece]:
        runs = list(self._roots.values())
        while runs:
            run = runs.pop()
            yield from run.pieces
            runs += run.children.values()

    def _without_copies(self, part: Piece) -> list[Piece]:
        """What is left of a piece that nobody refers to where no other piece has the same places."""
        run, left = part.run, []
        for other in [piece for piece in run.overlapping(part.low, part.high) if piece is not part]:
            if other.low > part.low:
                left.append(part)
                part = self._cut_off(part, other.low)
            if other.high >= part.high:
                run.pieces.remove(part)
                return left
            if other.high >= part.low:
                rest = self._cut_off(part, other.high + 1)
                run.pieces.remove(part)
                part = rest
        return [*left, part]

    def _unkeep(self, piece: Piece) -> None:
        """Takes a piece out of the queue."""
        pieces = self._queue[piece.kept]
        pieces.remove(piece)
        if not pieces:
            del self._queue[piece.kept]
        piece.kept = -1
        self.kept_blocks -= len(piece)

    def _cut(self, piece: Piece, low: int, high: int) -> Piece:
        """The part of a piece from `low` to `high`; what is left of it are pieces of their own."""
        if piece.high > high:
            self._cut_off(piece, high + 1)
        return self._cut_off(piece, low) if piece.low < low else piece

    def _cut_off(self, piece: Piece, at: int) -> Piece:
        """Ends a piece before `at`; returns the piece of what comes from there on."""
        rest = Piece(piece.run, at, piece.high, piece.writer, piece.serial, piece.refs, piece.kept)
        piece.high = at - 1
        piece.run.insert(rest)
        if piece.kept >= 0:
            pieces = self._queue[piece.kept]
            pieces.insert(pieces.index(piece) + 1, rest)
        return rest
