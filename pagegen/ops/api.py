"""The public functions: thin wrappers that turn Python conveniences into the operators' plain arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagegen import modifiers
from pagegen.ops import cache_checks, checks, gradients
from pagegen.spec import Variant, check, dtype_name, parse_dtype

# of the operators' options whose default is not None
_DEFAULTS = {"causal": True, "batch_invariant": False}
_ATTENTION = torch.ops.pagegen.paged_attention


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
    of sequence s stands at position seq_lens[s] - q_len[s] + i. `scale` (default 1/sqrt(D)) multiplies the scores;
    `causal`: a query sees no later position. `window` counts keys, the query's own included;
    `logit_softcap` c makes a score `c*tanh(score/c)`; `alibi_slopes` [Hq] adds `slope*(k_pos - q_pos)`; `sinks` [Hq]
    is one extra logit a head in the denominator. `k_scale`, `v_scale` (a float, [Hkv] or [num_blocks,
    block_size, Hkv]), `k_zero`, `v_zero` and `kv_dtype` describe a quantised cache. `tree_mask` bool [total_q,
    max_query_len] says which of this step's own tokens a query sees. `score_mod` and `mask_mod` are modifiers or their
    names; the tensors that they captured are read as they are now, and are inputs of a compiled graph. With
    `batch_invariant` a sequence's result has the same bits in every batch. `variant` names a kernel in place of the
    chosen one. `out` takes the result.

    Returns [total_q, Hq, Dv] in q's dtype, and with `return_lse` also float32 [total_q, Hq] (natural log). A row
    with nothing to attend gives 0 and -inf. Raises TypeError or ValueError naming the argument, what was
    expected and what came, before any memory is touched.
    """
    options: dict[str, Any] = {}  # what is not the default: each argument costs the dispatcher 0.25 us, even a default
    if query_start_loc is not None:
        options["query_start_loc"] = query_start_loc
    if max_query_len is not None:
        options["max_query_len"] = max_query_len
    if max_seq_len is not None:
        options["max_seq_len"] = max_seq_len
    if scale is not None:
        options["scale"] = scale
    if return_lse is not False:
        options["return_lse"] = return_lse
    is_plain = window is None and logit_softcap is None and alibi_slopes is sinks is tree_mask is None
    is_stored_as_it_is = k_scale is v_scale is None and k_zero is v_zero is None and kv_dtype is None
    is_usual = causal is True and batch_invariant is False and variant is None
    if not (is_plain and is_stored_as_it_is and is_usual and v_head_dim is None):  # looking at each takes 1 us
        rarer = {
            "causal": causal,
            "window": window,
            "logit_softcap": logit_softcap,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "k_scale": _scale("k_scale", k_scale, q),
            "v_scale": _scale("v_scale", v_scale, q),
            "k_zero": k_zero,
            "v_zero": v_zero,
            "tree_mask": tree_mask,
            "kv_dtype": _dtype_name(kv_dtype),
            "v_head_dim": v_head_dim,
            "batch_invariant": batch_invariant,
            "variant": variant.name if isinstance(variant, Variant) else variant,
        }
        options |= {n: value for n, value in rarer.items() if value is not None and value is not _DEFAULTS.get(n)}
    if score_mod is not None or mask_mod is not None:
        options.update(_modifiers(score_mod, mask_mod))
    operands = (q, k_cache, v_cache, block_table, seq_lens)
    if out is None:
        result, lse = _call(_ATTENTION.default, operands, options)
    else:
        result, lse = out, _call(_ATTENTION.out, operands, {**options, "out": out})
    return (result, lse) if return_lse else result


