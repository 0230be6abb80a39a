"""`AttentionSpec`: what is computed. Fixed by the model, independent of GPU, batch and cache layout."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from pagegen.spec import check
from pagegen.spec.dtypes import QUERY_DTYPES, bytes_per_element, dtype_name, parse_dtype

SCALE_GRANULARITIES = ("none", "tensor", "head", "token_head")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention layer's meaning.

    `num_q_heads` is a multiple of `num_kv_heads`; a KV head serves that many query heads in a row. `scale` defaults
    to 1/sqrt(head_dim), `v_head_dim` to `head_dim`. `q_dtype` is that of queries and result, `kv_dtype` (default:
    the same) what the cache means; dtypes may be given by name. `causal`: a query sees no later position. `window`
    counts keys, the query's own included. `logit_softcap` c makes a score `c*tanh(score/c)`. `alibi`: the calls
    bring a slope a head, `sinks`: one extra logit a head in the denominator. `kv_scale_granularity` says what has a
    scale of its own in a quantised cache: "none", "tensor", "head" or "token_head". `kv_zero_points`: an integer
    cache holds one zero point a token and head, value = (stored - zero) * scale. `shared_kv` is the MLA latent
    cache: V is the first `v_head_dim` columns of K. `score_mod` and `mask_mod` are names of registered modifiers.
    `batch_invariant`: a sequence's result has the same bits in every batch, and one variant serves all.

    Raises TypeError or ValueError naming the field, what was expected and what came.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = None  # type: ignore[assignment]  # None only while constructing, like kv_dtype and scale
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = None  # type: ignore[assignment]
    scale: float = None  # type: ignore[assignment]
    causal: bool = True
    window: int | None = None
    logit_softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    kv_scale_granularity: str = "none"
    kv_zero_points: bool = False
    shared_kv: bool = False
    score_mod: str | None = None
    mask_mod: str | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim"):
            check.count(name, getattr(self, name))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, got {self.num_q_heads} and {self.num_kv_heads}"
            )
        q_dtype = parse_dtype(self.q_dtype, "q_dtype")
        if q_dtype not in QUERY_DTYPES:
            raise ValueError(f"q_dtype must be float32, float16 or bfloat16, got {dtype_name(q_dtype)}")
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale is None else check.number("scale", self.scale)
        if self.window is not None:
            # no context is longer than what a database column holds, so a wider window is that one
            object.__setattr__(self, "window", min(check.integer("window", self.window), check.MAX_COUNT))
        if self.logit_softcap is not None and check.number("logit_softcap", self.logit_softcap) <= 0:
            raise ValueError(f"logit_softcap must be positive, got {self.logit_softcap!r}")
        for name in ("score_mod", "mask_mod"):
            check.name_or_none(name, getattr(self, name))
        for name in ("causal", "alibi", "sinks", "kv_zero_points", "shared_kv", "batch_invariant"):
            check.boolean(name, getattr(self, name))
        check.one_of("kv_scale_granularity", self.kv_scale_granularity, SCALE_GRANULARITIES)
        v_head_dim = self.head_dim if self.v_head_dim is None else check.count("v_head_dim", self.v_head_dim)
        if self.shared_kv and v_head_dim > self.head_dim:
            raise ValueError(
                f"v_head_dim must be at most head_dim when shared_kv is set, got {v_head_dim} and {self.head_dim}"
            )
        self._set("q_dtype", q_dtype)
        self._set("kv_dtype", q_dtype if self.kv_dtype is None else parse_dtype(self.kv_dtype, "kv_dtype"))
        self._set("scale", scale)
        self._set("v_head_dim", v_head_dim)
        if self.logit_softcap is not None:
            self._set("logit_softcap", float(self.logit_softcap))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V one token of one layer takes, scales and zero points included."""
        columns = self.head_dim + (0 if self.shared_kv else self.v_head_dim)
        floats = (self.kv_scale_granularity == "token_head") + self.kv_zero_points
        scales = 4 * floats * (1 if self.shared_kv else 2)
        return math.ceil(self.num_kv_heads * (columns * bytes_per_element(self.kv_dtype) + scales))

    def replace(self, **changes: Any) -> AttentionSpec:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields; dtypes by name."""
        return {k: dtype_name(v) if isinstance(v, torch.dtype) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> AttentionSpec:
        """The inverse of `to_dict`. An unknown or missing field raises ValueError."""
        needed = ("num_q_heads", "num_kv_heads", "head_dim")
        return cls(**check.fields("AttentionSpec", data, (f.name for f in fields(cls)), needed))

    @classmethod
    def from_model(
        cls,
        name: str,
        *,
        layer: str | None = None,
        q_dtype: str | torch.dtype | None = None,
        kv_dtype: str | torch.dtype | None = None,
    ) -> AttentionSpec:
        """The spec of a known model ("llama-3.1-8b", or its Hugging Face id).

        `layer` is "full" or "sliding" for models that mix both; the default is the full-attention layer, or
        the sliding one where every layer slides. Raises ValueError for an unknown model, naming near ones.
        """
        from pagegen.spec.models import find_geometry

        return find_geometry(name).spec(layer=layer, q_dtype=q_dtype, kv_dtype=kv_dtype)

    @classmethod
    def from_config(
        cls, config: Any, *, layer: int | None = None, kv_dtype: str | torch.dtype | None = None
    ) -> AttentionSpec:
        """The spec of layer `layer` (default 0) of a Hugging Face model config. Raises ValueError for a
        config without attention heads or with a feature that the spec cannot express."""
        from pagegen.spec.hf_config import spec_from_config

        return spec_from_config(config, layer=0 if layer is None else layer, kv_dtype=kv_dtype)
