"""Context parallelism, one rank's part of a step: which of its tokens each query sees, as calls of the operator.

The operator has a query stand at the end of its keys, but a rank's keys have gaps. A query at position p sees those of
the rank's tokens that are not behind p: its first n(p) ones, which is all that matters without a window. While p runs
through the rank's own tokens n(p) grows with p, and the queries are causal as ever; while it runs through another
rank's, n(p) stands still, and they all see n(p) tokens. So a sequence's queries fall into runs of the two kinds, every
query in one of them, and one call serves all runs of a kind. With a window the first token seen moves too, in steps:
each query becomes a sequence of its own, whose table starts at the first block it sees, and a mask function leaves
out the tokens before the first one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagegen.integrations.block_spread import BlockSpread
from pagegen.ops.checks import describe
from pagegen.spec import check

_Run = tuple[int, int, int, int]  # sequence, its first row of q, queries, tokens that the last of them sees


@dataclass(frozen=True, kw_only=True)
class Part:
    """One call of the operator: `rows` of the share's queries (None: all) over this rank's blocks. `first` int32
    [num_seqs] is the first key that a sequence's queries see, where a window begins inside a block."""

    rows: Tensor | None
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    causal: bool
    max_query_len: int
    max_seq_len: int
    first: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of one step, the same for all layers that have its `causal` and `window`. Rows of q from
    `num_queries` on belong to no sequence."""

    spread: BlockSpread
    rank: int
    num_queries: int
    parts: tuple[Part, ...]


def share_of(
    spread: BlockSpread,
    rank: int,
    block_table: Tensor,
    seq_lens: Tensor | Sequence[int],
    *,
    query_lens: Sequence[int] | None = None,
    causal: bool = True,
    window: int | None = None,
    max_seq_len: int | None = None,
) -> Share:
    """What `rank` does in a step over sequences of `seq_lens` tokens, this step's included, on whatever rank they lie.

    `block_table` int32 [num_seqs, max_blocks] lists this rank's own blocks of each sequence in order. One query a
    sequence when `query_lens` is None: then nothing waits for the device, lengths may be a tensor there, and
    `max_seq_len` bounds them for the host. Otherwise both are host integers, as a scheduler has them. Raises TypeError
    or ValueError naming the argument.
    """
    check.instance("spread", spread, BlockSpread)
    spread.check_rank(rank)
    _check(block_table, seq_lens, causal, window)
    if query_lens is None:
        part = _decode(spread, rank, block_table, seq_lens, window, max_seq_len)
        return Share(spread=spread, rank=rank, num_queries=len(block_table), parts=(part,))
    if max_seq_len is not None:
        raise ValueError(f"max_seq_len must be None where query_lens are given (lengths are known), got {max_seq_len}")
    lengths, queries = _hosted(spread, rank, block_table, seq_lens, query_lens)
    if window is not None and window < max(lengths, default=0):
        parts = [_by_query(spread, rank, block_table, lengths, queries, window)]
    else:
        growing, still = _runs(spread, rank, lengths, queries, causal)
        parts = [_ragged(block_table, runs, sum(queries), causal=runs is growing) for runs in (growing, still)]
    kept = tuple(part for part in parts if len(part.seq_lens))
    return Share(spread=spread, rank=rank, num_queries=sum(queries), parts=kept)


def _check(block_table: Tensor, seq_lens: Tensor | Sequence[int], causal: bool, window: int | None) -> None:
    if not isinstance(block_table, Tensor) or block_table.dim() != 2 or block_table.dtype != torch.int32:
        raise ValueError(f"block_table must be int32 [num_seqs, max_blocks], got {describe(block_table)}")
    if len(seq_lens) != len(block_table):
        raise ValueError(f"seq_lens must have an entry a row of block_table, {len(block_table)}, got {len(seq_lens)}")
    if window is not None:
        check.integer("window", window)
        if not causal:
            raise ValueError(f"window must be None where causal is False and blocks lie on several ranks, got {window}")


def _hosted(
    spread: BlockSpread,
    rank: int,
    block_table: Tensor,
    seq_lens: Tensor | Sequence[int],
    query_lens: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Lengths and query counts as integers that fit each other and the table."""
    if isinstance(seq_lens, Tensor):
        if seq_lens.device.type != "cpu":
            raise ValueError(f"seq_lens must be on the host where query_lens are given, got {describe(seq_lens)}")
        seq_lens = seq_lens.tolist()
    lengths = list(check.integers("seq_lens", seq_lens, at_least=0))
    queries = list(check.integers("query_lens", query_lens, at_least=0))
    if len(queries) != len(lengths):
        raise ValueError(f"query_lens must have an entry a sequence, {len(lengths)}, got {len(queries)}")
    for s, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        if count > length:
            raise ValueError(f"query_lens[{s}] must be in 0..{length}, got {count}")
    _check_room(spread, rank, block_table, lengths)
    return lengths, queries