def write_kv(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    kv_dtype: torch.dtype | str | None = None,
) -> None:
    """Stores k [num_tokens, Hkv, D] and v [num_tokens, Hkv, Dv] at slot_mapping int64 [num_tokens], where slot =
    block * block_size + offset; -1 skips a token. `v=None` with `v_cache=None` writes K alone (a latent cache, whose
    values are the first columns of K). Caches may have any strides with a unit last one that do not overlap.

    What is stored is value / scale + zero, both rounded to float32, then to the nearest value that the cache can hold,
    ties to even. Scales (a float, [Hkv] or float32 [num_blocks, block_size, Hkv]) and, for int8 and int4 caches, zero
    points (of the same shapes) are those that `paged_attention` reads with; `kv_dtype` says what the cache holds where
    its dtype is storage: uint8 holding float8 or int8, uint8 or int8 holding packed int4 [.., D / 2], low nibble first.
    float8 (to 448, e5m2 57344), int8 (-128..127) and int4 (-8..7) saturate, infinities too; NaN stays NaN in float8
    and is 0 in integers. float16 and bfloat16 caches overflow to infinity, as torch's casts do.

    One kernel launch, or one C++ call. A scale given as a float, or for only one of K and V, becomes a tensor first:
    on a GPU one small fill more. Raises TypeError or ValueError naming the argument."""
    quantised = _quantised(k, k_scale, v_scale, k_zero, v_zero, kv_dtype)
    _call(torch.ops.pagegen.write_kv.default, (k, v, k_cache, v_cache, slot_mapping), quantised)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    kv_dtype: torch.dtype | str | None = None,
) -> Tensor:
    """Rotates q [num_tokens, Hq, D] and k by their `positions` int64 [num_tokens], stores k and v as `write_kv` does,
    with the same options, and returns the rotated q: one kernel launch, or one C++ call.

    cos and sin are [max_position, rotary_dim / 2]; columns past rotary_dim are not rotated. Pairs are
    (i, i + rotary_dim/2), or (2i, 2i + 1) when `interleaved`. Rotation is in float32 and rounded once to the dtype of
    q, respectively k; what is stored is that rounded k, quantised, so the caches hold what rotating first and
    `write_kv` then would give, bit for bit. Rows whose slot is -1 still get a rotated q. Positions are logical, so
    where a block lies changes no rotation; one outside cos and sin gives an undefined rotation (but reads nothing
    outside them), and raises ValueError when PAGEGEN_CHECK=1.
    """
    options = _quantised(k, k_scale, v_scale, k_zero, v_zero, kv_dtype)
    if interleaved is not False:
        options["interleaved"] = interleaved
    operands = (q, k, v, positions, cos, sin, k_cache, v_cache, slot_mapping)
    rotated: Tensor = _call(torch.ops.pagegen.rope_write_kv.default, operands, options)
    return rotated


def _quantised(
    k: Tensor,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    k_zero: Tensor | None,
    v_zero: Tensor | None,
    kv_dtype: torch.dtype | str | None,
) -> dict[str, Any]:
    """What a write is told of a quantised cache."""
    if k_scale is v_scale is None and k_zero is v_zero is None and kv_dtype is None:
        return {}
    return {
        "k_scale": _scale("k_scale", k_scale, k),
        "v_scale": _scale("v_scale", v_scale, k),
        "k_zero": k_zero,
        "v_zero": v_zero,
        "kv_dtype": _dtype_name(kv_dtype),
    }


def update_scales(
    k: Tensor,
    v: Tensor | None,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor | None,
    *,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    kv_dtype: torch.dtype | str,
) -> None:
    """Sets the scales of the slots that `write_kv` is about to write, so that each row uses the whole range of
    `kv_dtype` (float8, int8 or int4): dynamic quantisation is this call and then `write_kv` with the same scales.

    k_scale and v_scale are float32 [num_blocks, block_size, Hkv], written at slot_mapping; a negative slot is skipped.
    Without zero points a scale is the row's largest magnitude / the type's largest value. With `k_zero` or `v_zero`
    (same shape; int8 and int4 alone) the row's least and largest value are mapped to the type's ends. Rows of zeros
    get scale 1; NaN and infinities are ignored. Give rows as they are stored:
    a rotation can raise a magnitude by sqrt(2), which scales of the rows before it would saturate. Raises TypeError
    or ValueError naming the argument."""
    operator = torch.ops.pagegen.update_scales.default
    named = _dtype_name(kv_dtype)
    options = {"k_zero": k_zero, "v_zero": v_zero, "kv_dtype": named}
    _call(operator, (k, v, slot_mapping, k_scale, v_scale), options)


