"""`AttentionCall`: one validated call, as every kernel receives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class AttentionCall:
    """The operands of one `paged_attention` call. Shapes as in `pagegen.paged_attention`; every tensor's last
    stride is 1, other strides are free. `query_start_loc` is None for decode (one query a sequence).
    `max_query_len` and `max_seq_len` are upper bounds known to the host. `out` [total_q, Hq, Dv] arrives
    uninitialised for decode and zeroed otherwise; `lse` float32 [total_q, Hq] likewise (-inf), or None."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    max_query_len: int
    max_seq_len: int
    scale: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    out: Tensor
    lse: Tensor | None


AttentionKernel = Callable[[AttentionCall], None]
