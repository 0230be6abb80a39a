"""One attention layer of a serving engine: what the vLLM and the SGLang backend both hand to pagegen's operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagegen.ops import paged_attention, prepare, write_kv
from pagegen.ops.plans import target_of
from pagegen.spec import AttentionSpec, CacheLayout, dtype_name

# An engine's name of a cache dtype -> the values that the cache holds, None where its tensor's own dtype says it.
KV_DTYPES: dict[str, str | None] = {
    "auto": None,
    "float32": None,
    "float16": None,
    "bfloat16": None,
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def kv_dtype_of(name: str) -> str | None:
    """`kv_dtype` of the operators for an engine's cache dtype. Raises NotImplementedError for one that they lack."""
    if name not in KV_DTYPES:
        raise NotImplementedError(f"pagegen's backend has kv_cache_dtype {', '.join(KV_DTYPES)}, got {name}")
    return KV_DTYPES[name]


def version_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, (0, 33, 0) of "0.33.0rc1+cpu"; () of a build without one ("dev")."""
    numbers: list[int] = []
    for part in text.split(".")[:3]:
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


@dataclass(frozen=True)
class EngineStep:
    """One step's batch of `num_seqs` sequences; shapes in `pagegen.paged_attention`. `query_start_loc` None: one query
    a sequence. `max_query_len` and `max_seq_len` are upper bounds, also for every replay of a captured graph."""

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class EngineLayer:
    """What one layer computes and what its cache holds. `alibi_slopes` and `sinks` [num_q_heads] are read as they are
    at each call, so weights that are loaded later count."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    logit_softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    kv_dtype: str | None = None
    causal: bool = True
    batch_invariant: bool = False

    def write(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
    ) -> None:
        """Stores the rows that `slot_mapping` [num_tokens] names, of k and v [num_tokens or more, num_kv_heads, D]:
        rows past it are padding. Scales count for a float8 cache only."""
        tokens = slot_mapping.shape[0]
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale} if self.kv_dtype else {}
        write_kv(k[:tokens], v[:tokens], k_cache, v_cache, slot_mapping, kv_dtype=self.kv_dtype, **scales)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: EngineStep,
        out: Tensor,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
    ) -> None:
        """Writes the attention of q [total_q, num_q_heads, D] to `out`. Rows of no sequence become 0."""
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale} if self.kv_dtype else {}
        paged_attention(
            q,
            k_cache,
            v_cache,
            step.block_table,
            step.seq_lens,
            query_start_loc=step.query_start_loc,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            logit_softcap=self.logit_softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            kv_dtype=self.kv_dtype,
            batch_invariant=self.batch_invariant,
            out=out,
            **scales,
        )

    def spec(self, q_dtype: torch.dtype, stored_dtype: torch.dtype, v_head_dim: int, *, scaled: bool) -> AttentionSpec:
        """The spec of this layer's calls: queries in `q_dtype` over a cache tensor of `stored_dtype`, with or without
        scales."""
        return AttentionSpec(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=v_head_dim,
            q_dtype=q_dtype,
            kv_dtype=self.kv_dtype or dtype_name(stored_dtype),  # type: ignore[arg-type]  # by name
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            logit_softcap=self.logit_softcap,
            alibi=self.alibi_slopes is not None,
            sinks=self.sinks is not None,
            kv_scale_granularity="tensor" if scaled and self.kv_dtype else "none",
            batch_invariant=self.batch_invariant,
        )


def prepare_layers(specs: list[AttentionSpec], layout: CacheLayout, device: torch.device) -> None:
    """Chooses and compiles the kernels of these layers now, so that no request waits and no capture compiles."""
    for spec in dict.fromkeys(specs):
        prepare(spec, layout, target_of(device))
