"""What one writes without a paged kernel: collect each sequence's blocks into memory kept for it, then SDPA."""

from __future__ import annotations

import torch

from cpu_peers.cell import Cell, Given, Prepared, Unsupported, memory, paged, queries, tables
from cpu_peers.sdpa import attention


def version() -> str:
    return torch.__version__


def prepare(cell: Cell, sets: int, content: Given | None) -> Prepared:
    if cell.new > 1:
        raise Unsupported("measured for decode")
    table = tables(cell, sets, cell.block_size)
    shape = (table.numel(), cell.block_size, cell.num_kv_heads, cell.head_dim)
    if content is None:
        k, v = memory(shape, cell.torch_dtype), memory(shape, cell.torch_dtype)
    else:
        k, v = paged(cell, content, table[0], cell.block_size)
    index = [t.flatten().long() for t in table]
    gathered = [memory((table[0].numel(), *shape[1:]), cell.torch_dtype) for _ in range(2)]
    views = [
        g.view(cell.batch, -1, cell.num_kv_heads, cell.head_dim)[:, : cell.context].transpose(1, 2) for g in gathered
    ]
    attend, out = attention(cell, queries(cell, content))

    def run(i: int) -> None:
        for pool, to in zip((k, v), gathered, strict=True):
            torch.index_select(pool, 0, index[i % sets], out=to)
        attend(*views)

    return Prepared(run, out)
