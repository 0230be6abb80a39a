"""`Batch`: one step's kernel inputs, found without a loop over tokens or, for decode, over sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagegen.cache.allocator import BlockAllocator
from pagegen.cache.arrays import Ints
from pagegen.cache.sharing import PrefixGroups
from pagegen.cache.table import Appended, spread


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The inputs of one step; row i belongs to the i-th sequence asked for, queries are in the rows' order.

    `block_table` int32 [num_seqs, max_blocks] (0 past a row's blocks); `seq_lens` int32 [num_seqs], this step's tokens
    included; `query_start_loc` int32 [num_seqs + 1]; `slot_mapping`, `positions` and `input_ids` int64 [total_q]: where
    each query's key and value go, its position, its token id. `prefix_groups` lists (num_shared_blocks, rows) for rows
    whose first blocks are the same ones and were full and computed before this step: every query of those rows sees
    all of them (with a window, none are listed). A row is in one group at most, and groups are chosen for the blocks
    they save. `query_lens`, `max_query_len` and `max_seq_len` are known on the host.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    slot_mapping: Tensor
    positions: Tensor
    input_ids: Tensor
    prefix_groups: PrefixGroups
    query_lens: tuple[int, ...]
    max_query_len: int
    max_seq_len: int


class Asked(NamedTuple):
    """A batch to be made: table row `rows[i]` computes `counts[i]` tokens, starts[i] up to ends[i], `total` of all
    rows; `max_query_len` is the largest count, `max_seq_len` the largest end."""

    rows: Ints
    starts: Ints
    ends: Ints
    counts: Ints
    total: int
    max_query_len: int
    max_seq_len: int

    @property
    def is_decode(self) -> bool:
        """Whether every row has one query."""
        return self.max_query_len == 1 and self.total == len(self.rows)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """`counts` as plain integers."""
        return (1,) * self.total if self.is_decode else tuple(self.counts.tolist())


class Queries(NamedTuple):
    """Of each query the position, the slot and the token; and what was `appended` last, if that is all of them."""

    positions: Ints
    slots: Ints
    tokens: Ints
    appended: Appended | None


def find_queries(allocator: BlockAllocator, asked: Asked) -> Queries:
    """The queries of a batch, in the rows' order."""
    rows, starts, counts = asked.rows, asked.starts, asked.counts
    table, size = allocator.table, allocator.block_size
    if not asked.is_decode:
        owners, positions = spread(rows, starts, counts)
    elif table.appended is not None and table.appended.describes(table, rows, starts):
        return Queries(starts, table.appended.slots, table.appended.tokens, table.appended)
    else:
        owners, positions = rows, starts
    slots = table.blocks[owners, positions // size].astype(np.int64) * size + positions % size
    return Queries(positions, slots, allocator.pool.slots.take(slots).astype(np.int64), None)


def fresh_batch(allocator: BlockAllocator, asked: Asked, prefix_groups: PrefixGroups, device: torch.device) -> Batch:
    """The batch that was asked for, in tensors of its own."""
    queries = find_queries(allocator, asked)
    query_start_loc = np.zeros(len(asked.rows) + 1, dtype=np.int32)
    query_start_loc[1:] = asked.counts.cumsum()
    width = max(1, allocator.table.blocks_for(asked.max_seq_len))
    arrays = (
        allocator.table.blocks[asked.rows, :width], asked.ends.astype(np.int32), query_start_loc,
        queries.slots, queries.positions, queries.tokens,
    )  # fmt: skip
    return batch_of(asked, prefix_groups, [torch.from_numpy(array).to(device) for array in arrays])


def batch_of(asked: Asked, prefix_groups: PrefixGroups, tensors: Sequence[Tensor]) -> Batch:
    """A batch of its six tensors, in the order of its fields."""
    block_table, seq_lens, query_start_loc, slot_mapping, positions, input_ids = tensors
    return Batch(
        block_table=block_table, seq_lens=seq_lens, query_start_loc=query_start_loc,
        slot_mapping=slot_mapping, positions=positions, input_ids=input_ids,
        prefix_groups=prefix_groups, query_lens=asked.query_lens,
        max_query_len=asked.max_query_len, max_seq_len=asked.max_seq_len,
    )  # fmt: skip
