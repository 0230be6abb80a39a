"""What must hold between any two operations, each a named check over the allocator's whole state.

Each check yields one line per contradiction. They cost time in the number of blocks and tokens: for tests and for
hunting a fault, not for every step of an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from pagegen.cache import prefix
from pagegen.cache.prefix import PrefixIndex
from pagegen.cache.sequence import token_sums
from pagegen.cache.view import SequenceView
from pagegen.cache.window import first_seen_block

if TYPE_CHECKING:
    from pagegen.cache.allocator import BlockAllocator

Check = Callable[["BlockAllocator"], Iterator[str]]
INVARIANTS: dict[str, Check] = {}


class InvariantBroken(RuntimeError):
    """The bookkeeping contradicts itself. `invariant` is the name of the broken rule, `detail` the contradiction."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(invariant, detail)
        self.invariant = invariant
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.invariant}: {self.detail}"


def check(allocator: BlockAllocator) -> None:
    """Raises InvariantBroken for the first contradiction found."""
    for name, find in INVARIANTS.items():
        for detail in find(allocator):
            raise InvariantBroken(name, detail)


def _invariant(function: Check) -> Check:
    INVARIANTS[function.__name__] = function
    return function


def _views(allocator: BlockAllocator, *, swapped: bool = False) -> Iterator[tuple[Hashable, SequenceView]]:
    """The sequences on the device, or those that are swapped out."""
    for seq_id, state in allocator.sequences.items():
        if (state.host is not None) == swapped:
            yield seq_id, allocator.sequence(seq_id)


@_invariant
def a_row_belongs_to_one_sequence(allocator: BlockAllocator) -> Iterator[str]:
    table = allocator.table
    rows = Counter(state.row for state in allocator.sequences.values())
    for seq_id, state in allocator.sequences.items():
        if rows[state.row] > 1 or not 0 <= state.row < len(table.states) or table.states[state.row] is not state:
            yield f"row {state.row} of {seq_id!r} is not its own"
    in_use = sum(state is not None for state in table.states)
    if in_use != len(rows):
        yield f"{in_use} rows are in use by {len(rows)} sequences"


@_invariant
def every_logical_block_maps_to_storage(allocator: BlockAllocator) -> Iterator[str]:
    for swapped, most in ((False, allocator.num_blocks), (True, allocator.num_host_blocks)):
        for seq_id, view in _views(allocator, swapped=swapped):
            held = view.blocks[view.released :]
            for index, block in enumerate(held, view.released):
                if not 0 <= block < most:
                    yield f"block {index} of {seq_id!r} is {block}, outside 0..{most - 1}"
            if len(set(held)) != len(held):
                yield f"{seq_id!r} holds a block twice: {held}"


