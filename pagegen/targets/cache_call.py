"""`WriteCall` and `State`: what the kernels that write and merge receive, validated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(slots=True)
class Rotation:
    """What a write rotates before it stores k. q and `rotated` [num_tokens, Hq, D]; positions int64 [num_tokens];
    cos and sin [max_position, rotary_dim / 2], max_position >= 1. Pairs are (i, i + rotary_dim / 2), or
    (2i, 2i + 1) when `interleaved`. `rotated` arrives uninitialised; every row of it is written."""

    q: Tensor
    rotated: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool


@dataclass(slots=True)
class WriteCall:
    """The operands of one `write_kv` or `rope_write_kv` call of one token or more. Shapes as in `pagegen.write_kv`;
    every tensor's last stride is 1, other strides are free. v and v_cache are both None where K alone is written.

    `stored` is what the caches hold (torch.int4: two values a byte, low nibble first); their own dtype is that, or
    storage of the same bytes. Scales and zero points are float32 [num_blocks, block_size, Hkv] (0 strides where they
    repeat), or None: k_scale and v_scale are both there or both not, so are k_zero and v_zero."""

    k: Tensor
    v: Tensor | None
    k_cache: Tensor
    v_cache: Tensor | None
    slots: Tensor
    stored: torch.dtype
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_zero: Tensor | None = None
    v_zero: Tensor | None = None
    rotation: Rotation | None = None


class State(NamedTuple):
    """A state of attention: out [num_rows, Hq, Dv] with a last stride of 1, lse float32 [num_rows, Hq] (natural log;
    -inf: empty, whatever `out` holds). `rows` int64: the rows of out and lse that are meant, each once; None: all."""

    out: Tensor
    lse: Tensor
    rows: Tensor | None = None


Writer = Callable[[WriteCall], None]
Merger = Callable[[State, Sequence[State]], None]
Copier = Callable[[Tensor, "Tensor | None", Tensor], None]
