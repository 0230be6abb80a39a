"""`SharedCounts`: a `BlockAllocator` with prefix caching as counts, where tokens come in long equal stretches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from pagegen.cache import InvariantBroken, OutOfBlocks
from pagegen.cache.sequence import integer, listed, token_array
from pagegen.serving import CountingCache
from pagegen_autotune.block_runs import Contents, Run, append_run, contents
from pagegen_autotune.run_index import Found, RunIndex


@dataclass(slots=True, eq=False)
class _Held:
    """A sequence: its tokens, blocks, tokens `computed`, blocks `named`, the last of which stands at `place` of `run`.
    `ahead` are the contents of full blocks not yet named, up to `seen` blocks, the next one last; `tail` are tokens
    behind those, and all behind the first `known` are 0. `holds` are the named blocks: a run, first and last place, and
    who wrote them."""

    writer: int
    length: int
    blocks: int
    run: Run
    place: int = 0
    computed: int = 0
    named: int = 0
    seen: int = 0
    known: int = 0
    ahead: Contents = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    holds: list[tuple[Run, int, int, int]] = field(default_factory=list)


class SharedCounts(CountingCache):
    """A `BlockAllocator` without forks, windows and block ids, as far as the scheduler can tell: it finds the same
    prefixes, has the same blocks left and evicts in the same order, at a cost of stretches of equal tokens and not of
    blocks. Nothing can be taken back and nothing swapped.

    `free_blocks` can still be had, the kept ones included. `held_blocks` counts the blocks of all sequences, one that
    several share as often.
    """

    sequences: dict[Hashable, _Held]  # type: ignore[assignment]  # holds more than a count

    def __init__(self, num_blocks: int, block_size: int, *, watermark: int = 0) -> None:
        super().__init__(num_blocks, block_size, watermark=watermark)
        self.held_blocks = 0
        self._index = RunIndex()
        self._writers = 0

    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody refers to, kept for their content until they are wanted."""
        return self._index.kept_blocks

    @property
    def shared_blocks(self) -> int:
        """Blocks that sharing saves now: those of all sequences, less the different ones among them."""
        return self.held_blocks - (self.num_blocks - self.free_blocks)

    def add(self, seq_id: Hashable, tokens: Iterable[int], *, context: bytes = b"") -> int:
        if seq_id in self.sequences:
            raise ValueError(f"seq_id must be new, got {seq_id!r}, which is in the cache")
        packed = token_array(tokens)
        made = contents(packed, self.block_size)
        root = self._index.root(context)
        found = self._index.known(root, made, self._most(len(packed)))
        hits = sum(high - low + 1 for _, low, high in found)
        fresh, free = self._blocks_for(len(packed)) - hits, self._free_beside(found)
        if fresh > free:
            raise OutOfBlocks(fresh, free)
        self._writers += 1
        held = _Held(self._writers, len(packed), hits + fresh, root, known=len(packed))
        for piece, low, high in found:
            held.holds.append((piece.run, low, high, piece.writer))
            held.run, held.place = piece.run, high
        for run, low, high, writer in held.holds:
            self.free_blocks -= self._index.acquire(run, low, high, writer)
        held.run.users += 1
        held.named = hits
        held.computed = hits * self.block_size
        held.ahead, held.seen = _without_first(made, hits)[::-1], len(packed) // self.block_size
        held.tail = packed[len(packed) // self.block_size * self.block_size :].tolist()
        self.sequences[seq_id] = held
        self.held_blocks += held.blocks
        self._took(fresh)
        return hits * self.block_size

    def can_admit(
        self, num_tokens: int, *, tokens: Iterable[int] | None = None, context: bytes = b"", lookahead: int = 0
    ) -> bool:
        wanted = integer("num_tokens", num_tokens, 0) + integer("lookahead", lookahead, 0)
        packed = token_array(() if tokens is None else tokens)
        if tokens is not None and len(packed) != num_tokens:
            raise ValueError(f"tokens must be num_tokens = {num_tokens} tokens, got {len(packed)}")
        made = contents(packed, self.block_size)
        found = self._index.known(self._index.root(context), made, self._most(len(packed)))
        hits = sum(high - low + 1 for _, low, high in found)
        return self._blocks_for(wanted) - hits <= self._free_beside(found)

    def append(self, seq_id: Hashable, tokens: Iterable[int]) -> None:
        held, packed = self._here(seq_id), token_array(tokens)
        needed = self._blocks_for(held.length + len(packed)) - held.blocks
        if needed > self.free_blocks:
            raise OutOfBlocks(needed, self.free_blocks)
        self._note(held, packed.tolist() if packed.any() else (), len(packed))
        held.blocks += needed
        self.held_blocks += needed
        self._took(needed)

    def append_each(self, seq_ids: Iterable[Hashable], tokens: Iterable[int]) -> None:
        ids = listed("seq_ids", seq_ids)
        grown = [self._here(seq_id) for seq_id in ids]
        if len(set(ids)) != len(ids):
            twice = next(seq_id for seq_id in ids if ids.count(seq_id) > 1)
            raise ValueError(f"seq_ids must name each sequence once, got {twice!r} twice")
        packed = token_array(tokens).tolist()
        if len(packed) != len(ids):
            raise ValueError(f"tokens must be one a sequence ({len(ids)}), got {len(packed)}")
        size = self.block_size
        growing = [held for held in grown if held.length == held.blocks * size]
        if len(growing) > self.free_blocks:
            raise OutOfBlocks(len(growing), self.free_blocks)
        for held, token in zip(grown, packed, strict=True):
            if token:
                self._note(held, (token,), 1)
            else:
                held.length += 1
        for held in growing:
            held.blocks += 1
        self.held_blocks += len(growing)
        self._took(len(growing))

    def mark_computed(self, seq_id: Hashable, length: int) -> None:
        self.mark_all_computed([seq_id], [length])

    def mark_all_computed(self, seq_ids: Iterable[Hashable], lengths: Sequence[int]) -> None:
        """`mark_computed` for one step's sequences, each up to its length."""
        size = self.block_size
        for seq_id, length in zip(seq_ids, lengths, strict=True):
            held = self.sequences[seq_id]
            if not held.computed <= length <= held.length:
                length = max(held.computed, integer("length", length, 0, held.length))
            held.computed = length
            if length >= (held.named + 1) * size:
                self._name(held, length // size)

    def free(self, seq_id: Hashable) -> None:
        held = self._here(seq_id)
        del self.sequences[seq_id]
        self.held_blocks -= held.blocks
        self.free_blocks += held.blocks - held.named  # nobody finds the others
        for run, low, high, writer in reversed(held.holds):
            self.free_blocks += self._index.release(run, low, high, writer)
        held.run.users -= 1
        held.run.prune()

    def truncate(self, seq_id: Hashable, length: int) -> NoReturn:
        self._refuse("truncated")

    def abandon(self, seq_ids: Iterable[Hashable]) -> NoReturn:
        self._refuse("abandoned")

    def swap_out(self, seq_id: Hashable) -> NoReturn:
        self._refuse("swapped")

    def swap_in(self, seq_id: Hashable) -> NoReturn:
        self._refuse("swapped")

    def check_invariants(self) -> None:
        """Raises `InvariantBroken` where the counts contradict each other."""
        live, kept = self._index.check_invariants(), self._index.kept_blocks
        unnamed = sum(held.blocks - held.named for held in self.sequences.values())
        if not kept <= self.free_blocks == self.num_blocks - live - unnamed:
            raise InvariantBroken("blocks add up", f"{self.free_blocks} free, {kept} kept, {live} and {unnamed} held")
        if self.held_blocks != sum(held.blocks for held in self.sequences.values()):
            raise InvariantBroken("held blocks add up", str(self.held_blocks))

    def _most(self, length: int) -> int:
        """Blocks of a sequence that may be found: all but the one with its last token."""
        return max(0, length - 1) // self.block_size

    def _free_beside(self, found: list[Found]) -> int:
        """What newcomers can have once `found` is not to be evicted any more."""
        kept = sum(high - low + 1 for piece, low, high in found if not piece.refs)
        return max(0, self.free_blocks - kept - self.watermark)

    def _took(self, count: int) -> None:
        """`count` blocks are taken: free ones first, then the oldest kept ones."""
        self.free_blocks -= count
        self._index.evict(self._index.kept_blocks - self.free_blocks)

    def _name(self, held: _Held, full: int) -> None:
        """Lets others find the first `full` blocks of a sequence, which are computed."""
        self._look_ahead(held, full)
        before = held.run
        while held.named < full:
            content, count = held.ahead.pop()
            taken = min(count, full - held.named)
            if taken < count:
                held.ahead.append((content, count - taken))
            if content != held.run.content:
                held.run, held.place = held.run.child(held.place, content), 0
            self._write(held, held.place + 1, held.place + taken)
            held.place += taken
            held.named += taken
        if held.run is not before:
            held.run.users += 1
            before.users -= 1

    def _write(self, held: _Held, low: int, high: int) -> None:
        """A sequence is found at places of its run."""
        self._index.write(held.run, low, high, held.writer)
        last = held.holds[-1] if held.holds else None
        if last is not None and last[0] is held.run and last[2] == low - 1 and last[3] == held.writer:
            held.holds[-1] = (held.run, last[1], high, held.writer)
        else:
            held.holds.append((held.run, low, high, held.writer))

    def _look_ahead(self, held: _Held, full: int) -> None:
        """Makes contents of tokens, until there are those of `full` blocks."""
        if held.seen >= full:
            return
        size = self.block_size
        stored = min(held.known, full * size) - held.seen * size
        blocks = full - held.seen
        made: Contents = []
        if stored > 0:
            mixed = -(-stored // size)
            tokens = np.zeros(mixed * size, dtype=np.uint32)
            tokens[:stored] = held.tail[:stored]
            del held.tail[:stored]
            made = contents(tokens, size)
            blocks -= mixed
        if blocks:
            append_run(made, 0, blocks)
        ahead = held.ahead[::-1]
        for content, count in made:
            append_run(ahead, content, count)
        held.ahead, held.seen = ahead[::-1], full

    def _note(self, held: _Held, tokens: Sequence[int], count: int) -> None:
        """`count` tokens more: `tokens`, or where there are none of these, zeros."""
        if tokens:
            held.tail += [0] * (held.length - max(held.known, held.seen * self.block_size))
            held.tail += tokens
            held.known = held.length + count
        held.length += count

    def _here(self, seq_id: Hashable) -> _Held:
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise KeyError(f"seq_id must name a sequence in the cache, got {seq_id!r}: unknown or freed") from None

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"nothing is {what} in a simulation: use a BlockAllocator")


def _without_first(made: Contents, blocks: int) -> Contents:
    """The contents behind the first `blocks` blocks."""
    left: Contents = []
    for content, count in made:
        skipped = min(blocks, count)
        blocks -= skipped
        if count > skipped:
            left.append((content, count - skipped))
    return left
