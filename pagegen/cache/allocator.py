"""`BlockAllocator`: the cache's bookkeeping, without torch.

Every operation reads what it is given first, which may be a generator that changes the cache, then checks, and changes
afterwards, so one that raises has changed nothing. Nothing here is thread-safe: one scheduler owns the cache, and what
it looked up is checked again by the call that takes it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from pagegen.cache import admission, growth, invariants, stats, steps, swap, window
from pagegen.cache.arrays import Ints
from pagegen.cache.growth import BlockPairs
from pagegen.cache.pool import BlockPool, OutOfBlocks
from pagegen.cache.prefix import NO_NODE
from pagegen.cache.sequence import SequenceState, check_id, integer, listed, token_array
from pagegen.cache.steps_compiled import open_steps
from pagegen.cache.table import SequenceTable
from pagegen.cache.view import SequenceView


class BlockAllocator:
    """Which of `num_blocks` blocks of `block_size` tokens holds what, for whom.

    A sequence is named by any hashable id. Full blocks whose tokens are computed are found by later sequences with
    the same tokens and context (`prefix_caching`), after `free` too, until evicted. `watermark` blocks are kept back
    from `add` and `swap_in`, for the growth of the sequences that already run. With a `window` of W tokens a query sees
    itself and the W-1 tokens before, and blocks that no query sees any more are given back. `num_host_blocks` blocks
    of host memory take sequences that are swapped out.

    Errors, all before any change: OutOfBlocks; KeyError for an unknown or freed id; ValueError for an id that exists
    already or is swapped out, and for values out of range; TypeError.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        *,
        watermark: int = 0,
        window: int | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = integer("num_blocks", num_blocks, 1, 2**31 - 1)  # ids are int32 in a block table
        self.block_size = integer("block_size", block_size, 1, 2**31 - 1)
        self.watermark = integer("watermark", watermark, 0, self.num_blocks)
        self.window = None if window is None else integer("window", window, 1)
        self.num_host_blocks = integer("num_host_blocks", num_host_blocks, 0, 2**31 - 1)
        if not isinstance(prefix_caching, bool):
            raise TypeError(f"prefix_caching must be True or False, got {prefix_caching!r}")
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(
            self.num_blocks, self.block_size, self.num_host_blocks, prefix_caching=self.prefix_caching
        )
        self.table = SequenceTable(self.block_size)
        self.compiled = open_steps(self.pool)
        self.sequences: dict[Hashable, SequenceState] = {}
        self.arrivals = 0  # see `SequenceState.came`
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._last_rows: tuple[list[Hashable], Ints] | None = None  # what `rows` was given, and gave

    def add(
        self, seq_id: Hashable, tokens: Iterable[int], *, context: bytes = b"", most_cached: int | None = None
    ) -> int:
        """Admits a sequence and returns how many of its leading tokens are cached already: whole blocks, and never
        the last token, which is left to compute. Only sequences of equal `context` (adapter and its version, image
        content, tenant: whatever changes keys and values besides the tokens) share blocks. With a window, what the
        next query sees of the cached tokens is enough. `most_cached` tokens are taken as cached at most: 0 computes all
        of them again, as the log-probabilities of a prompt need."""
        packed = token_array(tokens)
        self.check_new("seq_id", seq_id)
        if most_cached is not None:
            most_cached = integer("most_cached", most_cached, 0)
        found = admission.plan(self, admission.known_chain(self, packed, context, most_cached), len(packed))
        self.pool.require(found.fresh, found.free)
        cached = admission.admit(self, seq_id, packed, context, found)
        self._queried_tokens += len(packed)
        self._hit_tokens += cached
        return cached

    def can_admit(
        self, num_tokens: int, *, tokens: Iterable[int] | None = None, context: bytes = b"", lookahead: int = 0
    ) -> bool:
        """Whether `add` of `num_tokens` tokens would succeed now, with room for `lookahead` tokens more. Given the
        `tokens` too, blocks found by prefix count as had; without them, none is assumed."""
        num_tokens, lookahead = integer("num_tokens", num_tokens, 0), integer("lookahead", lookahead, 0)
        packed = token_array(() if tokens is None else tokens)
        if tokens is not None and len(packed) != num_tokens:
            raise ValueError(f"tokens must be num_tokens = {num_tokens} tokens, got {len(packed)}")
        found = admission.plan(self, admission.known_chain(self, packed, context), num_tokens + lookahead)
        return found.fresh <= found.free

    def append(self, seq_id: Hashable, tokens: Iterable[int]) -> BlockPairs:
        """Makes room for `tokens` at the end. Where they would be written into a block that others refer to, the
        sequence gets a copy: the (source, target) pairs returned must be copied before anything is written."""
        return growth.append(self, packed=token_array(tokens), row=self.resident(seq_id).row)

    def append_each(self, seq_ids: Iterable[Hashable], tokens: Iterable[int]) -> BlockPairs:
        """`append` of one token to each of many sequences, tokens[i] to seq_ids[i]: all or, on OutOfBlocks, none."""
        return growth.append_each(self, packed=token_array(tokens), rows=self.rows(seq_ids))

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Starts `child` as a copy of `parent` that shares every block of it. Fork after the parent was computed:
        what it has not computed yet, each of the two will compute for itself, in blocks of its own."""
        source = self.resident(parent)
        self.check_new("child", child)
        held = self.table.held(source.row)
        self.pool.acquire(held)
        state = SequenceState(child, source.context, source.came)
        self.table.copy_row(source.row, self.table.claim(state))
        if node := self.table.nodes.item(state.row):
            self.pool.index.enter(node)
        self.table.sharing.update((source.row, state.row))
        self.sequences[child] = state

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Takes back all tokens from `length` on. Others that share the blocks keep them. With a window, ValueError
        for a length from which the next query would see blocks already given back, other than 0: what the step last
        announced computes can always be taken back."""
        state, length = self.check_truncate(seq_id, length)
        table, row = self.table, state.row
        before, released = table.lengths.item(row), table.released.item(row)
        held, kept = table.blocks_for(before), table.blocks_for(length)
        growth.forget_tokens(self, row, max(length, released * self.block_size), before)
        if kept < held:
            self.pool.release(table.blocks[row, max(kept, released) : held][::-1])
            table.blocks[row, kept:held] = 0
        table.reshape(row)
        table.sharing.add(row)
        steps.step_back(self, state, length)
        table.lengths[row] = length
        table.released[row] = min(released, kept)

    def check_truncate(self, seq_id: Hashable, length: int) -> tuple[SequenceState, int]:
        """`state`, of a sequence that can be truncated, and to what. Raises what `truncate` does."""
        state = self.resident(seq_id)
        length = integer("length", length, 0, self.table.lengths.item(state.row))
        window.check_truncate(self, state.row, length)
        return state, length

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence. Its blocks go back unless others refer to them; full computed ones stay findable until
        evicted, the least recently used and, within a sequence, the last one first."""
        state = self.state(seq_id)
        del self.sequences[seq_id]
        if state.host is None:
            self.pool.release(self.table.held(state.row)[::-1])
        else:
            self.pool.host_free.extend(reversed(state.host))
        steps.stand_on(self, state.row, NO_NODE)
        self.table.give_back(state.row)
        self._last_rows = None

    def mark_computed(self, seq_id: Hashable, length: int) -> BlockPairs:
        """Says that the tokens before `length` are about to be computed and written (call it before block ids are
        read for the step): full blocks among them can be found by others from now on. Returns the (source, target)
        pairs to copy first, as `append` does: there are some only after a fork of uncomputed tokens. A `length`
        already computed changes nothing."""
        row = self.resident(seq_id).row
        return steps.announce_one(self, row, integer("length", length, 0, self.table.lengths.item(row)))

    def mark_all_computed(self, seq_ids: Iterable[Hashable], lengths: Sequence[int] | None = None) -> BlockPairs:
        """`mark_computed` for one step's sequences at once, up to `lengths` or their ends: either all or, on
        OutOfBlocks, none."""
        given = None if lengths is None else listed("lengths", lengths)
        rows = self.rows(seq_ids)
        return self.announce(rows, steps.ends_of(self, rows, given))

    def announce(self, rows: Ints, ends: Ints) -> BlockPairs:
        """`mark_all_computed` by table row, of lengths known to be right."""
        return steps.announce(self, rows, ends)

    def abandon(self, seq_ids: Iterable[Hashable]) -> None:
        """Says that the last step announced for `seq_ids` failed before it wrote anything: what it was to compute
        counts as not computed again, and cannot be found any more. Nor is it computed for whoever has found those
        blocks since or forked from there, and what they computed on top of them is forgotten too: they compute it
        again. Call it before any of those is freed, truncated, swapped out or copied on write, and before their window
        passes what they found: copies count as written. A step that succeeded may be abandoned as well, and costs its
        time again.

        Raises ValueError, naming the sequences to free first, where a window gave back what they would see again."""
        self.take_back({i: self.table.announced.item(self.resident(i).row) for i in listed("seq_ids", seq_ids)})

    def take_back(self, lengths: dict[Hashable, int]) -> None:
        """`abandon`, of what was to be computed behind `lengths`."""
        steps.take_back(self, steps.plan_abandon(self, lengths))

    def swap_out(self, seq_id: Hashable) -> BlockPairs:
        """Moves a sequence to host blocks, and gives back its blocks; what others refer to stays theirs. Returns the
        (device block, host block) pairs to copy to the host before anything else is written. Until `swap_in` every
        operation on it but `free`, `length` and `computed` raises ValueError. OutOfBlocks says which pool lacks room.
        """
        pairs = swap.swap_out(self, self.resident(seq_id))
        self._last_rows = None
        return pairs

    def swap_in(self, seq_id: Hashable) -> BlockPairs:
        """Brings a sequence back: blocks that can still be found are shared again, and the (device block, host block)
        pairs of the others are returned, to copy to the device before the sequence is used. It is as it was."""
        pairs = swap.swap_in(self, self.swapped(seq_id))
        self._last_rows = None
        return pairs

    def can_swap_in(self, seq_id: Hashable, *, lookahead: int = 0) -> bool:
        """Whether `swap_in` would succeed now, with room for `lookahead` tokens more."""
        try:
            swap.check_in(self, self.swapped(seq_id), integer("lookahead", lookahead, 0))
        except OutOfBlocks:
            return False
        return True

    def is_swapped(self, seq_id: Hashable) -> bool:
        """Whether a sequence is swapped out."""
        return self.state(seq_id).host is not None

    def block_ids(self, seq_id: Hashable) -> list[int]:
        """The blocks of a sequence, in order: ceil(length / block_size) of them, 0 for each that the window gave
        back."""
        row = self.resident(seq_id).row
        blocks: list[int] = self.table.blocks[row, : self.table.blocks_for(self.table.lengths.item(row))].tolist()
        return blocks

    def length(self, seq_id: Hashable) -> int:
        """Tokens of a sequence, computed or not."""
        return int(self.table.lengths[self.state(seq_id).row])

    def computed(self, seq_id: Hashable) -> int:
        """Leading tokens of a sequence that are computed."""
        return int(self.table.computed[self.state(seq_id).row])

    def stats(self) -> stats.CacheStats:
        """Blocks, slots, waste and hit rate now."""
        return stats.collect(self, queried_tokens=self._queried_tokens, hit_tokens=self._hit_tokens)

    def bookkeeping_bytes(self) -> int:
        """Host memory that the bookkeeping takes now, in bytes: arrays, containers, and an index node a named block.
        Takes time linear in the blocks."""
        return stats.bookkeeping_bytes(self)

    def check_invariants(self) -> None:
        """Raises `InvariantBroken`, naming the invariant, if the bookkeeping contradicts itself."""
        invariants.check(self)

    def sequence(self, seq_id: Hashable) -> SequenceView:
        """What the allocator knows of a sequence, swapped out or not."""
        return SequenceView.of(self, self.state(seq_id))

    def state(self, seq_id: Hashable) -> SequenceState:
        """The record behind an id. Raises KeyError for an unknown or freed id."""
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise KeyError(f"seq_id must name a sequence in the cache, got {seq_id!r}: unknown or freed") from None
        except TypeError:
            raise TypeError(f"seq_id must be hashable, got {type(seq_id).__name__} {seq_id!r}") from None

    def resident(self, seq_id: Hashable) -> SequenceState:
        """`state`, of a sequence that is not swapped out. Raises ValueError for one that is."""
        state = self.state(seq_id)
        if state.host is not None:
            raise ValueError(f"seq_id must name a sequence on the device, got {seq_id!r}: swap it in first")
        return state

    def swapped(self, seq_id: Hashable) -> SequenceState:
        """`state`, of a sequence that is swapped out. Raises ValueError for one that is not."""
        state = self.state(seq_id)
        if state.host is None:
            raise ValueError(f"seq_id must name a sequence that is swapped out, got {seq_id!r}, which is not")
        return state

    def rows(self, seq_ids: Iterable[Hashable]) -> Ints:
        """The table rows of several sequences, each named once; the same array for the same ids as last time, so that
        whoever keeps something for the next step knows its rows again by `is`."""
        ids = listed("seq_ids", seq_ids)
        try:
            if self._last_rows is not None and self._last_rows[0] == ids:
                return self._last_rows[1]
            states = [state for state in map(self.sequences.get, ids) if state is not None and state.host is None]
        except (TypeError, ValueError, RuntimeError):  # an id that cannot be hashed, or compared with one
            states = []
        if len(states) != len(ids):
            states = [self.resident(seq_id) for seq_id in ids]  # raises, naming the one that is not here
        if len(set(ids)) != len(ids):
            twice = next(seq_id for seq_id in ids if ids.count(seq_id) > 1)
            raise ValueError(f"seq_ids must name each sequence once, got {twice!r} twice")
        rows = np.array([state.row for state in states], dtype=np.int64)
        rows.flags.writeable = False
        self._last_rows = ids, rows
        return rows

    def check_new(self, argument: str, seq_id: Hashable) -> None:
        """Raises ValueError unless `seq_id` can be given to a new sequence."""
        check_id(argument, seq_id)
        if seq_id in self.sequences:
            raise ValueError(f"{argument} must be new, got {seq_id!r}, which is in the cache")
