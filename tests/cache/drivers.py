"""The caches under test, driven as users would: the bookkeeping over slots in lists, or the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from naive_content import POISON, Slots

from pagegen.cache import BatchBuffers, BlockAllocator, GroupedAllocator, GroupedKVCache, PagedKVCache
from pagegen.spec import CacheLayout

LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """One group's sizes."""

    num_blocks: int
    block_size: int
    window: int | None
    num_host_blocks: int
    watermark: int
    prefix_caching: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"watermark": self.watermark, "window": self.window, "num_host_blocks": self.num_host_blocks}


class Books:
    """`BlockAllocator`, or `GroupedAllocator` where there are several groups. The pairs that a call returns are copied
    at once, as its documentation asks."""

    def __init__(self, shapes: list[Shape]) -> None:
        self.books = [BlockAllocator(s.num_blocks, s.block_size, s.prefix_caching, **s.options) for s in shapes]
        self.contents = [Slots(s.num_blocks, s.num_host_blocks, s.block_size) for s in shapes]
        self.cache: Any = self.books[0] if len(shapes) == 1 else GroupedAllocator(self.books)

    def each(self, value: Any) -> list[Any]:
        """What a call returns, one entry a group."""
        return [value] if len(self.books) == 1 else value

    def append(self, seq_id, tokens):
        self._copy(self.cache.append(seq_id, tokens))

    def append_each(self, ids, tokens):
        self._copy(self.cache.append_each(ids, tokens))

    def announce(self, model, ids, starts, ends):
        """Announces the step that computes `ids` up to `ends`; returns the slots that it writes, a list a group."""
        if len(ids) == 1:
            self._copy(self.cache.mark_computed(ids[0], ends[0]))
        else:
            self._copy(self.cache.mark_all_computed(ids, ends))
        spans = [(seq_id, start, end) for seq_id, start, end in zip(ids, starts, ends, strict=True)]
        return [
            [books.block_ids(seq_id)[p // books.block_size] * books.block_size + p % books.block_size
             for seq_id, start, end in spans for p in range(start, end)]
            for books in self.books
        ]  # fmt: skip

    def swap_out(self, seq_id):
        for contents, pairs in zip(self.contents, self.each(self.cache.swap_out(seq_id)), strict=True):
            contents.to_host(pairs)

    def swap_in(self, seq_id):
        for contents, pairs in zip(self.contents, self.each(self.cache.swap_in(seq_id)), strict=True):
            contents.from_host(pairs)

    def _copy(self, pairs):
        for contents, of_group in zip(self.contents, self.each(pairs), strict=True):
            contents.copy(of_group)


class Stored:
    """The tensors of a `PagedKVCache`, with a number in each slot: keys hold it, values its negative, and every layer
    adds its own."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.size = cache.layout.block_size
        for layer in range(LAYERS):
            self._put(layer, slice(None), torch.tensor(float(POISON)))

    def write(self, slots, values):
        if slots:
            assert len(set(slots)) == len(slots)
            at = torch.tensor(slots) // self.size, torch.tensor(slots) % self.size
            for layer in range(LAYERS):
                self._put(layer, at, torch.tensor(values, dtype=torch.float32)[:, None, None])

    def read(self, blocks):
        if not blocks:
            return []
        found = [sign * each(layer)[blocks] - 1000 * layer for layer in range(LAYERS)
                 for each, sign in ((self.cache.k_cache, 1), (self.cache.v_cache, -1))]  # fmt: skip
        assert all(torch.equal(each, found[0]) for each in found), "keys, values and layers are of different tokens"
        return found[0].flatten().int().tolist()

    def _put(self, layer, at, values):
        self.cache.k_cache(layer)[at] = values + 1000 * layer
        self.cache.v_cache(layer)[at] = -values - 1000 * layer


class Tensors(Books):
    """`PagedKVCache`, or `GroupedKVCache`, driven through `batch`, by turns with tensors of its own and into buffers
    kept from step to step."""

    def __init__(self, shapes: list[Shape]) -> None:
        caches = [
            PagedKVCache(
                LAYERS, s.num_blocks, CacheLayout(block_size=s.block_size, order=("NHD", "HND")[i % 2]), 1, 1,
                dtype=torch.float32, prefix_caching=s.prefix_caching, **s.options,
            ) for i, s in enumerate(shapes)
        ]  # fmt: skip
        self.books = [cache.allocator for cache in caches]
        self.contents = [Stored(cache) for cache in caches]
        self.cache = caches[0] if len(shapes) == 1 else GroupedKVCache(caches)
        self.buffers = [BatchBuffers(12, 400, 64) for _ in shapes]
        self.steps = 0

    def append(self, seq_id, tokens):
        self.cache.append(seq_id, torch.tensor(tokens, dtype=torch.int32))

    def append_each(self, ids, tokens):
        self.cache.append_each(ids, tokens)

    def announce(self, model, ids, starts, ends):
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        self.steps += 1
        kept = self.steps % 3 > 0
        buffers = None if not kept else self.buffers[0] if len(self.books) == 1 else self.buffers
        batches = self.each(self.cache.batch(ids, query_lens=counts, buffers=buffers))
        queries = [(seq_id, p) for seq_id, a, b in zip(ids, starts, ends, strict=True) for p in range(a, b)]
        for books, batch, buffers in zip(self.books, batches, self.buffers, strict=True):
            if kept:
                self._check_behind(buffers, len(ids), len(queries))
            self._check(books, batch, ids, starts, ends, queries)
            assert batch.input_ids.tolist() == [model[seq_id].tokens[position] for seq_id, position in queries]
        return [batch.slot_mapping.tolist() for batch in batches]

    def swap_out(self, seq_id):
        self.cache.swap_out(seq_id)

    def swap_in(self, seq_id):
        self.cache.swap_in(seq_id)

    def _check_behind(self, buffers, num_seqs, total):
        """Behind the batch, kept buffers say that there is nothing to do."""
        table, lens, starts, slots, *_ = buffers.tensors
        assert len(table) == buffers.max_num_seqs and not lens[num_seqs:].any()
        assert bool((starts[num_seqs:] == total).all()) and bool((slots[total:] == -1).all())

    def _check(self, books, batch, ids, starts, ends, queries):
        size, tables = books.block_size, [books.block_ids(seq_id) for seq_id in ids]
        assert batch.positions.tolist() == [position for _, position in queries]
        assert (batch.seq_lens.tolist(), len(batch.query_lens)) == (list(ends), len(ids))
        assert batch.query_start_loc.diff().tolist() == list(batch.query_lens)
        for table, row in zip(tables, batch.block_table.tolist(), strict=True):
            wide = [*table, *[0] * len(row)][: len(row)]
            assert row == wide, f"the batch's block table has {row} for {table}"
        own = dict(zip(ids, tables, strict=True))
        assert batch.slot_mapping.tolist() == [own[i][p // size] * size + p % size for i, p in queries]
        for shared, rows in batch.prefix_groups:
            assert shared and len(rows) > 1 and len({tuple(tables[row][:shared]) for row in rows}) == 1
            assert all(starts[row] >= shared * size for row in rows)
