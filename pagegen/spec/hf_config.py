"""`AttentionSpec` from a Hugging Face config, by the attribute names that transformers 5 uses."""

from __future__ import annotations

import math
from typing import Any

import torch

from pagegen.spec import check
from pagegen.spec.attention import AttentionSpec
from pagegen.spec.dtypes import QUERY_DTYPES

# Model types whose attention reads learned sinks; the config has no field for it.
_SINK_MODELS = ("gpt_oss",)
# Model types whose attention always adds ALiBi; others say so with `alibi`.
_ALIBI_MODELS = ("bloom",)
# Model types whose attention is something else than a softmax over scaled scores, and what it is.
_FOREIGN_MODELS = {
    "deepseek_v32": "attends to keys that an indexer picks",
    "diffllama": "subtracts one attention map from another",
    "doge": "masks by learned values",
    "gpt_neo": "leaves its scores unscaled",
    "mpt": "keeps its attention settings in a nested config",
    "t5": "adds a learned bias by relative position",
    "mt5": "adds a learned bias by relative position",
}
# Layers that are a softmax over the cached context. Whatever else a config names (linear, chunked, sparse by an index,
# no attention at all) may not be approximated silently.
_KINDS = ("full_attention", "sliding_attention", "attention")


def spec_from_config(config: Any, *, layer: int, kv_dtype: str | torch.dtype | None = None) -> AttentionSpec:
    """The spec of one decoder layer. See `AttentionSpec.from_config`."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ValueError(f"config must have num_attention_heads, got {type(config).__name__} without it")
    check.integer("layer", layer, at_least=0)
    layers = getattr(text, "num_hidden_layers", layer + 1)
    if layer >= layers:
        raise ValueError(f"layer must be below num_hidden_layers {layers}, got {layer}")
    model_type = getattr(text, "model_type", "")
    if model_type in _FOREIGN_MODELS:
        raise ValueError(f"config is of {model_type}, which {_FOREIGN_MODELS[model_type]}: no spec expresses that")
    kind = _layer_kind(text, layer)
    if kind not in _KINDS:
        raise ValueError(f"layer {layer} is {kind}, which a paged attention spec cannot express")
    q_dtype = getattr(text, "dtype", None) or getattr(text, "torch_dtype", None) or torch.bfloat16
    if isinstance(q_dtype, str):
        q_dtype = getattr(torch, q_dtype)
    common: dict[str, Any] = {
        "num_q_heads": heads,
        "q_dtype": q_dtype if q_dtype in QUERY_DTYPES else torch.bfloat16,
        "kv_dtype": kv_dtype,
        "window": _window(text, kind),
        "logit_softcap": getattr(text, "attn_logit_softcapping", None),
        "sinks": model_type in _SINK_MODELS,
        "alibi": bool(getattr(text, "alibi", False)) or model_type in _ALIBI_MODELS,
    }
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        width = text.qk_nope_head_dim + text.qk_rope_head_dim
        return AttentionSpec(
            num_kv_heads=1, head_dim=latent + text.qk_rope_head_dim, v_head_dim=latent, shared_kv=True,
            scale=1.0 / math.sqrt(width), **common,
        )  # fmt: skip
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    scalar = getattr(text, "query_pre_attn_scalar", None)
    scale = getattr(text, "attention_multiplier", None) or (1.0 / math.sqrt(scalar) if scalar else None)
    common |= {"v_head_dim": getattr(text, "v_head_dim", None), "scale": scale}
    return AttentionSpec(num_kv_heads=_kv_heads(text, heads), head_dim=head_dim, **common)


def _kv_heads(text: Any, heads: int) -> int:
    """Falcon and GPT-BigCode say it with switches of their own, the others with `num_key_value_heads`."""
    if getattr(text, "new_decoder_architecture", False):
        return int(text.num_kv_heads)
    if getattr(text, "multi_query", False):
        return 1
    return getattr(text, "num_key_value_heads", None) or heads


def _layer_kind(text: Any, layer: int) -> str:
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return str(kinds[layer])
    slides = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return "sliding_attention" if slides else "full_attention"


def _window(text: Any, kind: str) -> int | None:
    window = getattr(text, "sliding_window", None)
    return int(window) if kind == "sliding_attention" and window else None
