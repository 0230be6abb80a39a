"""The smallest batches that launch every form of a kernel once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pagegen import modifiers
from pagegen.spec import AttentionSpec, CacheLayout
from pagegen.spec.dtypes import INT4
from pagegen.targets.cache_call import WriteCall
from pagegen.targets.call import AttentionCall, values_in_keys


def calls(spec: AttentionSpec, layout: CacheLayout, device: str = "cuda") -> Iterator[AttentionCall]:
    """Decode and ragged, without and with a tree mask, with and without lse: one sequence of one token in a cache of
    one block. Score and mask functions read the tensors that they were registered with."""
    q = torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=spec.q_dtype, device=device)
    per_head = torch.zeros(spec.num_q_heads, dtype=torch.float32, device=device)
    table, lens, starts = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([[0]], [1], [0, 1]))
    tree = torch.ones(1, 1, dtype=torch.bool, device=device)
    given: dict[str, Any] = {
        **_caches(spec, layout, device),
        **_factors(spec, layout, device),
        "captures": modifiers.captured_tensors(spec.score_mod, spec.mask_mod),
    }
    for query_start_loc, tree_mask in ((None, None), (starts, None), (starts, tree)):
        for with_lse in (False, True):
            yield AttentionCall(
                q=q,
                block_table=table,
                seq_lens=lens,
                query_start_loc=query_start_loc,
                max_query_len=1,
                max_seq_len=1,
                scale=spec.scale,
                alibi_slopes=per_head if spec.alibi else None,
                sinks=per_head if spec.sinks else None,
                out=q.new_zeros(1, spec.num_q_heads, spec.v_head_dim),
                lse=torch.zeros(1, spec.num_q_heads, dtype=torch.float32, device=device) if with_lse else None,
                tree_mask=tree_mask,
                **given,
            )


def write(spec: AttentionSpec, layout: CacheLayout, device: str) -> WriteCall:
    """A write of one token that has no slot."""
    caches, factors = _caches(spec, layout, device), _factors(spec, layout, device)
    k = torch.zeros(1, spec.num_kv_heads, spec.head_dim, dtype=spec.q_dtype, device=device)
    v = None if spec.shared_kv else k.new_zeros(1, spec.num_kv_heads, spec.v_head_dim)
    return WriteCall(
        k=k,
        v=v,
        k_cache=caches["k_cache"],
        v_cache=None if v is None else caches["v_cache"],
        slots=torch.full((1,), -1, dtype=torch.int64, device=device),
        stored=spec.kv_dtype,
        k_scale=factors.get("k_scale"),
        v_scale=factors.get("v_scale"),
        k_zero=factors.get("k_zero"),
        v_zero=factors.get("v_zero"),
    )


def _caches(spec: AttentionSpec, layout: CacheLayout, device: str) -> dict[str, Tensor]:
    packed = spec.kv_dtype == INT4
    dtype = torch.uint8 if packed else spec.kv_dtype
    slots = layout.block_size * spec.num_kv_heads

    def cache(columns: int) -> Tensor:
        width = columns // 2 if packed else columns
        return layout.view(torch.zeros(slots * width, dtype=dtype, device=device), spec.num_kv_heads, width)

    k_cache = cache(spec.head_dim)
    if not spec.shared_kv:
        return {"k_cache": k_cache, "v_cache": cache(spec.v_head_dim)}
    return {"k_cache": k_cache, "v_cache": values_in_keys(k_cache, spec)}


def _factors(spec: AttentionSpec, layout: CacheLayout, device: str) -> dict[str, Tensor]:
    names = ["k_scale", "v_scale"] if spec.kv_scale_granularity != "none" else []
    names += ["k_zero", "v_zero"] if spec.kv_zero_points else []
    ones = torch.ones(1, layout.block_size, spec.num_kv_heads, dtype=torch.float32, device=device)
    # of a whole cache, or repeated with strides of 0: as the operator hands them over
    shown = ones if spec.kv_scale_granularity == "token_head" else ones[:1, :1, :1].expand_as(ones)
    return dict.fromkeys(names, shown)
