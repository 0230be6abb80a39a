"""`BlockAllocator`: the cache's bookkeeping, with the standard library alone.

Every operation checks first and changes afterwards, so one that raises has changed nothing. Nothing here is
thread-safe: one scheduler owns the cache, and what it looked up is checked again by the call that takes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence

from pagegen.cache import invariants, stats
from pagegen.cache.pool import BlockPool
from pagegen.cache.prefix import Node
from pagegen.cache.sequence import TOKEN_BYTES, SequenceState, integer, pack_tokens

BlockPairs = list[tuple[int, int]]
Work = list[tuple[SequenceState, int]]  # a sequence, and the length up to which it is about to be computed


class OutOfBlocks(RuntimeError):
    """An operation needs `needed` more blocks, but only `free` can be had. Nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return f"{self.needed} blocks are needed but {self.free} are free: free a sequence, or admit fewer"


class BlockAllocator:
    """Which of `num_blocks` blocks of `block_size` tokens holds what, for whom.

    A sequence is named by any hashable id. Full blocks whose tokens are computed are found by later sequences with
    the same tokens and context (`prefix_caching`), after `free` too, until evicted. `watermark` blocks are kept back
    from `add`, for the growth of the sequences that already run.

    Errors, all before any change: OutOfBlocks; KeyError for an unknown or freed id; ValueError for an id that exists
    already and for values out of range; TypeError.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True, *, watermark: int = 0) -> None:
        self.num_blocks = integer("num_blocks", num_blocks, 1, 2**31 - 1)  # ids are int32 in a block table
        self.block_size = integer("block_size", block_size, 1)
        self.watermark = integer("watermark", watermark, 0, num_blocks)
        if not isinstance(prefix_caching, bool):
            raise TypeError(f"prefix_caching must be True or False, got {prefix_caching!r}")
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.sequences: dict[Hashable, SequenceState] = {}
        self._queried_tokens = 0
        self._hit_tokens = 0

    def add(self, seq_id: Hashable, tokens: Iterable[int], *, context: bytes = b"") -> int:
        """Admits a sequence and returns how many of its leading tokens are cached already: whole blocks, and never
        the last token, which is left to compute. Only sequences of equal `context` (adapter and its version, image
        content, tenant: whatever changes keys and values besides the tokens) share blocks."""
        self._new_id("seq_id", seq_id)
        packed = pack_tokens(tokens)[:]
        hits, fresh, free = self._admission(packed, context, len(packed))
        if fresh > free:
            raise OutOfBlocks(fresh, free)
        blocks = array("i", [node.blocks[0] for node in hits])
        for block in blocks:
            self.pool.acquire(block)
        blocks.extend(self.pool.take(fresh))
        cached = len(hits) * self.block_size
        self.sequences[seq_id] = SequenceState(packed, context, blocks, computed=cached, indexed=len(hits))
        self._queried_tokens += len(packed)
        self._hit_tokens += cached
        return cached

    def can_admit(
        self, num_tokens: int, *, tokens: Iterable[int] | None = None, context: bytes = b"", lookahead: int = 0
    ) -> bool:
        """Whether `add` of `num_tokens` tokens would succeed now, with room for `lookahead` tokens more. Given the
        `tokens` too, blocks found by prefix count as had; without them, none is assumed."""
        integer("num_tokens", num_tokens, 0)
        integer("lookahead", lookahead, 0)
        packed = pack_tokens(() if tokens is None else tokens)
        if tokens is not None and len(packed) != num_tokens:
            raise ValueError(f"tokens must be num_tokens = {num_tokens} tokens, got {len(packed)}")
        _, fresh, free = self._admission(packed, context, num_tokens + lookahead)
        return fresh <= free

    def append(self, seq_id: Hashable, tokens: Iterable[int]) -> BlockPairs:
        """Makes room for `tokens` at the end. Where they would be written into a block that others refer to, the
        sequence gets a copy: the (source, target) pairs returned must be copied before anything is written."""
        sequence = self.sequence(seq_id)
        packed = pack_tokens(tokens)
        if not packed:
            return []
        length, blocks, pool = len(sequence.tokens), sequence.blocks, self.pool
        grown = self._blocks_for(length + len(packed)) - len(blocks)
        partial = length % self.block_size > 0
        copied = partial and pool.refs[blocks[-1]] > 1
        self._require(grown + copied)
        pairs = []
        if copied:
            pairs.append(self._copy(sequence, len(blocks) - 1))
        elif partial:
            pool.make_writable(blocks[-1])
        if grown:
            blocks.extend(pool.take(grown))
        sequence.tokens.extend(packed)
        return pairs

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Starts `child` as a copy of `parent` that shares every block of it. Fork after the parent was computed:
        what it has not computed yet, each of the two will compute for itself, in blocks of its own."""
        source = self.sequence(parent)
        self._new_id("child", child)
        for block in source.blocks:
            self.pool.acquire(block)
        self.sequences[child] = SequenceState(
            source.tokens[:], source.context, source.blocks[:], source.computed, source.indexed
        )

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Takes back all tokens from `length` on. Others that share the blocks keep them."""
        sequence = self.sequence(seq_id)
        integer("length", length, 0, len(sequence.tokens))
        kept = self._blocks_for(length)
        self.pool.release(reversed(sequence.blocks[kept:]))
        del sequence.blocks[kept:]
        del sequence.tokens[length:]
        sequence.computed = min(sequence.computed, length)
        sequence.indexed = min(sequence.indexed, length // self.block_size)

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence. Its blocks go back unless others refer to them; full computed ones stay findable until
        evicted, the least recently used and, within a sequence, the last one first."""
        sequence = self.sequence(seq_id)
        del self.sequences[seq_id]
        self.pool.release(reversed(sequence.blocks))

    def mark_computed(self, seq_id: Hashable, length: int) -> BlockPairs:
        """Says that the tokens before `length` are about to be computed and written (call it before block ids are
        read for the step): full blocks among them can be found by others from now on. Returns the (source, target)
        pairs to copy first, as `append` does: there are some only after a fork of uncomputed tokens. A `length`
        already computed changes nothing."""
        sequence = self.sequence(seq_id)
        return self.mark_all_computed([sequence], [integer("length", length, 0, len(sequence.tokens))])

    def mark_all_computed(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> BlockPairs:
        """`mark_computed` for one step's sequences at once: either all or, on OutOfBlocks, none."""
        work = [pair for pair in zip(sequences, lengths, strict=True) if pair[1] > pair[0].computed]
        pairs = self._own(self._writing_unowned(work))
        block_size, prefix_caching = self.block_size, self.prefix_caching
        for sequence, length in work:
            sequence.computed = length
            if prefix_caching and length // block_size > sequence.indexed:
                self._name_blocks(sequence)
        return pairs

    def block_ids(self, seq_id: Hashable) -> list[int]:
        """The blocks of a sequence, in order: ceil(length / block_size) of them."""
        return self.sequence(seq_id).blocks.tolist()

    def length(self, seq_id: Hashable) -> int:
        """Tokens of a sequence, computed or not."""
        return len(self.sequence(seq_id).tokens)

    def computed(self, seq_id: Hashable) -> int:
        """Leading tokens of a sequence that are computed."""
        return self.sequence(seq_id).computed

    def stats(self) -> stats.CacheStats:
        """Blocks, slots, waste and hit rate now."""
        return stats.collect(self, queried_tokens=self._queried_tokens, hit_tokens=self._hit_tokens)

    def check_invariants(self) -> None:
        """Raises `InvariantBroken`, naming the invariant, if the bookkeeping contradicts itself."""
        invariants.check(self)

    def sequence(self, seq_id: Hashable) -> SequenceState:
        """The state behind an id, to read. Raises KeyError for an unknown or freed id."""
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise KeyError(f"seq_id must name a sequence in the cache, got {seq_id!r}: unknown or freed") from None

    def _new_id(self, argument: str, seq_id: Hashable) -> None:
        if seq_id in self.sequences:
            raise ValueError(f"{argument} must be new, got {seq_id!r}, which is in the cache")

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _require(self, needed: int) -> None:
        if needed > self.pool.available:
            raise OutOfBlocks(needed, self.pool.available)

    def _admission(self, packed: array[int], context: bytes, num_tokens: int) -> tuple[list[Node], int, int]:
        """What admitting takes: the index nodes hit, the blocks needed besides, and the blocks to be had for them."""
        if not isinstance(context, bytes):
            raise TypeError(f"context must be bytes, got {type(context).__name__} {context!r}")
        limit = (len(packed) - 1) // self.block_size if packed and self.prefix_caching else 0
        hits = self.pool.index.match(packed.tobytes(), context, self.block_size * TOKEN_BYTES, limit) if limit else []
        # a cached block that is hit can no longer be evicted to make room
        revived = sum(not self.pool.refs[node.blocks[0]] for node in hits)
        free = max(0, self.pool.available - revived - self.watermark)
        return hits, self._blocks_for(num_tokens) - len(hits), free

    def _copy(self, sequence: SequenceState, index: int) -> tuple[int, int]:
        """Gives the sequence a block of its own in place of a shared one; returns (old, new)."""
        source = sequence.blocks[index]
        (target,) = self.pool.take(1)
        sequence.blocks[index] = target
        self.pool.release([source])
        return source, target

    def _writing_unowned(self, work: Work) -> Work:
        """Those of `work` whose tokens to compute lie in a block that others refer to or find."""
        refs, node_of, size = self.pool.refs, self.pool.index.node_of, self.block_size
        found = []
        for sequence, length in work:
            blocks = sequence.blocks
            for index in range(sequence.computed // size, (length - 1) // size + 1):
                if refs[blocks[index]] > 1 or node_of[blocks[index]] is not None:
                    found.append((sequence, length))
                    break
        return found

    def _own(self, work: Work) -> BlockPairs:
        """Gives every sequence of `work` sole ownership of the blocks that computing up to its length writes."""
        refs, size = self.pool.refs, self.block_size
        spans = [range(sequence.computed // size, self._blocks_for(length)) for sequence, length in work]
        writers: dict[int, int] = {}
        for (sequence, _), span in zip(work, spans, strict=True):
            for index in span:
                writers[sequence.blocks[index]] = writers.get(sequence.blocks[index], 0) + 1
        # of those who share a block, the last may keep it if nobody but them refers to it
        self._require(sum(min(count, refs[block] - 1) for block, count in writers.items()))
        pairs = []
        for (sequence, _), span in zip(work, spans, strict=True):
            for index in span:
                if refs[sequence.blocks[index]] == 1:
                    self.pool.make_writable(sequence.blocks[index])
                    continue
                pair = self._copy(sequence, index)
                if index * size < sequence.computed:  # else nothing of the block is kept
                    pairs.append(pair)
        return pairs

    def _name_blocks(self, sequence: SequenceState) -> None:
        """Offers the computed full blocks of a sequence to the prefix index, in order."""
        size, node_of = self.block_size, self.pool.index.node_of
        for index in range(sequence.indexed, sequence.computed // size):
            parent = node_of[sequence.blocks[index - 1]] if index else None
            if index and parent is None:  # not findable, so nothing behind it is
                return
            tokens = sequence.tokens[index * size : (index + 1) * size].tobytes()
            if not self.pool.name(parent, tokens, sequence.context, sequence.blocks[index]):
                return
            sequence.indexed = index + 1
