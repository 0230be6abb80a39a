"""Which block must hold what, be findable, or be evicted next: followed from outside, by reading block tables.

It states what must hold exactly, not only that nothing is wrong:

- a full block is findable from when its last token is announced, under the tokens up to there and the context, until
  it is written again, handed out again or abandoned. Of the findable copies of one content, those that nobody refers to
  go as soon as another will do;
- a block handed out is one that nobody refers to: a free one while there are any, then the findable one released
  longest ago (of one sequence, the last one first);
- what is neither referred to nor findable is free, and `stats` says just that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from naive_content import POISON, Naive

Model = dict[int, Naive]
Place = tuple[int, int]  # a sequence, and an index into its block table
Tables = dict[int, list[int]]
Starts = dict[int, int]


class NaiveGroup:
    """One group of blocks, `books` its allocator.

    `seen` are the block tables as last read and `released` how many leading entries the window took. `named` are the
    findable blocks with the name of their last token, `unused` those of them that nobody refers to, longest ago first;
    `before` has the name one block earlier for each name given. `stands[seq_id]` are the names that a sequence gave
    or found, and whether each is still known.
    """

    def __init__(self, books: Any) -> None:
        self.books = books
        self.size: int = books.block_size
        self.window: int | None = books.window
        self.seen: dict[int, list[int]] = {}
        self.released: dict[int, int] = {}
        self.named: dict[int, int] = {}
        self.unused: dict[int, None] = {}
        self.before: dict[int, int | None] = {}
        self.stands: dict[int, list[tuple[int, bool]]] = {}
        self.on_host: dict[int, int] = {}
        self.evictions = 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def first_seen(self, position: int) -> int:
        """The first block that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.size

    def refs(self) -> Counter[int]:
        return Counter(block for seq_id, table in self.seen.items() for block in table[self.released[seq_id] :])

    def available(self) -> int:
        return int(self.books.num_blocks) - len(self.refs())

    def end_name(self, naive: Naive, index: int) -> int:
        """The name of block `index` of a sequence: that of its last token."""
        return naive.names[(index + 1) * self.size - 1]

    # what can be found

    def can_start_at(self, naive: Naive, cached: int) -> bool:
        """Whether the first `cached` tokens (whole blocks) of a new sequence need not be computed."""
        if not self.books.prefix_caching:
            return not cached
        ends = naive.names[self.size - 1 : cached : self.size]
        there = set(self.named.values())
        return there.issuperset(ends[self.first_seen(cached) :]) and (
            self.window is None or {name for each in self._known() for name in self._path(each)}.issuperset(ends)
        )

    def revived(self, names: Iterable[int]) -> int:
        """How many of these findable contents are in no block that is referred to."""
        live = {name for block, name in self.named.items() if block not in self.unused}
        return sum(name not in live for name in names)

    def _known(self) -> set[int]:
        stood_on = {name for stands in self.stands.values() for name, known in stands if known}
        return stood_on.union(self.named.values())

    def _path(self, name: int | None) -> Iterator[int]:
        while name is not None:
            yield name
            name = self.before[name]

    # what an operation did

    def take(self, tables: Tables, starts: Starts, found: Collection[Place] = ()) -> list[Place]:
        """Reads the tables of the sequences that an operation moved, in its order; the window has taken the first
        `starts` entries, and `found` are places that may be shared. Returns the places that got fresh blocks, having
        checked which blocks those are."""
        refs, unused = self.refs(), list(self.unused)
        fresh = []
        for seq_id, table in tables.items():
            old, start = self.seen.get(seq_id, []), starts[seq_id]
            assert table[:start] == [0] * start
            for index, block in enumerate(table[start:], start):
                if old[index : index + 1] == [block]:
                    continue
                if (seq_id, index) in found:
                    self.unused.pop(block, None)
                else:
                    fresh.append((seq_id, index, block))
        blocks = [block for *_, block in fresh]
        assert len(set(blocks)) == len(blocks) and refs.keys().isdisjoint(blocks), f"{blocks} are not all free"
        free = int(self.books.num_blocks) - len(refs) - len(unused)
        evicted = {block for block in blocks if block in self.unused}
        assert len(evicted) == max(0, len(blocks) - free), f"{evicted} evicted for {len(blocks)} blocks, {free} free"
        assert evicted == set(list(self.unused)[: len(evicted)]), f"{evicted} are not the oldest of {unused}"
        self.evictions += len(evicted)
        for block in blocks:
            self.rewrite(block)
        return [(seq_id, index) for seq_id, index, _ in fresh]

    def rewrite(self, block: int) -> None:
        """The content of `block` is about to change."""
        self.named.pop(block, None)
        self.unused.pop(block, None)

    def let_go(self, moved: Iterable[int], tables: Tables, starts: Starts) -> None:
        """Keeps the tables as they are now; what nobody refers to any more is released, of a sequence the last first.
        A sequence that has no table any more is gone, or swapped out."""
        old = {seq_id: self.seen.pop(seq_id, [])[self.released.get(seq_id, 0) :] for seq_id in moved}
        for seq_id in old:
            if seq_id in tables:
                self.seen[seq_id], self.released[seq_id] = tables[seq_id], starts[seq_id]
        held = Counter(block for blocks in old.values() for block in blocks)
        kept = self.refs()
        for blocks in old.values():
            for block in reversed(blocks):
                held[block] -= 1
                if not held[block] and not kept[block]:
                    self._release(block)

    def _release(self, block: int) -> None:
        if block not in self.named:
            return
        if list(self.named.values()).count(self.named[block]) > 1:
            del self.named[block]
        else:
            self.unused[block] = None

    def name(self, seq_id: int, naive: Naive, table: list[int]) -> None:
        """The full computed blocks of a sequence become findable."""
        stands = self.stands[seq_id]
        while self.books.prefix_caching and len(stands) < naive.computed // self.size:
            if stands and not stands[-1][1]:
                return
            index = len(stands)
            name = self.end_name(naive, index)
            self.before[name] = stands[-1][0] if stands else None
            stands.append((name, True))
            self.name_block(table[index], name)

    def name_block(self, block: int, name: int) -> None:
        self.named[block] = name
        for spare in [other for other in self.unused if self.named[other] == name]:
            self.rewrite(spare)

    def forget(self, model: Model, contents: Any) -> None:
        """After a failed step: which names go besides those of what it was to write, and who may give new ones, is left
        to the books. What can still be found must have been written."""
        index = self.books.pool.index
        self.named = {b: contents.read([b])[-1] for b, node in enumerate(index.node_of) if node}
        assert POISON not in self.named.values(), f"blocks that were never written can be found: {self.named}"
        self.unused = {block: None for block in self.unused if block in self.named}
        for seq_id, naive in model.items():
            nodes, node = [], self.books.table.nodes.item(self.books.sequences[seq_id].row)
            for _ in range(self.books.sequence(seq_id).indexed):
                nodes.append(node)
                node = index.parent(node)
            ends = naive.names[self.size - 1 :: self.size]
            self.stands[seq_id] = [
                (name, index.is_known(node)) for name, node in zip(ends, reversed(nodes), strict=False)
            ]

    # what must be so between operations

    def check(self, model: Model, contents: Any) -> None:
        """Every sequence reads its own computed tokens from its blocks, and the numbers are right."""
        refs, wasted, size = self.refs(), 0, self.size
        used: dict[int, int] = {}
        for seq_id, table in self.seen.items():
            naive, start = model[seq_id], self.released[seq_id]
            length = len(naive.tokens)
            assert len(table) == self.blocks_for(length)
            values = contents.read(table[start:])[: naive.computed - start * size]
            assert values == naive.names[start * size : naive.computed], f"{seq_id} reads what it did not write"
            for index, block in enumerate(table[start:], start):
                used[block] = max(used.get(block, 0), min(size, length - index * size))
        wasted = sum(size - most for most in used.values())
        live, cached, stats = len(refs), len(self.unused), self.books.stats()
        assert (stats.used_blocks, stats.cached_blocks) == (live, cached), f"not {live} used, {cached} cached: {stats}"
        assert stats.free_blocks == self.books.num_blocks - live - cached
        assert stats.shared_blocks == sum(count > 1 for count in refs.values())
        assert (stats.used_slots, stats.wasted_slots) == (live * size - wasted, wasted)
        assert (stats.num_sequences, stats.num_swapped) == (len(model), len(self.on_host))
        assert stats.free_host_blocks == self.books.num_host_blocks - sum(self.on_host.values())
