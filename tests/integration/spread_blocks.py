"""A batch as one rank of several has it: its own blocks, in order, and poison where other ranks' would be."""

from __future__ import annotations

import torch
from batches import Batch
from torch import Tensor

from pagegen.integrations.context_parallel import BlockSpread


def dealt(batch: Batch, spread: BlockSpread, rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(block table of the rank's own blocks, K, V); whatever lies on another rank is NaN here, and no table entry past
    a sequence's own blocks is a block."""
    size = spread.block_size
    own = [
        [int(batch.block_table[s, i]) for i in range(-(-length // size)) if spread.owner(i * size) == rank]
        for s, (length, _) in enumerate(batch.sequences)
    ]
    table = torch.full((len(own), max(map(len, own), default=0) + 1), 2**30, dtype=torch.int32)
    for s, ids in enumerate(own):
        table[s, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    foreign = torch.ones(len(batch.k_cache), dtype=torch.bool)
    foreign[[block for ids in own for block in ids]] = False
    caches = [None if cache is None else cache.clone() for cache in (batch.k_cache, batch.v_cache)]
    for cache in caches:
        if cache is not None:
            cache[foreign] = float("nan")
    k_cache, v_cache = caches
    assert k_cache is not None
    return table, k_cache, v_cache
