"""`Cascade`: a batch divided at the prefixes that its sequences share, made once a step for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagegen import settings
from pagegen.ops import checks
from pagegen.spec import check
from pagegen.spec.shared_prefix import PrefixGroups

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cascade:
    """A batch divided at its shared prefixes, for every layer of one step.

    Own pass: `block_table` int32 [num_seqs, own_blocks], `seq_lens` int32 [num_seqs], the prefixes left out, which are
    at least `least_shared` tokens. Prefix pass: `prefix_table` int32 [num_prefixes, shared_blocks], `prefix_lens` int32
    [num_prefixes], `prefix_starts` int32 [num_prefixes + 1] over its queries, which are the rows `rows` (int64) of q:
    from `first_row` on where they follow each other, otherwise None. `distance` float32 [num_rows]: a query's position
    in the prefix pass less its true one. The rest bounds both passes on the host.
    """

    block_size: int
    block_table: Tensor
    seq_lens: Tensor
    least_shared: int
    prefix_table: Tensor
    prefix_lens: Tensor
    prefix_starts: Tensor
    prefix_max_query_len: int
    prefix_max_seq_len: int
    rows: Tensor
    first_row: int | None
    num_queries: int
    distance: Tensor


def plan_cascade(
    prefix_groups: PrefixGroups,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    query_lens: Sequence[int] | None = None,
    least_saved_tokens: int = 0,
) -> Cascade | None:
    """Divides a batch at its shared prefixes, once a step; None where no two queries share one, or where that would
    save the reading of fewer than `least_saved_tokens` tokens (`pagegen.lowering.break_even_tokens` predicts how many
    pay for the second pass and the merge).

    `prefix_groups` are those of `PagedKVCache.batch`: (num_shared_blocks, rows), each row in one group at most and
    every query behind its group's blocks. `block_table` and `seq_lens` as in `paged_attention`; `query_lens` are the
    queries of each sequence, on the host (one each when omitted). Reads nothing from the device, but to check under
    PAGEGEN_CHECK=1 that rows of a group do have the same blocks. Raises TypeError or ValueError naming the argument.
    """
    checks.tables(block_table, seq_lens, None, None)
    check.integer("block_size", block_size)
    check.integer("least_saved_tokens", least_saved_tokens, at_least=0)
    num_seqs, max_blocks = block_table.shape
    counts = _query_lens(query_lens, num_seqs)
    groups = _groups(prefix_groups, num_seqs, max_blocks)
    if settings.check_values():
        _check_values(groups, block_table, seq_lens, block_size, counts)
    starts = np.concatenate([[0], counts.cumsum()])
    groups = [(blocks, rows) for blocks, rows in groups if np.count_nonzero(counts[rows]) > 1]
    saved = sum(blocks * (np.count_nonzero(counts[rows]) - 1) for blocks, rows in groups) * block_size
    if not groups or saved < least_saved_tokens:
        return None
    parts = [part for blocks, rows in groups for part in _parts(blocks, rows, block_size, counts, starts)]
    shared = np.zeros(num_seqs, dtype=np.int64)
    for blocks, rows in groups:
        shared[rows] = blocks
    lens = np.array([len(part.rows) for part in parts])
    rows = np.concatenate([part.rows for part in parts])
    blocks_of, members, of_row, moved, ends, shift, places = _send(
        seq_lens.device,
        np.array([part.blocks for part in parts]),
        np.array([part.member for part in parts]),
        np.concatenate([part.sequences for part in parts]),
        np.concatenate([part.moved for part in parts]),
        np.concatenate([[0], lens.cumsum()]),
        shared,
        rows,
    )
    widest = max(part.blocks for part in parts)
    return Cascade(
        block_size=block_size,
        block_table=_own_table(block_table, shared, shift),
        seq_lens=(seq_lens - shift * block_size).int(),
        least_shared=int(shared.min()) * block_size,
        prefix_table=block_table.index_select(0, members)[:, :widest],
        prefix_lens=(blocks_of * block_size).int(),
        prefix_starts=ends.int(),
        prefix_max_query_len=int(lens.max()),
        prefix_max_seq_len=widest * block_size,
        rows=places,
        first_row=int(rows[0]) if bool((np.diff(rows) == 1).all()) else None,
        num_queries=int(starts[-1]),
        distance=(moved - seq_lens.index_select(0, of_row)).float(),
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One sequence of the prefix pass: `blocks` leading blocks of sequence `member`, met by the queries at `rows`, of
    `sequences`. A query's position in the pass less its true one is `moved` less its sequence's length."""

    blocks: int
    member: int
    rows: Ints
    sequences: Ints
    moved: Ints


