"""The attention and mask functions that transformers calls once a model is enabled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from pagegen.ops import paged_attention, write_kv

NAME = "pagegen"
# Tensors that models hand to every attention function and that do not change what it computes.
_HARMLESS = ("position_ids", "cache_position", "attention_mask")


@dataclass(frozen=True)
class Step:
    """One step's batch, as the operators take it (shapes in `pagegen.paged_attention`).

    `rows` int64 [total_q] names the rows of the flattened [batch * tokens] input that hold real tokens; None
    when all do. `max_query_len` and `max_seq_len` are upper bounds.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    rows: Tensor | None = None


class StepSource(Protocol):
    """A transformers cache over paged blocks: says where a layer's tokens go."""

    variant: str | None

    def step(self, layer: int, batch: int, tokens: int, padding: Tensor | None) -> Step:
        """The step of this forward; `padding` bool [batch, seen] marks real tokens, None where all are."""
        ...

    def scale(self, layer: int, given: float | None) -> float:
        """The factor of this layer's scores, from what the model gave."""
        ...

    def refuse_window(self, layer: int, given: int | None) -> None:
        """Raises ValueError for another window than this layer was enabled with."""
        ...

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's k_cache and v_cache, [num_blocks, block_size, num_kv_heads, head_dim]."""
        ...


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    pagegen: StepSource | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Writes this step's keys and values into their blocks and attends the sequences' blocks.

    query [B, Hq, T, D], key and value [B, Hkv, T, D]; returns [B, T, Hq, Dv]. `pagegen` is the cache, which the
    hook that `enable` sets puts among the arguments. Raises ValueError for what a paged step cannot mean.
    """
    if pagegen is None:
        raise ValueError("past_key_values must be a paged cache, got another or none: pass enable(model).cache()")
    _refuse(dropout, others)
    batch, _, tokens, _ = query.shape
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    pagegen.refuse_window(layer, sliding_window)
    step = pagegen.step(layer, batch, tokens, attention_mask)
    k_cache, v_cache = pagegen.blocks(layer)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if step.rows is not None:
        q, k, v = q[step.rows], k[step.rows], v[step.rows]
    write_kv(k, v, k_cache, v_cache, step.slot_mapping)
    out = paged_attention(
        q,
        k_cache,
        v_cache,
        step.block_table,
        step.seq_lens,
        query_start_loc=step.query_start_loc,
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
        scale=pagegen.scale(layer, scaling),
        window=sliding_window,
        logit_softcap=softcap,
        sinks=s_aux,
        variant=pagegen.variant,
    )
    assert isinstance(out, Tensor)
    if step.rows is not None:
        out = out.new_zeros(batch * tokens, *out.shape[1:]).index_copy_(0, step.rows, out)
    return out.view(batch, tokens, *out.shape[1:]), None


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    """What a model may ask of an attention function and a paged step cannot give."""
    if dropout:
        raise ValueError(f"attention dropout must be 0 (model.eval()), got {dropout}")
    if others.get("is_causal") is False:
        raise ValueError("is_causal must not be False: a paged step is causal")
    if others.get("output_attentions"):
        raise ValueError("output_attentions must be False: a paged step keeps no attention weights")
    for name, value in others.items():
        if isinstance(value, Tensor) and name not in _HARMLESS:
            raise ValueError(f"{name} is an attention argument that a paged step cannot honour")


def paged_mask(
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = False,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """transformers' mask function for paged attention: the kernel knows causality and window, so only padding
    is passed on, as the bool [batch, seen] that came; None where nothing is padded.

    transformers says with `allow_is_causal_skip` that the mask is plain causal (or sliding). Raises ValueError
    for any other.
    """
    if use_vmap or not allow_is_causal_skip:
        raise ValueError("the model's mask must be causal or sliding causal, got one that a paged step cannot express")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask
