"""What must hold between any two operations, each a named check over the allocator's whole state.

Each check yields one line per contradiction. They cost time in the number of blocks and tokens: for tests and for
hunting a fault, not for every step of an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pagegen.cache import prefix
from pagegen.cache.prefix import Node
from pagegen.cache.sequence import TOKEN_BYTES

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


@_invariant
def every_logical_block_maps_to_storage(allocator: BlockAllocator) -> Iterator[str]:
    for seq_id, sequence in allocator.sequences.items():
        for index, block in enumerate(sequence.blocks):
            if not 0 <= block < allocator.num_blocks:
                yield f"block {index} of {seq_id!r} is {block}, outside 0..{allocator.num_blocks - 1}"
        if len(set(sequence.blocks)) != len(sequence.blocks):
            yield f"{seq_id!r} holds a block twice: {sequence.blocks.tolist()}"


@_invariant
def no_slot_past_a_length_can_be_read(allocator: BlockAllocator) -> Iterator[str]:
    size = allocator.block_size
    for seq_id, sequence in allocator.sequences.items():
        length = len(sequence.tokens)
        if len(sequence.blocks) != -(-length // size):
            yield f"{seq_id!r} has {len(sequence.blocks)} blocks of {size} for {length} tokens"
        if not 0 <= sequence.computed <= length:
            yield f"{seq_id!r} has {sequence.computed} of {length} tokens computed"
        if not 0 <= sequence.indexed <= sequence.computed // size:
            yield f"{seq_id!r} has {sequence.indexed} blocks indexed with {sequence.computed} tokens computed"


@_invariant
def refcounts_equal_references(allocator: BlockAllocator) -> Iterator[str]:
    references = Counter(block for sequence in allocator.sequences.values() for block in sequence.blocks)
    for block, count in enumerate(allocator.pool.refs):
        if count != references[block]:
            yield f"block {block} counts {count} references and has {references[block]}"


@_invariant
def a_referenced_block_is_never_free(allocator: BlockAllocator) -> Iterator[str]:
    available = {*allocator.pool.free, *allocator.pool.cached}
    for seq_id, sequence in allocator.sequences.items():
        for block in available.intersection(sequence.blocks):
            yield f"block {block} of {seq_id!r} can be taken by others"


@_invariant
def a_block_is_free_live_or_cached(allocator: BlockAllocator) -> Iterator[str]:
    pool = allocator.pool
    places = Counter([*pool.free, *pool.cached, *(block for block, count in enumerate(pool.refs) if count)])
    for block in {*places, *range(allocator.num_blocks)}:
        if places[block] != 1 or not 0 <= block < allocator.num_blocks:
            yield f"block {block} is in {places[block]} of free, live and cached"


@_invariant
def only_findable_blocks_are_cached(allocator: BlockAllocator) -> Iterator[str]:
    pool = allocator.pool
    for block in pool.cached:
        if pool.index.copies(block) != [block]:
            yield f"cached block {block} is one of {pool.index.copies(block)} in the index"
    for block in pool.free:
        if pool.index.node_of[block] is not None:
            yield f"free block {block} still has its old hash"


@_invariant
def the_index_names_blocks_by_their_content(allocator: BlockAllocator) -> Iterator[str]:
    index = allocator.pool.index
    depth: dict[int, int] = {}
    for digest, node in index.nodes.items():
        if any(index.node_of[block] is not node for block in node.blocks) or not node.blocks:
            yield f"node {digest.hex()[:8]} names blocks {node.blocks}, which do not name it"
        name = prefix.block_digest(
            prefix.root_digest(node.context) if node.parent is None else node.parent.digest, node.tokens
        )
        if name != digest or node.digest != digest or len(node.tokens) != allocator.block_size * TOKEN_BYTES:
            yield f"node {digest.hex()[:8]} is not the hash of its parent, tokens and context"
        parent = node.parent
        if parent is not None and (index.nodes.get(parent.digest) is not parent or node not in parent.children):
            yield f"node {digest.hex()[:8]} stands behind one that was forgotten"
        depth.update((block, _depth(node)) for block in node.blocks)
    for seq_id, sequence in allocator.sequences.items():
        for position, block in enumerate(sequence.blocks):
            named = index.node_of[block]
            if named is None:
                continue
            start = position * allocator.block_size
            view = sequence.tokens[start : start + allocator.block_size].tobytes()
            if index.nodes.get(named.digest) is not named or not named.tokens.startswith(view):
                yield f"block {block} of {seq_id!r} is named for other tokens than it holds"
            elif depth[block] != position or named.context != sequence.context:
                yield f"block {block} of {seq_id!r} is named for another position or context"


@_invariant
def shared_blocks_hold_the_same_tokens(allocator: BlockAllocator) -> Iterator[str]:
    size = allocator.block_size
    first: dict[int, tuple[int, bytes, bytes]] = {}  # block -> position, name of all before it, longest view
    for seq_id, sequence in allocator.sequences.items():
        name = prefix.root_digest(sequence.context)
        for position, block in enumerate(sequence.blocks):
            view = sequence.tokens[position * size : (position + 1) * size].tobytes()
            where, before, longest = first.get(block, (position, name, view))
            shorter, longer = sorted((view, longest), key=len)
            if (where, before) != (position, name) or not longer.startswith(shorter):
                yield f"block {block} of {seq_id!r} is shared with a sequence that has other tokens there"
            first[block] = (where, before, longer)
            name = prefix.block_digest(name, view)


@_invariant
def eviction_takes_the_deepest_first(allocator: BlockAllocator) -> Iterator[str]:
    index, refs = allocator.pool.index, allocator.pool.refs
    order = {block: place for place, block in enumerate(allocator.pool.cached)}
    for block, place in order.items():
        node = index.node_of[block]
        if node is None or node.parent is None:
            continue
        if not any(refs[b] or order.get(b, -1) > place for b in node.parent.blocks):
            yield f"cached block {block} would outlive its parent {node.parent.blocks}"
    for node in index.nodes.values():
        is_live, parent = any(refs[b] for b in node.blocks), node.parent
        if is_live and parent is not None and not any(refs[b] for b in parent.blocks):
            yield f"live block {node.blocks} stands behind {parent.blocks}, which can be evicted"


@_invariant
def sums_of_slots_agree(allocator: BlockAllocator) -> Iterator[str]:
    stats, size = allocator.stats(), allocator.block_size
    used: dict[int, int] = {}
    for sequence in allocator.sequences.values():
        for position, block in enumerate(sequence.blocks):
            used[block] = max(used.get(block, 0), min(size, len(sequence.tokens) - position * size))
    if (stats.used_blocks, stats.allocated_slots) != (len(used), len(used) * size):
        yield f"{stats.used_blocks} blocks and {stats.allocated_slots} slots are said to be used, not {len(used)}"
    if stats.free_blocks + stats.used_blocks + stats.cached_blocks != allocator.num_blocks:
        yield f"free, used and cached blocks are not {allocator.num_blocks} in {stats}"
    if (stats.used_slots, stats.wasted_slots) != (sum(used.values()), len(used) * size - sum(used.values())):
        yield f"{stats.used_slots} slots used and {stats.wasted_slots} wasted are not {sum(used.values())} used"


def _depth(node: Node) -> int:
    depth = 0
    while node.parent is not None:
        node = node.parent
        depth += 1
    return depth