def _check_room(spread: BlockSpread, rank: int, block_table: Tensor, lengths: Sequence[int]) -> None:
    room = block_table.shape[1] * spread.block_size
    for s, length in enumerate(lengths):
        held = spread.held(rank, length)
        if held > room:
            raise ValueError(
                f"block_table must have {-(-held // spread.block_size)} columns for the {held} tokens of sequence {s} "
                f"on rank {rank}, got {block_table.shape[1]}"
            )


def _decode(
    spread: BlockSpread,
    rank: int,
    block_table: Tensor,
    seq_lens: Tensor | Sequence[int],
    window: int | None,
    max_seq_len: int | None,
) -> Part:
    """One query a sequence, at its end."""
    longest = None if max_seq_len is None else check.integer("max_seq_len", max_seq_len, at_least=0)
    if not isinstance(seq_lens, Tensor):
        longest = max(check.integers("seq_lens", seq_lens, at_least=0), default=0)
        _check_room(spread, rank, block_table, seq_lens)
        seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=block_table.device)
    room = block_table.shape[1] * spread.block_size
    most = room if longest is None else min(spread.held(rank, longest), room)
    if window is not None and (longest is None or window < longest):
        return _windowed(spread, rank, block_table, seq_lens - 1, window, most)
    return Part(
        rows=None, block_table=block_table, seq_lens=spread.held(rank, seq_lens).int(), query_start_loc=None,
        causal=True, max_query_len=1, max_seq_len=most,
    )  # fmt: skip


def _by_query(
    spread: BlockSpread, rank: int, block_table: Tensor, lengths: list[int], queries: list[int], window: int
) -> Part:
    """Every query as a sequence of its own."""
    device = block_table.device
    counts = torch.tensor(queries, device=device)
    of_query = torch.repeat_interleave(torch.arange(len(queries), device=device), counts, output_size=sum(queries))
    # row r of q belongs to the sequence that ends at row ends[s], and stands that far from its end
    ends = counts.cumsum(0)[of_query]
    rows = torch.arange(sum(queries), device=device)
    positions = torch.tensor(lengths, device=device)[of_query] - (ends - rows)
    most = max((spread.held(rank, n) for n in lengths), default=0)
    return _windowed(spread, rank, block_table[of_query], positions, window, most)


def _windowed(
    spread: BlockSpread,
    rank: int,
    block_table: Tensor,
    positions: Tensor,
    window: int,
    most: int,
) -> Part:
    """One query a row of the table, at `positions` [num_rows]: the rows begin with the first block that it sees."""
    size, width = spread.block_size, block_table.shape[1]
    seen = spread.held(rank, positions + 1)
    before = spread.held(rank, (positions - window + 1).clamp(min=0))
    skipped = before // size
    columns = min(width, -(-(window + size - 1) // size))  # a window that begins at the end of its first block
    places = skipped[:, None] + torch.arange(columns, device=block_table.device)
    return Part(
        rows=None,
        block_table=block_table.gather(1, places.clamp(max=max(width - 1, 0)).long()),
        seq_lens=torch.where(seen > before, seen - skipped * size, 0).int(),
        query_start_loc=None,
        causal=True,
        max_query_len=1,
        max_seq_len=min(most, columns * size),
        first=(before - skipped * size).int(),
    )


def _runs(
    spread: BlockSpread, rank: int, lengths: list[int], queries: list[int], causal: bool
) -> tuple[list[_Run], list[_Run]]:
    """The runs of queries in which the tokens seen grow with each query, and those in which they stay; queries that see
    nothing are in none."""
    growing: list[_Run] = []
    still: list[_Run] = []
    row = 0
    for s, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        position = length - count
        while position < length:
            stripe = position // spread.stripe_tokens
            ahead = (rank - stripe) % spread.ranks  # stripes until the rank's own
            end = min(length, (stripe + max(ahead, 1)) * spread.stripe_tokens)
            if not causal or spread.ranks == 1:
                end = length
            run = (s, row, end - position, spread.held(rank, end))
            if causal and ahead == 0:
                growing.append(run)
            else:
                still.extend(_pieces(run))
            row += end - position
            position = end
    return growing, still


def _pieces(run: _Run) -> list[_Run]:
    """A run in which all queries see the same, in pieces of at most as many queries as tokens, which a call demands."""
    s, row, count, seen = run
    return [(s, row + i, min(seen, count - i), seen) for i in range(0, count, seen)] if seen else []


def _ragged(block_table: Tensor, runs: list[_Run], num_queries: int, *, causal: bool) -> Part:
    """One call for `runs`, each a sequence of its own."""
    device = block_table.device
    owners, firsts, counts, seen = ([run[i] for run in runs] for i in range(4))
    rows = [row for first, count in zip(firsts, counts, strict=True) for row in range(first, first + count)]
    starts = list(itertools.accumulate(counts, initial=0))
    return Part(
        rows=None if rows == list(range(num_queries)) else torch.tensor(rows, dtype=torch.int64, device=device),
        block_table=block_table[torch.tensor(owners, dtype=torch.int64, device=device)],
        seq_lens=torch.tensor(seen, dtype=torch.int32, device=device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        causal=causal,
        max_query_len=max(counts, default=0),
        max_seq_len=max(seen, default=0),
    )