def _parts(blocks: int, members: Ints, block_size: int, counts: Ints, starts: Ints) -> list[_Part]:
    """The queries of one group, in as few parts as hold no more queries than keys: no sequence may have more."""
    sequences = np.repeat(members, counts[members])
    firsts = np.concatenate([[0], counts[members].cumsum()[:-1]])
    within = np.arange(len(sequences)) - np.repeat(firsts, counts[members])
    length = blocks * block_size
    found = []
    for chosen in np.array_split(np.arange(len(sequences)), -(-len(sequences) // length)):
        own, index = sequences[chosen], within[chosen]
        place = length - len(chosen) + np.arange(len(chosen))
        found.append(
            _Part(
                blocks=blocks, member=int(members[0]), rows=starts[own] + index, sequences=own,
                moved=place + counts[own] - index,
            )
        )  # fmt: skip
    return found


def _own_table(block_table: Tensor, shared: Ints, shift: Tensor) -> Tensor:
    """Each row from its first own block on: a view where all rows share as many. Never empty; a row whose prefix is
    all it has is not read."""
    last = block_table.shape[1] - 1
    low = min(int(shared.min()), last)
    if low == int(shared.max()) or not last:
        return block_table[:, low:]
    columns = torch.arange(last + 1 - low, device=block_table.device) + shift[:, None]
    return block_table.gather(1, columns.clamp(max=last))


def _send(device: torch.device, *arrays: Ints) -> list[Tensor]:
    """int64 arrays on the device, in one transfer. From pinned memory, since any other makes the host wait."""
    packed = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        packed = packed.pin_memory()
    return list(packed.to(device, non_blocking=True).split([len(array) for array in arrays]))


def _query_lens(query_lens: Sequence[int] | None, num_seqs: int) -> Ints:
    if query_lens is None:
        return np.ones(num_seqs, dtype=np.int64)
    counts = np.array(check.integers("query_lens", query_lens, at_least=0), dtype=np.int64)
    if len(counts) != num_seqs:
        raise ValueError(f"query_lens must have one entry a sequence ({num_seqs}), got {len(counts)}")
    return counts


def _pairs(prefix_groups: Any) -> list[tuple[Any, Any]]:
    try:
        return [(blocks, rows) for blocks, rows in prefix_groups]
    except (TypeError, ValueError):
        raise TypeError(f"prefix_groups must hold (num_shared_blocks, rows) pairs, got {prefix_groups!r}") from None


def _groups(prefix_groups: PrefixGroups, num_seqs: int, max_blocks: int) -> list[tuple[int, Ints]]:
    """The groups with their rows in order. Raises ValueError for rows that are not there or stand in two groups."""
    found, seen = [], set()
    for blocks, rows in _pairs(prefix_groups):
        check.integer("prefix_groups", blocks)
        if blocks > max_blocks:
            raise ValueError(f"prefix_groups must share at most max_blocks {max_blocks} blocks, got {blocks}")
        for row in check.integers("prefix_groups", rows, at_least=0):
            if row >= num_seqs or row in seen:
                raise ValueError(f"prefix_groups must name rows in 0..{num_seqs - 1}, each once, got row {row}")
            seen.add(row)
        found.append((blocks, np.array(sorted(rows), dtype=np.int64)))
    return found


def _check_values(
    groups: list[tuple[int, Ints]], block_table: Tensor, seq_lens: Tensor, block_size: int, counts: Ints
) -> None:
    """Reads the device: rows of a group have the same leading blocks, and no query among them."""
    table, lengths = block_table.cpu().numpy(), seq_lens.cpu().numpy()
    for blocks, rows in groups:
        for row in rows:
            behind = int(lengths[row] - counts[row])
            if (table[row, :blocks] != table[rows[0], :blocks]).any():
                raise ValueError(
                    f"prefix_groups must name rows with the same {blocks} blocks, got rows {rows[0]} and {row}"
                )
            if behind < blocks * block_size:
                raise ValueError(
                    f"prefix_groups must share tokens before every query of row {row} ({behind}), "
                    f"got {blocks} blocks of {block_size}"
                )
