"""torch's scaled_dot_product_attention over contiguous keys and values: what attention costs without a block table.

In decode the query heads of a group are rows of one matrix, which is eight times faster here than `enable_gqa`; for
longer queries K and V are repeated for each query head beforehand, outside the time taken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cpu_peers.cell import Cell, Given, Prepared, causal, dense, queries


def version() -> str:
    return torch.__version__


def prepare(cell: Cell, sets: int, content: Given | None) -> Prepared:
    k, v = dense(cell, sets, content, cell.torch_dtype)
    attend, out = attention(cell, queries(cell, content))
    if cell.new > 1:
        k, v = (t.repeat_interleave(cell.group, dim=2) for t in (k, v))

    def run(i: int) -> None:
        attend(k[i % sets], v[i % sets])

    return Prepared(run, out, "group folded" if cell.new == 1 else "heads repeated beforehand")


def attention(cell: Cell, q: Tensor) -> tuple[Callable[[Tensor, Tensor], None], Callable[[], Tensor]]:
    """(a function of K and V [batch, heads, context, D], one that gives the last result [batch, new, Hq, D]), of
    queries of that shape."""
    kept: list[Tensor] = []
    square = 1 < cell.new == cell.context  # SDPA's own causal mask begins at the first key
    mask = None if square or cell.new == 1 else causal(cell)
    if cell.new == 1:
        rows = q.view(cell.batch, cell.num_kv_heads, cell.group, cell.head_dim)
    else:
        rows = q.transpose(1, 2).contiguous()

    def attend(k: Tensor, v: Tensor) -> None:
        kept[:] = [scaled_dot_product_attention(rows, k, v, mask, is_causal=square)]

    def out() -> Tensor:
        result = kept[0]
        return result.reshape(cell.batch, 1, cell.num_q_heads, -1) if cell.new == 1 else result.transpose(1, 2)

    return attend, out
