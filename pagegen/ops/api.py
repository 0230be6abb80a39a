"""The public functions: thin wrappers that turn Python conveniences into the operators' plain arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagegen import modifiers
from pagegen.ops import checks
from pagegen.spec import Variant, dtype_name, parse_dtype


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    logit_softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    tree_mask: Tensor | None = None,
    score_mod: modifiers.Modifier | str | None = None,
    mask_mod: modifiers.Modifier | str | None = None,
    kv_dtype: torch.dtype | str | None = None,
    v_head_dim: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
    variant: Variant | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this step's queries over their sequences' cached blocks.

    q [total_q, Hq, D]; k_cache [num_blocks, block_size, Hkv, D] and v_cache [num_blocks, block_size, Hkv, Dv]
    with any strides whose last is 1 (`v_cache=None` with `v_head_dim=Dv`: V is the first Dv columns of K);
    block_table int32 [num_seqs, max_blocks], of which only the first ceil(seq_len / block_size) entries of a
    row are read; seq_lens int32 [num_seqs], tokens in the cache, this step's included; query_start_loc int32
    [num_seqs + 1], one query a sequence when omitted.

    `max_query_len` and `max_seq_len` are upper bounds for the host; without them it assumes the widest. Query i
    of sequence s stands at position seq_lens[s] - q_len[s] + i. `window` counts keys, the query's own included;
    `logit_softcap` c makes a score c*tanh(score/c); `alibi_slopes` [Hq] adds slope*(k_pos - q_pos); `sinks` [Hq]
    is one extra logit a head in the denominator. `k_scale`, `v_scale` (a float, [Hkv] or [num_blocks,
    block_size, Hkv]), `k_zero`, `v_zero` and `kv_dtype` describe a quantised cache. `tree_mask` bool [total_q,
    max_query_len] says which of this step's own tokens a query sees.

    Returns [total_q, Hq, Dv] in q's dtype, and with `return_lse` also float32 [total_q, Hq] (natural log). A row
    with nothing to attend gives 0 and -inf. Raises TypeError or ValueError naming the argument, what was
    expected and what came, before any memory is touched.
    """
    options = {
        "query_start_loc": query_start_loc,
        "max_query_len": max_query_len,
        "max_seq_len": max_seq_len,
        "scale": scale,
        "causal": causal,
        "window": window,
        "logit_softcap": logit_softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "k_scale": _scale(k_scale, q),
        "v_scale": _scale(v_scale, q),
        "k_zero": k_zero,
        "v_zero": v_zero,
        "tree_mask": tree_mask,
        "score_mod": _modifier_name(score_mod, "score"),
        "mask_mod": _modifier_name(mask_mod, "mask"),
        "kv_dtype": None if kv_dtype is None else dtype_name(parse_dtype(kv_dtype, "kv_dtype")),
        "v_head_dim": v_head_dim,
        "batch_invariant": batch_invariant,
        "return_lse": return_lse,
        "variant": variant.name if isinstance(variant, Variant) else variant,
    }
    if out is None:
        result, lse = torch.ops.pagegen.paged_attention(q, k_cache, v_cache, block_table, seq_lens, **options)
    else:
        result = out
        lse = torch.ops.pagegen.paged_attention.out(q, k_cache, v_cache, block_table, seq_lens, out=out, **options)
    return (result, lse) if return_lse else result


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> None:
    """Stores k [num_tokens, Hkv, D] and v [num_tokens, Hkv, Dv] at slot_mapping int64 [num_tokens], where slot =
    block * block_size + offset; -1 skips a token. An 8-bit cache stores value / scale, rounded to nearest even
    and saturated. Raises TypeError or ValueError naming the argument."""
    torch.ops.pagegen.write_kv(
        k, v, k_cache, v_cache, slot_mapping, k_scale=_scale(k_scale, k), v_scale=_scale(v_scale, k)
    )


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> Tensor:
    """Rotates q [num_tokens, Hq, D] and k by their `positions` int64 [num_tokens] and stores k and v.

    cos and sin are [max_position, rotary_dim / 2]; columns past rotary_dim are not rotated. Pairs are
    (i, i + rotary_dim/2), or (2i, 2i + 1) when `interleaved`. Positions are logical, so where a block lies
    changes no rotation. Returns the rotated q.
    """
    rotated: Tensor = torch.ops.pagegen.rope_write_kv(
        q, k, v, positions, cos, sin, k_cache, v_cache, slot_mapping,
        interleaved=interleaved, k_scale=_scale(k_scale, k), v_scale=_scale(v_scale, k),
    )  # fmt: skip
    return rotated


def copy_blocks(k_cache: Tensor, v_cache: Tensor, pairs: Tensor | Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks: `pairs` is int64 [num_pairs, 2] of (source, target). Each target is named once, and no
    block is both source and target (checked for a Python sequence, and for a tensor when PAGEGEN_CHECK=1). The
    copy of copy-on-write."""
    if not isinstance(pairs, Tensor):
        listed = checks.block_pairs(pairs, k_cache.shape[0])
        pairs = torch.tensor(listed, dtype=torch.int64, device=k_cache.device).reshape(-1, 2)
    torch.ops.pagegen.copy_blocks(k_cache, v_cache, pairs)


def merge_states(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges partial attention states of the same queries over disjoint keys: outs [num_states, total_q, Hq, Dv]
    and natural-log lses float32 [num_states, total_q, Hq] (or sequences of such states). Associative to
    rounding; an empty state (0, -inf) changes nothing, and merging only empty ones gives an empty one."""
    merged, lse = torch.ops.pagegen.merge_states(_states("outs", outs), _states("lses", lses))
    return merged, lse


def _states(name: str, value: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(value, Tensor):
        return value
    states = list(value)
    if not states or any(not isinstance(state, Tensor) or state.shape != states[0].shape for state in states):
        found = ", ".join(map(checks.describe, states))
        raise ValueError(f"{name} must be one tensor or more, of one shape, got {found or 'none'}")
    return torch.stack(states)


def _scale(value: Tensor | float | None, like: Tensor) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    return torch.full((), float(value), dtype=torch.float32, device=like.device)


def _modifier_name(value: modifiers.Modifier | str | None, kind: str) -> str | None:
    modifier = modifiers.find(value, kind)
    return None if modifier is None else modifier.name
