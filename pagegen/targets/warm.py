"""The smallest batches that launch every form of a kernel once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagegen.spec import AttentionSpec, CacheLayout
from pagegen.targets.call import AttentionCall


def calls(spec: AttentionSpec, layout: CacheLayout, device: str = "cuda") -> Iterator[AttentionCall]:
    """Decode and ragged, with and without lse: one sequence of one token in a cache of one block."""
    slots = layout.block_size * spec.num_kv_heads
    caches = [
        layout.view(torch.zeros(slots * width, dtype=spec.kv_dtype, device=device), spec.num_kv_heads, width)
        for width in (spec.head_dim, spec.v_head_dim)
    ]
    q = torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=spec.q_dtype, device=device)
    per_head = torch.zeros(spec.num_q_heads, dtype=torch.float32, device=device)
    for starts in (None, torch.tensor([0, 1], dtype=torch.int32, device=device)):
        for with_lse in (False, True):
            yield AttentionCall(
                q=q,
                k_cache=caches[0],
                v_cache=caches[1],
                block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
                seq_lens=torch.ones(1, dtype=torch.int32, device=device),
                query_start_loc=starts,
                max_query_len=1,
                max_seq_len=1,
                scale=spec.scale,
                alibi_slopes=per_head if spec.alibi else None,
                sinks=per_head if spec.sinks else None,
                out=q.new_zeros(1, spec.num_q_heads, spec.v_head_dim),
                lse=torch.zeros(1, spec.num_q_heads, dtype=torch.float32, device=device) if with_lse else None,
            )