@_invariant
def no_slot_past_a_length_can_be_read(allocator: BlockAllocator) -> Iterator[str]:
    size = allocator.block_size
    for swapped in (False, True):
        for seq_id, view in _views(allocator, swapped=swapped):
            row = allocator.table.blocks[allocator.state(seq_id).row]
            if len(view.blocks) != -(-view.length // size):
                yield f"{seq_id!r} has {len(view.blocks)} blocks of {size} for {view.length} tokens"
            if row[: view.released].any() or row[0 if swapped else len(view.blocks) :].any():
                yield f"the row of {seq_id!r} names blocks that it does not hold: {row.tolist()}"
            if not 0 <= view.announced <= view.computed <= view.length:
                yield f"{seq_id!r} has {view.announced}, then {view.computed} of {view.length} tokens computed"
            if not 0 <= view.indexed <= view.computed // size:
                yield f"{seq_id!r} has {view.indexed} blocks indexed with {view.computed} tokens computed"


@_invariant
def refcounts_equal_references(allocator: BlockAllocator) -> Iterator[str]:
    references = Counter(block for _, view in _views(allocator) for block in view.blocks[view.released :])
    for block, count in enumerate(allocator.pool.refs.tolist()):
        if count != references[block]:
            yield f"block {block} counts {count} references and has {references[block]}"


@_invariant
def a_referenced_block_is_never_free(allocator: BlockAllocator) -> Iterator[str]:
    available = {*allocator.pool.free, *allocator.pool.cached}
    for seq_id, view in _views(allocator):
        for block in available.intersection(view.blocks[view.released :]):
            yield f"block {block} of {seq_id!r} can be taken by others"


@_invariant
def a_block_is_free_live_or_cached(allocator: BlockAllocator) -> Iterator[str]:
    pool = allocator.pool
    places = Counter([*pool.free, *pool.cached, *(block for block, count in enumerate(pool.refs.tolist()) if count)])
    for block in {*places, *range(allocator.num_blocks)}:
        if places[block] != 1 or not 0 <= block < allocator.num_blocks:
            yield f"block {block} is in {places[block]} of free, live and cached"


@_invariant
def a_host_block_is_free_or_holds_one_sequence(allocator: BlockAllocator) -> Iterator[str]:
    held = [block for _, view in _views(allocator, swapped=True) for block in view.blocks[view.released :]]
    places = Counter([*allocator.pool.host_free, *held])
    for block in {*places, *range(allocator.num_host_blocks)}:
        if places[block] != 1 or not 0 <= block < allocator.num_host_blocks:
            yield f"host block {block} is in {places[block]} of free and held"


@_invariant
def a_block_written_by_a_step_has_one_writer(allocator: BlockAllocator) -> Iterator[str]:
    size = allocator.block_size
    writers: dict[int, Hashable] = {}
    for seq_id, view in _views(allocator):
        written = (
            view.blocks[view.announced // size : -(-view.computed // size)] if view.announced < view.computed else []
        )
        for block in written:
            if block in writers:
                yield f"block {block} was written by {writers[block]!r} and by {seq_id!r}"
            writers[block] = seq_id


@_invariant
def a_writable_block_has_one_owner(allocator: BlockAllocator) -> Iterator[str]:
    size, pool = allocator.block_size, allocator.pool
    for seq_id, view in _views(allocator):
        if allocator.state(seq_id).row in allocator.table.sharing:  # it looks, and copies, before it writes
            continue
        for block in view.blocks[view.computed // size :]:
            if pool.refs.item(block) != 1 or pool.index.node_of.item(block):
                yield f"{seq_id!r} would write into block {block}, which others refer to or find"


@_invariant
def a_sequence_reads_the_tokens_it_was_given(allocator: BlockAllocator) -> Iterator[str]:
    table = allocator.table
    for seq_id, state in allocator.sequences.items():
        view = allocator.sequence(seq_id)
        positions = view.released * allocator.block_size + np.arange(len(view.tokens))
        if table.sums.item(state.row) != token_sums(positions, np.array(view.tokens, dtype=np.uint32)).sum():
            yield f"{seq_id!r} reads tokens that others wrote: {view.tokens}"


@_invariant
def only_findable_blocks_are_cached(allocator: BlockAllocator) -> Iterator[str]:
    pool = allocator.pool
    for block in pool.cached:
        copies = pool.index.copies(pool.index.node_of.item(block))
        if copies != (block,):
            yield f"cached block {block} is one of {copies} in the index"
    for block in pool.free:
        if pool.index.node_of[block]:
            yield f"free block {block} still has its old hash"


@_invariant
def the_index_names_blocks_by_their_content(allocator: BlockAllocator) -> Iterator[str]:
    pool, index = allocator.pool, allocator.pool.index
    known = [node for node in index.nodes() if index.is_known(node)]
    for node in known:
        parent, label = index.parent(node), f"node {node}"
        if parent and index.digest(node) != prefix.block_digest(index.digest(parent), index.tokens(node)):
            yield f"{label} is not the hash of its parent and tokens"
        if parent and not index.is_known(parent):
            yield f"{label} stands behind one that was forgotten"
        if index.find(index.digest(node)) != node:
            yield f"{label} is not found by its name"
        for block in index.copies(node):
            if index.node_of[block] != node or pool.tokens[block].tobytes() != index.tokens(node):
                yield f"{label} names block {block}, which does not hold its tokens or name it"
    named = {block for node in known for block in index.copies(node)}
    for block in np.flatnonzero(index.node_of).tolist():
        if block not in named:
            yield f"block {block} has a name that the index does not know"
    for seq_id, view in _views(allocator):
        place = prefix.root_digest(view.context)
        for position, block in enumerate(view.blocks[view.released :], view.released):
            node = index.node_of.item(block)
            if node and _place(index, node) != (position, place):
                yield f"block {block} of {seq_id!r} is named for another position or context"


@_invariant
def index_nodes_stay_while_they_are_used(allocator: BlockAllocator) -> Iterator[str]:
    index, table = allocator.pool.index, allocator.table
    stands = {seq_id: table.nodes.item(state.row) for seq_id, state in allocator.sequences.items()}
    nodes = index.nodes()
    users = Counter([*(index.parent(node) for node in nodes), *stands.values()])
    for node in nodes:
        copies, latest = index.copies(node), int(index.latest[node])
        if index.users[node] != users[node] or not (users[node] or copies) or (copies and not index.is_known(node)):
            yield f"node {node} counts {index.users[node]} users and has {users[node]}, and {copies}"
        if latest and not (index.is_known(latest) and index.parent(latest) == node):
            yield f"node {node} expects one that is not behind it"
    for seq_id, node in stands.items():
        state = allocator.sequences[seq_id]
        place = (table.indexed.item(state.row) - 1, prefix.root_digest(state.context))
        if node and (node not in nodes or _place(index, node) != place):
            yield f"{seq_id!r} stands on a node of another position or context"


@_invariant
def eviction_takes_the_deepest_first(allocator: BlockAllocator) -> Iterator[str]:
    if allocator.window is not None:  # what is seen no more is given back, and evicted, before what stands behind it
        return
    index, refs = allocator.pool.index, allocator.pool.refs
    order = {block: place for place, block in enumerate(allocator.pool.cached)}
    for block, place in order.items():
        before = _before(index, index.node_of.item(block))
        if before and not any(refs[b] or order.get(b, -1) > place for b in before):
            yield f"cached block {block} would outlive its parent {before}"
    for node in index.nodes():
        blocks, before = index.copies(node), _before(index, node)
        if index.parent(index.parent(node)) and any(refs[b] for b in blocks) and not any(refs[b] for b in before):
            yield f"live block {blocks} stands behind {before}, which can be evicted"


@_invariant
def a_window_keeps_what_a_query_sees(allocator: BlockAllocator) -> Iterator[str]:
    for seq_id in allocator.sequences:
        view = allocator.sequence(seq_id)
        seen = first_seen_block(view.announced, allocator.block_size, allocator.window)
        if not 0 <= view.released <= seen:
            yield f"{seq_id!r} gave back {view.released} blocks, and queries at {view.announced} see block {seen}"


@_invariant
def sums_of_slots_agree(allocator: BlockAllocator) -> Iterator[str]:
    stats, size = allocator.stats(), allocator.block_size
    used: dict[int, int] = {}
    for _, view in _views(allocator):
        for position, block in enumerate(view.blocks[view.released :], view.released):
            used[block] = max(used.get(block, 0), min(size, view.length - position * size))
    if (stats.used_blocks, stats.allocated_slots) != (len(used), len(used) * size):
        yield f"{stats.used_blocks} blocks and {stats.allocated_slots} slots are said to be used, not {len(used)}"
    if stats.free_blocks + stats.used_blocks + stats.cached_blocks != allocator.num_blocks:
        yield f"free, used and cached blocks are not {allocator.num_blocks} in {stats}"
    if (stats.used_slots, stats.wasted_slots) != (sum(used.values()), len(used) * size - sum(used.values())):
        yield f"{stats.used_slots} slots used and {stats.wasted_slots} wasted are not {sum(used.values())} used"


def _place(index: PrefixIndex, node: int) -> tuple[int, bytes]:
    """How many nodes stand before a block's node, or up to a root; and the name of the context."""
    depth = -1
    while parent := index.parent(node):
        node = parent
        depth += 1
    return depth, index.digest(node)


def _before(index: PrefixIndex, node: int) -> tuple[int, ...]:
    """The blocks of the node before, if there are any: a root has none."""
    return index.copies(index.parent(node))
