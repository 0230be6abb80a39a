"""`AttentionCall`: one validated call, as every kernel receives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pagegen.spec import AttentionSpec
from pagegen.spec.dtypes import INT4


@dataclass(slots=True)
class AttentionCall:
    """The operands of one `paged_attention` call. Shapes as in `pagegen.paged_attention`; every tensor's last
    stride is 1, other strides are free. `query_start_loc` is None for decode (one query a sequence).
    `max_query_len` and `max_seq_len` are upper bounds known to the host. `out` [total_q, Hq, Dv] arrives
    uninitialised for decode and zeroed otherwise; `lse` float32 [total_q, Hq] likewise (-inf), or None.

    A quantised cache has its meaning as dtype (float8_*, int8), or is uint8 where it packs int4. Scales and zero points
    are float32 [num_blocks, block_size, Hkv] whatever their granularity (0 strides where they repeat), each there or
    not as the spec says; values are (stored - zero) * scale. With `shared_kv`, `v_cache` is the first Dv columns of
    `k_cache` (packed int4: the whole of it). `tree_mask` bool [total_q, max_query_len]. `captures` are the tensors that
    the score function and then the mask function captured, in the order in which they were traced.

    The operator makes one by position (by name takes 0.5 us more): the order of the fields is part of its meaning."""

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
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_zero: Tensor | None = None
    v_zero: Tensor | None = None
    tree_mask: Tensor | None = None
    captures: tuple[Tensor, ...] = ()


def values_in_keys(k_cache: Tensor, spec: AttentionSpec) -> Tensor:
    """The `v_cache` of a call whose values are columns of its keys."""
    return k_cache if spec.kv_dtype == INT4 else k_cache[..., : spec.v_head_dim]


AttentionKernel = Callable[[AttentionCall], None]
