"""Shapes and dtypes of the operators' results, for tracing: no values are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagegen.ops import gradients
from pagegen.ops.schemas import LIBRARY
from pagegen.reference import value_width


def _lse(q: Tensor, return_lse: bool) -> Tensor:
    return q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    v_head_dim: int | None = None,
    kv_dtype: str | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    _refuse(q=q, k_cache=k_cache, v_cache=v_cache, **options)
    width = value_width(v_cache, v_head_dim, kv_dtype)
    return q.new_empty((*q.shape[:2], width)), _lse(q, return_lse)


def _attention_out(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *_: Any, return_lse: bool = False, **options: Any
) -> Tensor:
    _refuse(q=q, k_cache=k_cache, v_cache=v_cache, **options)
    return _lse(q, return_lse)


def _refuse(**operands: Any) -> None:
    """What wants a gradient among a call's arguments, of which some are no tensors and some are lists of them."""
    for name, value in operands.items():
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            gradients.refuse(**{name: tensor if isinstance(tensor, Tensor) else None})


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    _refuse(outs=outs, lses=lses)
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _merge_list(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    _refuse(outs=outs, lses=lses)
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


def _rotated(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *_: Any,
    **options: Any,
) -> Tensor:
    _refuse(q=q, k=k, v=v, cos=cos, sin=sin, k_cache=k_cache, v_cache=v_cache, **options)
    return q.new_empty(q.shape)


def _write(k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, *_: Any, **options: Any) -> None:
    _refuse(k=k, v=v, k_cache=k_cache, v_cache=v_cache, **options)


def _nothing(*_: Any, **__: Any) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "paged_attention": _attention,
    "paged_attention.out": _attention_out,
    "write_kv": _write,
    "rope_write_kv": _rotated,
    "update_scales": _nothing,
    "copy_blocks": _nothing,
    "merge_states": _merge,
    "merge_states.list": _merge_list,
    "merge_into": _nothing,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"pagegen::{_name}", _fake, lib=LIBRARY)
