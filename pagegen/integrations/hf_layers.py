"""What a Hugging Face model's attention layers compute, as specs; what cannot be said so is refused by name."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from pagegen.integrations import hf_sources
from pagegen.spec import AttentionSpec


def layer_specs(model: Any) -> tuple[AttentionSpec, ...]:
    """One spec a decoder layer of a transformers model, in order.

    The model's own modules have the last word on scale, window and sinks: a config may leave them out. Raises
    ValueError naming the layer and the feature that paged attention cannot express.
    """
    config = model.config
    name = type(model).__name__
    if not getattr(type(model), "_supports_attention_backend", False):
        raise ValueError(f"{name} does not take its attention from transformers' AttentionInterface")
    for crossing, called in (
        ("is_encoder_decoder", "an encoder-decoder"),
        ("add_cross_attention", "one for an encoder"),
    ):
        if getattr(config, crossing, False):
            raise ValueError(f"{name} must be a decoder alone, got {called}: its cross attention is not paged")
    if config.get_text_config() is not config:
        raise ValueError(f"{name} is made of several models: enable its language model alone")
    modules = _attention_modules(model)
    specs = tuple(_layer_spec(model, layer, modules.get(layer)) for layer in range(config.num_hidden_layers))
    _refuse_mixed_shapes(name, specs)
    return specs


def _attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The attention module of each layer: a module that knows its layer and is named an attention."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and "Attention" in type(module).__name__:
            found.setdefault(layer, module)
    return found


def _layer_spec(model: Any, layer: int, module: nn.Module | None) -> AttentionSpec:
    where = f"{type(model).__name__} layer {layer}"
    try:
        spec = AttentionSpec.from_config(model.config, layer=layer)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if module is None:
        raise ValueError(f"{where}: no attention module was found that knows its layer")
    reason = _refusal(model, layer, module, spec)
    if reason:
        raise ValueError(f"{where} ({type(module).__name__}): {reason}")
    scale = getattr(module, "scaling", spec.scale)
    window = spec.window
    if not getattr(model.config, "layer_types", None):  # else modules may keep a window that is not used
        window = getattr(module, "sliding_window", window)
    return spec.replace(
        q_dtype=model.dtype,
        kv_dtype=model.dtype,
        scale=spec.scale if scale is None or math.isclose(scale, spec.scale) else float(scale),
        window=None if window is not None and hf_sources.drops_window(module) else window,
        sinks=getattr(module, "sinks", None) is not None,
    )


def _refusal(model: Any, layer: int, module: nn.Module, spec: AttentionSpec) -> str | None:
    """Why this layer is not paged attention over its own cache, or None."""
    config = model.config
    if spec.shared_kv:
        return "latent attention (MLA) caches what this integration does not write"
    if spec.mask_mod:
        return "chunked attention: transformers' mask for it is not one that this integration passes on"
    if spec.alibi:
        return "ALiBi slopes do not reach a registered attention function"
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if layer >= config.num_hidden_layers - shared:
        return "it reads another layer's keys and values"
    if getattr(module, "is_causal", True) is False:
        return "bidirectional attention has no paged cache"
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    if spec.window is not None and spec.window < longest and hf_sources.drops_window(module):
        return f"its window of {spec.window} is not handed to the attention function"
    caller = hf_sources.caller_dropping_keywords(model, module)
    if caller:
        return f"{caller} hands it no keyword arguments, and a paged cache is one"
    head_dim = getattr(module, "head_dim", spec.head_dim)
    if head_dim != spec.head_dim:
        return f"its head_dim {head_dim} is not the config's {spec.head_dim}"
    return None


def _refuse_mixed_shapes(name: str, specs: tuple[AttentionSpec, ...]) -> None:
    def shape(spec: AttentionSpec) -> tuple[int, int, int]:
        return spec.num_kv_heads, spec.head_dim, spec.v_head_dim

    for layer, spec in enumerate(specs):
        if shape(spec) != shape(specs[0]):
            raise ValueError(
                f"{name} layer {layer}: KV heads, head_dim and v_head_dim must be those of layer 0 "
                f"{shape(specs[0])}, got {shape(spec)}: one block pool serves all layers"
            )
