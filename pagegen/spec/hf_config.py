"""`AttentionSpec` from a Hugging Face config, by the attribute names that transformers 5 uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pagegen.spec import check
from pagegen.spec.attention import AttentionSpec
from pagegen.spec.dtypes import QUERY_DTYPES, parse_dtype

# Model types whose attention reads learned sinks; the config has no field for it.
_SINK_MODELS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa")
# Model types whose sliding layers, and only these, read learned sinks and have twice the config's KV heads.
_WIDE_SLIDING_MODELS = ("mimo_v2_flash",)
# Model types that do not scale their scores; the config has no field for it.
_UNSCALED_MODELS = ("gemma3n_text",)
# Model types whose attention always adds ALiBi; others say so with `alibi`.
_ALIBI_MODELS = ("bloom",)
# Model types whose attention is something else than a softmax over scaled scores, and what it is.
_FOREIGN_MODELS = {
    "deepseek_v32": "attends to keys that an indexer picks",
    "diffllama": "subtracts one attention map from another",
    "doge": "masks by learned values",
    "gpt_neo": "leaves its scores unscaled",
    "jetmoe": "repeats its KV heads in another order",
    "mpt": "keeps its attention settings in a nested config",
    "t5": "adds a learned bias by relative position",
    "mt5": "adds a learned bias by relative position",
}
# Layers that are a softmax over the cached context. Whatever else a config names (linear, sparse by an index, no
# attention at all) may not be approximated silently.
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


def spec_from_config(config: Any, *, layer: int, kv_dtype: str | torch.dtype | None = None) -> AttentionSpec:
    """The spec of one decoder layer. See `AttentionSpec.from_config`."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    check.integer("layer", layer, at_least=0)
    layers = _integer(text, "num_hidden_layers") if hasattr(text, "num_hidden_layers") else layer + 1
    if layer >= layers:
        raise ValueError(f"layer must be below num_hidden_layers {layers}, got {layer}")
    if getattr(text, "is_heterogeneous", False):  # what layers differ in cannot be read off the whole (Gemma 4)
        text = text.per_layer_config[layer]
    heads = _integer(text, "num_attention_heads")
    model_type = getattr(text, "model_type", "")
    if model_type in _FOREIGN_MODELS:
        raise ValueError(f"config is of {model_type}, which {_FOREIGN_MODELS[model_type]}: no spec expresses that")
    kind = _layer_kind(text, layer)
    if kind not in _KINDS:
        raise ValueError(f"layer {layer} is {kind}, which a paged attention spec cannot express")
    wide = model_type in _WIDE_SLIDING_MODELS and kind == "sliding_attention"
    common: dict[str, Any] = {
        "num_q_heads": heads,
        "q_dtype": _query_dtype(text),
        "kv_dtype": kv_dtype,
        "window": _integer(text, "sliding_window") if kind == "sliding_attention" else None,
        "mask_mod": _chunk(text) if kind == "chunked_attention" else None,
        "logit_softcap": getattr(text, "attn_logit_softcapping", None),
        "sinks": model_type in _SINK_MODELS or wide,
        "alibi": bool(getattr(text, "alibi", False)) or model_type in _ALIBI_MODELS,
    }
    if getattr(text, "kv_lora_rank", None):
        latent, rope = _integer(text, "kv_lora_rank"), _integer(text, "qk_rope_head_dim")
        width = _integer(text, "qk_nope_head_dim") + rope
        return AttentionSpec(
            num_kv_heads=1, head_dim=latent + rope, v_head_dim=latent, shared_kv=True,
            scale=_yarn_correction(text) / math.sqrt(width), **common,
        )  # fmt: skip
    if getattr(text, "head_dim", None) is None:
        head_dim = check.integer("config.hidden_size // num_attention_heads", _integer(text, "hidden_size") // heads)
    else:
        head_dim = _integer(text, "head_dim")
    return AttentionSpec(
        num_kv_heads=_kv_heads(text, heads) * (2 if wide else 1), head_dim=head_dim,
        v_head_dim=_integer(text, "v_head_dim", head_dim), scale=_scale(text, model_type, layer, head_dim), **common,
    )  # fmt: skip


def _integer(text: Any, name: str, default: int | None = None) -> int:
    """The config's `name`, an integer of at least 1, or `default` where it is missing or None. Raises ValueError where
    there is neither, and TypeError or ValueError for anything else."""
    value = getattr(text, name, None)
    if value is None:
        value = default
    if value is None:
        came = "None" if hasattr(text, name) else f"{type(text).__name__} without it"
        raise ValueError(f"config must have {name}, got {came}: expected an integer of at least 1")
    return check.integer(f"config.{name}", value)


def _chunk(text: Any) -> str:
    """The shipped mask function of a layer whose queries see their own chunk of positions (Llama 4)."""
    return f"chunked({_integer(text, 'attention_chunk_size')})"


def _query_dtype(text: Any) -> torch.dtype:
    """The dtype of the activations; bfloat16 where the config leaves it open or names another storage."""
    value = getattr(text, "dtype", None) or getattr(text, "torch_dtype", None)
    if value is None or value == "auto":
        return torch.bfloat16
    dtype = parse_dtype(value, "config.dtype (or torch_dtype)")
    return dtype if dtype in QUERY_DTYPES else torch.bfloat16


def _scale(text: Any, model_type: str, layer: int, head_dim: int) -> float:
    """What the scores are multiplied by. The GPT-2 family has two switches of its own for it."""
    if model_type in _UNSCALED_MODELS or not getattr(text, "scale_attn_weights", True):
        scale = 1.0
    elif multiplier := getattr(text, "attention_multiplier", None):
        scale = check.number("config.attention_multiplier", multiplier)
    else:
        width = getattr(text, "query_pre_attn_scalar", None) or head_dim
        if check.number("config.query_pre_attn_scalar", width) <= 0:
            raise ValueError(f"config.query_pre_attn_scalar must be positive, got {width!r}")
        scale = 1.0 / math.sqrt(width)
    return scale / (layer + 1) if getattr(text, "scale_attn_by_inverse_layer_idx", False) else scale


def _yarn_correction(text: Any) -> float:
    """What latent attention multiplies its scale by when its rope is stretched by `factor`: the square of
    0.1 * mscale_all_dim * ln(factor) + 1 (YaRN, https://arxiv.org/abs/2309.00071, section 3.4, weighted)."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    check.instance("config.rope_parameters", rope, Mapping)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    factor = check.number("config.rope_parameters['factor']", rope.get("factor"))
    weight = check.number("config.rope_parameters['mscale_all_dim']", rope["mscale_all_dim"])
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def _kv_heads(text: Any, heads: int) -> int:
    """Falcon and GPT-BigCode say it with switches of their own, the others with `num_key_value_heads`."""
    if getattr(text, "new_decoder_architecture", False):
        return _integer(text, "num_kv_heads")
    if getattr(text, "multi_query", False):
        return 1
    return _integer(text, "num_key_value_heads", heads)


def _layer_kind(text: Any, layer: int) -> str:
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        if isinstance(kinds, str) or not isinstance(kinds, Sequence):
            raise TypeError(f"config.layer_types must be a list of names, got {type(kinds).__name__} {kinds!r}")
        if layer >= len(kinds):
            raise ValueError(f"config.layer_types must have an entry for layer {layer}, got {len(kinds)} entries")
        return str(kinds[layer])
    slides = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return "sliding_attention" if slides else "full_attention"
