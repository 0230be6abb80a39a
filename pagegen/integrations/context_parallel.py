"""Context parallelism: every rank holds some blocks of each sequence, attends those, and the states are merged.

    share_of(...)     once a step: which of this rank's tokens each query sees (pagegen.integrations.context_share)
    attention(...)    once a layer: this rank's state by pagegen.paged_attention, and the merge over torch.distributed

Decode passes as many bytes between ranks as a state has (a row and a number a head), however long the context is. Keys
and values never move, unlike in Ring Attention: see docs/parallel.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagegen import modifiers
from pagegen.integrations.block_spread import BlockSpread
from pagegen.integrations.context_share import Part, Share, share_of
from pagegen.ops import merge_states, paged_attention
from pagegen.reference import value_width
from pagegen.spec import AttentionSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BlockSpread", "Share", "attend", "attention", "local_specs", "merge_over_ranks", "share_of"]

_OPTIONS = (
    "scale", "logit_softcap", "k_scale", "v_scale", "k_zero", "v_zero", "kv_dtype", "v_head_dim", "batch_invariant",
    "variant",
)  # fmt: skip
_PLACED = ("block_table", "causal", "max_query_len", "max_seq_len", "query_start_loc", "seq_lens", "window")
_POSITIONED = ("alibi_slopes", "mask_mod", "tree_mask")


def _mask_from_first() -> modifiers.Modifier:
    """A sequence's queries see keys from first[sequence] on."""
    first = torch.zeros(1, dtype=torch.int32)

    def mask(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return k_pos >= first[batch]

    return modifiers.mask_mod(mask)


_FROM_FIRST = _mask_from_first()  # here, since torch.compile cannot trace the registering


def local_specs(spec: AttentionSpec, rank: int) -> tuple[AttentionSpec, ...]:
    """What the calls of `rank` compute for a layer `spec`: after `pagegen.prepare` of each, none compiles."""
    local = spec.replace(window=None, sinks=spec.sinks and rank == 0)
    if not spec.causal:
        return (local,)
    windowed = () if spec.window is None else (local.replace(mask_mod=_FROM_FIRST.name),)
    return (local, local.replace(causal=False), *windowed)


def attention(
    share: Share,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    group: ProcessGroup | None = None,
    scatter_heads: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`pagegen.paged_attention` of q [total_q, Hq, D], the same on every rank of `group`, over the blocks of all ranks:
    [total_q, Hq, Dv] on each, or with `scatter_heads` the rank's own [total_q, Hq / ranks, Dv]. `options` are those of
    `attend`. States are rounded to q's dtype before they are merged. Every rank must call it, in the same order.
    Raises ValueError for a group that is not the share's, and what `attend` raises."""
    ranks, rank = _group(group)
    if (ranks, rank) != (share.spread.ranks, share.rank):
        raise ValueError(
            f"group must have {share.spread.ranks} ranks and this one be rank {share.rank} in it, as in share, "
            f"got {ranks} and rank {rank}"
        )
    out, lse = attend(share, q, k_cache, v_cache, **options)
    out, lse = merge_over_ranks(out, lse, group=group, scatter_heads=scatter_heads)
    return (out, lse) if return_lse else out


def attend(
    share: Share,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    sinks: Tensor | None = None,
    score_mod: modifiers.Modifier | str | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """This rank's state: out [total_q, Hq, Dv] in q's dtype and lse float32 [total_q, Hq], (0, -inf) where it holds
    nothing that a query sees. `options` are those of `pagegen.paged_attention` that `_OPTIONS` names.

    `sinks` count once: on rank 0. Raises ValueError for what needs the positions of keys, which a rank's own tokens do
    not tell: ALiBi, tree masks, mask functions, and score functions that read more than the score and the head."""
    _check_options(options)
    _check_score_mod(score_mod)
    if q.shape[0] < share.num_queries:
        raise ValueError(f"q must have at least the {share.num_queries} queries of share, got {q.shape[0]}")
    options = {**options, "score_mod": score_mod, "sinks": sinks if share.rank == 0 else None, "return_lse": True}
    own = q[: share.num_queries]
    states: list[tuple[Tensor, Tensor]] = [_call(part, own, k_cache, v_cache, options) for part in share.parts]
    if len(states) == 1 and len(states[0][1]) == len(q):
        return states[0]
    width = (
        states[0][0].shape[-1] if states else value_width(v_cache, options.get("v_head_dim"), options.get("kv_dtype"))
    )
    out = q.new_zeros(*q.shape[:2], width)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    if options["sinks"] is not None:
        lse[: share.num_queries] = options["sinks"].float()
    for part, state in zip(share.parts, states, strict=True):
        for whole, rows in zip((out, lse), state, strict=True):
            if part.rows is None:
                whole[: len(rows)] = rows
            else:
                whole.index_copy_(0, part.rows, rows)
    return out, lse


def merge_over_ranks(
    out: Tensor, lse: Tensor, *, group: ProcessGroup | None = None, scatter_heads: bool = False
) -> tuple[Tensor, Tensor]:
    """The states of all ranks, out [total_q, Hq, Dv] and lse float32 [total_q, Hq], merged by `pagegen.merge_states`:
    one all-gather, after which each rank has the whole, or with `scatter_heads` one all-to-all, after which each has
    its Hq / ranks heads, for 1 / ranks of the traffic. Raises ValueError where the heads do not divide."""
    ranks, _ = _group(group)
    total_q, heads, width = out.shape
    if scatter_heads and heads % ranks:
        raise ValueError(f"out must have a multiple of {ranks} heads to be scattered over {ranks} ranks, got {heads}")
    if ranks == 1:
        return out, lse
    # a state travels as one tensor, its lse behind each row as 4 bytes: one message where latency is what counts
    packed = torch.cat([out, lse.contiguous()[..., None].view(out.dtype)], dim=-1)
    if scatter_heads:
        sent = packed.view(total_q, ranks, heads // ranks, packed.shape[-1]).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=group)
    else:
        flat = packed.new_empty(ranks * total_q, *packed.shape[1:])
        _all_gather(flat, packed, group)
        received = flat.view(ranks, *packed.shape)
    outs = [state[..., :width] for state in received]
    # a copy even where a state is a single row: as float32 its bytes must begin where a float32 can
    ends = received[..., width:].clone(memory_format=torch.contiguous_format)
    lses = list(ends.view(torch.float32)[..., 0])
    merged: tuple[Tensor, Tensor] = merge_states(outs, lses)
    return merged


def _all_gather(gathered: Tensor, own: Tensor, group: ProcessGroup | None) -> None:
    # all_gather_single is the name since torch 2.13, where the older one warns
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(gathered, own, group=group)


def _group(group: ProcessGroup | None) -> tuple[int, int]:
    """(ranks, this rank) of a process group."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise RuntimeError("torch.distributed must be initialised (init_process_group) to merge over ranks")
    return torch.distributed.get_world_size(group), torch.distributed.get_rank(group)


def _call(part: Part, q: Tensor, k_cache: Tensor, v_cache: Tensor | None, options: dict[str, Any]) -> Any:
    if part.first is not None:
        options = {**options, "mask_mod": replace(_FROM_FIRST, tensors={"first": part.first})}
    return paged_attention(
        q if part.rows is None else q.index_select(0, part.rows), k_cache, v_cache, part.block_table, part.seq_lens,
        query_start_loc=part.query_start_loc, max_query_len=part.max_query_len, max_seq_len=part.max_seq_len,
        causal=part.causal, **options,
    )  # fmt: skip


def _check_options(options: dict[str, Any]) -> None:
    for name in sorted(set(options) - set(_OPTIONS)):
        if name not in _PLACED and name not in _POSITIONED:
            raise TypeError(f"attend has no option {name}: it takes sinks, score_mod, {', '.join(_OPTIONS)}")
        if name in _PLACED:
            raise TypeError(f"{name} must not be given here: share_of decides it")
        if options.pop(name) is not None:
            raise ValueError(f"{name} must be None where blocks lie on several ranks: it depends on keys' positions")


def _check_score_mod(score_mod: modifiers.Modifier | str | None) -> None:
    modifier = modifiers.find(score_mod, "score")
    if modifier is None:
        return
    try:
        reads = {symbol.name for symbol in modifiers.trace(modifier).expression.free_symbols} - {"score", "head"}
    except modifiers.Untraceable:
        reads = {"something that cannot be traced"}
    if reads:
        raise ValueError(
            "score_mod must read nothing but the score and the head where blocks lie on several ranks, "
            f"got {modifier.name}, which reads {', '.join(sorted(reads))}"
        )
