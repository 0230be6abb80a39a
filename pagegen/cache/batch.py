"""`Batch`: one step's kernel inputs, built from the sequences' states without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagegen.cache.sequence import SequenceState

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The inputs of one step; row i belongs to the i-th sequence asked for, queries are in the rows' order.

    `block_table` int32 [num_seqs, max_blocks] (0 past a row's blocks); `seq_lens` int32 [num_seqs], this step's tokens
    included; `query_start_loc` int32 [num_seqs + 1]; `slot_mapping`, `positions` and `input_ids` int64 [total_q]: where
    each query's key and value go, its position, its token id. `prefix_groups` lists (num_shared_blocks, rows) for rows
    whose first blocks are the same ones and were full and computed before this step: every query of those rows sees
    all of them. A row is in one group at most, and groups are chosen for the blocks they save. `query_lens`,
    `max_query_len` and `max_seq_len` are known on the host.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    slot_mapping: Tensor
    positions: Tensor
    input_ids: Tensor
    prefix_groups: tuple[tuple[int, tuple[int, ...]], ...]
    query_lens: tuple[int, ...]
    max_query_len: int
    max_seq_len: int


def build(
    states: Sequence[SequenceState], starts: Sequence[int], ends: Sequence[int], block_size: int, device: torch.device
) -> Batch:
    """The batch in which sequence i computes its tokens starts[i] up to ends[i]."""
    first, last = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
    query_lens = last - first
    query_start_loc = np.zeros(len(states) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_start_loc[1:])
    table = _block_table(states, -(-last // block_size))
    rows = np.repeat(np.arange(len(states)), query_lens)
    positions = np.arange(query_start_loc[-1]) + np.repeat(first - query_start_loc[:-1], query_lens)
    slots = table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    packed = b"".join([state.tokens[start:end] for state, start, end in zip(states, starts, ends, strict=True)])

    def on_device(values: npt.NDArray[np.integer], dtype: type[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(dtype, copy=False)).to(device)

    return Batch(
        block_table=on_device(table, np.int32),
        seq_lens=on_device(last, np.int32),
        query_start_loc=on_device(query_start_loc, np.int32),
        slot_mapping=on_device(slots, np.int64),
        positions=on_device(positions, np.int64),
        input_ids=on_device(np.frombuffer(packed, dtype=np.uintc), np.int64),
        prefix_groups=_prefix_groups(table, first // block_size),
        query_lens=tuple(query_lens.tolist()),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(last.max()),
    )


def _block_table(states: Sequence[SequenceState], counts: Ints) -> npt.NDArray[np.int32]:
    """int32 [num_seqs, max(counts)]: the first counts[i] blocks of each sequence, then zeros."""
    packed = b"".join([state.blocks[:count] for state, count in zip(states, counts.tolist(), strict=True)])
    table = np.zeros((len(states), max(1, int(counts.max()))), dtype=np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = np.frombuffer(packed, dtype=np.intc)
    return table


@dataclass
class _Subtree:
    """Rows that share a longer prefix than others do: the groups found among them, (num_shared_blocks, rows), what
    those save in blocks, and the rows in none of them."""

    rows: list[int]
    alone: list[int]
    saved: int = 0
    groups: list[tuple[int, list[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, shared: int, parts: list[_Subtree]) -> _Subtree:
        """The subtree of `parts` that all share `shared` blocks: one more group, of the parts and single rows that save
        more in it than among themselves, if it saves anything."""
        joined, apart = [], []
        for part in parts:
            whole = shared * len(part.rows) >= part.saved + shared * len(part.alone)
            joined += part.rows if whole else part.alone
            apart += [] if whole else [part]
        with_group = sum(part.saved for part in apart) + shared * (len(joined) - 1)
        rows = [row for part in parts for row in part.rows]
        if len(joined) > 1 and with_group >= sum(part.saved for part in parts):
            groups = [group for part in apart for group in part.groups]
            return cls(rows=rows, alone=[], saved=with_group, groups=[*groups, (shared, joined)])
        return cls(
            rows=rows, alone=[row for part in parts for row in part.alone],
            saved=sum(part.saved for part in parts), groups=[group for part in parts for group in part.groups],
        )  # fmt: skip


def _prefix_groups(table: npt.NDArray[np.int32], full_blocks: Ints) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Groups of rows with common leading blocks, each row in one at most, chosen so that attending each group's blocks
    once saves many: one system prompt under several documents does not hide what the rows of a document share. Block i
    of a row counts only if i < full_blocks[row]."""
    rows = np.flatnonzero(full_blocks)
    firsts = table[rows, 0].tolist()
    if len(set(firsts)) == len(firsts):
        return ()
    # in the order of their blocks, rows with a common prefix stand together, and those with a longer one within
    rows = np.array(sorted(rows.tolist(), key=lambda row: table[row, : full_blocks[row]].tobytes()))
    same = table[rows[:-1]] == table[rows[1:]]
    same &= np.arange(table.shape[1]) < np.minimum(full_blocks[rows[:-1]], full_blocks[rows[1:]])[:, None]
    common = np.where(same.all(axis=1), table.shape[1], same.argmin(axis=1)).tolist()  # of neighbours
    unfinished: list[tuple[int, list[_Subtree]]] = [(0, [])]
    for row, shared in zip(rows.tolist(), [*common, 0], strict=True):
        subtree = _Subtree(rows=[row], alone=[row])
        while unfinished[-1][0] > shared:
            depth, parts = unfinished.pop()
            subtree = _Subtree.of(depth, [*parts, subtree])
        if unfinished[-1][0] < shared:
            unfinished.append((shared, []))
        unfinished[-1][1].append(subtree)
    found = [(shared, tuple(sorted(group))) for part in unfinished[0][1] for shared, group in part.groups]
    return tuple(sorted(found, key=lambda group: group[1]))