def copy_blocks(k_cache: Tensor, v_cache: Tensor | None, pairs: Tensor | Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks, of caches of any dtype: `pairs` is int64 [num_pairs, 2] of (source, target). Each target is
    named once, and no block is both source and target (checked for a Python sequence, and for a tensor when
    PAGEGEN_CHECK=1). The copy of copy-on-write; `v_cache=None` copies K alone.

    Scales and zero points [num_blocks, block_size, Hkv] of a token and head move along by a call of their own, as
    caches of one head: `copy_blocks(k_scale[:, :, None], v_scale[:, :, None], pairs)`; a `PagedKVCache` moves those
    that it holds. Raises TypeError or ValueError naming the argument."""
    if not isinstance(pairs, Tensor):
        listed = cache_checks.block_pairs(pairs, k_cache.shape[0])
        pairs = torch.tensor(listed, dtype=torch.int64, device=k_cache.device).reshape(-1, 2)
    _call(torch.ops.pagegen.copy_blocks.default, (k_cache, v_cache, pairs), {})


def merge_states(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges partial attention states of the same queries over disjoint keys: outs [num_states, total_q, Hq, Dv]
    and natural-log lses float32 [num_states, total_q, Hq] (or sequences of such states). Associative to
    rounding; an empty state (0, -inf) changes nothing, and merging only empty ones gives an empty one. An infinite lse
    outweighs all finite ones; several infinite ones give their outputs' mean. Raises TypeError or ValueError naming the
    argument."""
    operator, listed = torch.ops.pagegen.merge_states, not isinstance(outs, Tensor) and not isinstance(lses, Tensor)
    given = (_states("outs", outs, stack=not listed), _states("lses", lses, stack=not listed))
    merged, lse = _call(operator.list if listed else operator.default, given, {})
    return merged, lse


def _states(name: str, value: Tensor | Sequence[Tensor], *, stack: bool) -> Tensor | list[Tensor]:
    if isinstance(value, Tensor):
        return value
    states = list(value)
    if not states or any(not isinstance(state, Tensor) or state.shape != states[0].shape for state in states):
        found = ", ".join(map(checks.describe, states))
        raise ValueError(f"{name} must be one tensor or more, of one shape, got {found or 'none'}")
    return torch.stack(states) if stack else states


# What each operator calls its positional operands, as plain strings, which torch.compile can read.
_OPERANDS = {
    operator: tuple(argument.name for argument in operator._schema.arguments)
    for name in ("paged_attention", "write_kv", "rope_write_kv", "update_scales", "copy_blocks", "merge_states")
    for operator in (
        getattr(getattr(torch.ops.pagegen, name), kind) for kind in getattr(torch.ops.pagegen, name).overloads()
    )
}


def _call(operator: Any, operands: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The operator's result. Where torch refuses a value's type, whose message may name no argument, raises TypeError
    naming it, and RuntimeError naming an operand that a transform of torch.func would differentiate."""
    if gradients.transforms_are_active():
        gradients.refuse_transformed(_OPERANDS[operator], operands, options)
    try:
        return operator(*operands, **options)
    except RuntimeError:
        checks.operand_types(operator._schema, operands, options)
        raise


def _scale(name: str, value: Tensor | float | None, like: Tensor) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    if not torch.compiler.is_compiling():
        check.number(name, value)
    return torch.full((), float(value), dtype=torch.float32, device=getattr(like, "device", None))


def _dtype_name(value: torch.dtype | str | None) -> str | None:
    return None if value is None else dtype_name(parse_dtype(value, "kv_dtype"))


def _modifiers(score_mod: modifiers.Modifier | str | None, mask_mod: modifiers.Modifier | str | None) -> dict[str, Any]:
    """The modifiers that there are, as the operator takes them: by name, and the tensors that they captured."""
    names = {f"{modifier.kind}_mod": modifier.name for modifier in modifiers.find_both(score_mod, mask_mod)}
    return {**names, "captures": list(modifiers.captured_tensors(score_mod, mask_mod)) or None}
