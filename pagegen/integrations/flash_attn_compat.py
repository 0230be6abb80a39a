"""The three functions of the flash-attn package that inference calls, on paged attention: for projects that look for
a module with these names. Same shapes and meanings; what a paged step cannot mean is refused by name.

Keys and values that are not in blocks yet are copied into blocks of 16 tokens first: one pass over them, beside the
attention's own of the whole prompt a query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagegen.integrations import flash_attn_checks as checks
from pagegen.ops import paged_attention, rope_write_kv, write_kv

_BLOCK = 16
Result = Tensor | tuple[Tensor | None, ...]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Result:
    """Attention of q [B, Sq, Hq, D] over k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv], which may have fewer heads.

    A causal mask is aligned to the last key, as flash-attn's is. `window_size` (left, right) needs right = 0, or
    `causal`; `softcap` 0 means none; `alibi_slopes` (which need `causal`, or one query) and the sinks `s_aux` are
    [Hq]. Returns [B, Sq, Hq, Dv], with `return_attn_probs` also the log-sum-exp float32 [B, Hq, Sq] and None. Raises
    ValueError naming the argument.
    """
    checks.dense(q, k, v)
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, queries)
    starts_q, starts_k = (torch.arange(batch + 1, dtype=torch.int32, device=q.device) * n for n in (queries, keys))
    out, lse = _varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts_q, starts_k, queries, keys, None, options
    )  # fmt: skip
    out = out.unflatten(0, (batch, queries))
    return (out, lse.view(batch, queries, heads).transpose(1, 2), None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Result:
    """`flash_attn_func` of sequences of different lengths: q [total_q, Hq, D], k and v [total_k, Hkv, D], of which
    sequence i has rows cu_seqlens[i] to cu_seqlens[i + 1]. With a `block_table` int32 [num_seqs, max_blocks], k and v
    are caches [num_blocks, block_size, Hkv, D], of which sequence i has cu_seqlens_k[i + 1] - cu_seqlens_k[i] tokens.

    Returns [total_q, Hq, Dv], with `return_attn_probs` also the log-sum-exp float32 [Hq, total_q] and None. Raises what
    `flash_attn_func` raises.
    """
    longest_q, longest_k = _host(max_seqlen_q), _host(max_seqlen_k)
    checks.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, paged=block_table is not None)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, longest_q)
    out, lse = _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, block_table, options)
    return (out, lse.T, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Result:
    """Writes this step's k and v [B, Sk, Hkv, D] behind the first `cache_seqlens` tokens (an int or int32 [B]) of each
    row of the cache, and attends q [B, Sq, Hq, D] over all of them.

    The caches are [num_blocks, block_size, Hkv, D] with a `block_table` int32 [B, max_blocks], or [B_cache, max_seqlen,
    Hkv, D], of whose rows `cache_batch_idx` [B] names those of q. With `rotary_cos` and `rotary_sin` [max_position,
    rotary_dim / 2], k and q are rotated at their positions first, which needs `causal` or one query. How keys are split
    is the tuned variant's choice, so `num_splits` is not used.

    Returns [B, Sq, Hq, Dv], with `return_softmax_lse` also the log-sum-exp float32 [B, Hq, Sq]. Raises ValueError for
    arguments that contradict each other and for `cache_leftpad`, besides what `paged_attention` raises.
    """
    if cache_leftpad is not None:
        raise ValueError("cache_leftpad must be None: a paged sequence begins at its first slot")
    if (k is None) != (v is None):
        raise ValueError(f"v must be given with k, got {'k' if v is None else 'v'} alone")
    checks.rotation(rotary_cos, rotary_sin, new=k is not None)
    if k is None or v is None:
        checks.dense(q, q, q)
    else:
        checks.dense(q, k, v)
    batch, queries, heads, _ = q.shape
    options = _options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, queries)
    k_blocks, v_blocks, table = _cache_blocks(k_cache, v_cache, block_table, cache_batch_idx, batch)
    most = table.shape[1] * k_blocks.shape[1]
    checks.lengths(cache_seqlens, batch, 0 if k is None else k.shape[1], most)
    before = _lengths(cache_seqlens, most, batch, q.device)
    q = q.flatten(0, 1)
    lengths = before
    if k is not None and v is not None:
        positions = before[:, None] + torch.arange(k.shape[1], device=q.device)
        slots = _slots(positions, table, k_blocks.shape[1])
        if rotary_cos is None or rotary_sin is None:
            _write(k.flatten(0, 1), k_blocks, slots)
        else:
            _check_rotation(queries, k.shape[1], options["causal"])
            q = rope_write_kv(
                q, k.flatten(0, 1), None, positions.flatten(), rotary_cos, rotary_sin, k_blocks, None, slots,
                interleaved=rotary_interleaved,
            )  # fmt: skip
        _write(v.flatten(0, 1), v_blocks, slots)
        lengths = before + k.shape[1]
    starts = None if queries == 1 else torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries
    found = paged_attention(
        q, k_blocks, v_blocks, table, lengths.to(torch.int32), query_start_loc=starts, max_query_len=queries,
        return_lse=True, **options,
    )  # fmt: skip
    out, lse = found[0].unflatten(0, (batch, queries)), found[1]
    return (out, lse.view(batch, queries, heads).transpose(1, 2)) if return_softmax_lse else out


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
    queries: int,
) -> dict[str, Any]:
    """What all three mean by their options, in this project's terms; `queries` is the most that a sequence has."""
    if dropout_p:
        raise ValueError(f"dropout_p must be 0: paged attention is for inference, got {dropout_p}")
    left, right = window_size
    windowed = left >= 0
    if (windowed or right >= 0) and not causal and right != 0:
        raise ValueError(
            "window_size must be (left, 0), or end at the query by causal=True, or be (-1, -1), "
            f"got {tuple(window_size)}"
        )
    checks.alibi(alibi_slopes, queries, causal=causal or right == 0)
    return {
        "scale": softmax_scale,
        "causal": causal or right == 0,
        "window": left + 1 if windowed else None,
        "logit_softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
        "sinks": s_aux,
    }


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    table: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    lengths = starts_k.diff().to(torch.int32)
    if table is None:
        k, v, table = _in_blocks(k, v, starts_k, longest_k)
    found = paged_attention(
        q, k, v, table, lengths, query_start_loc=starts_q.to(torch.int32), max_query_len=longest_q,
        max_seq_len=longest_k, return_lse=True, **options,
    )  # fmt: skip
    return found[0], found[1]


def _write(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Keys and values each by a call of their own: transformers hands one pool twice, with pages of both in it."""
    write_kv(rows, None, cache, None, slots)


def _in_blocks(k: Tensor, v: Tensor, starts: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """k and v [total, Hkv, D] in blocks, and the table. No length is read on the host, so there is a block a sequence
    more than all tokens together fill."""
    total, num_seqs = len(k), len(starts) - 1
    blocks = -(-starts.diff() // _BLOCK)
    first = blocks.cumsum(0) - blocks
    tokens = torch.arange(total, device=k.device)
    owner = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    known = owner.clamp(max=num_seqs - 1)
    slots = first[known] * _BLOCK + tokens - starts[known]
    slots = torch.where(owner < num_seqs, slots, -1)  # rows behind the last sequence
    most = total // _BLOCK + num_seqs
    caches = [x.new_empty(most, _BLOCK, *x.shape[1:]) for x in (k, v)]
    write_kv(k, v, caches[0], caches[1], slots.to(torch.int64))
    width = -(-longest // _BLOCK)
    table = (first[:, None] + torch.arange(width, device=k.device)).clamp(max=max(most - 1, 0))
    return caches[0], caches[1], table.to(torch.int32)


def _cache_blocks(
    k_cache: Tensor, v_cache: Tensor, table: Tensor | None, rows: Tensor | None, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The caches in blocks, and the table of q's rows."""
    if table is not None:
        if rows is not None:
            raise ValueError("cache_batch_idx must be None where a block_table says which blocks a row has")
        return k_cache, v_cache, table
    checks.cache(k_cache, v_cache, batch, named=rows is not None)
    if rows is not None:
        checks.named_rows(rows, batch, len(k_cache))
    longest = k_cache.shape[1]
    size = next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if longest % size == 0)
    named = torch.arange(batch, device=k_cache.device) if rows is None else rows
    table = named[:, None] * (longest // size) + torch.arange(longest // size, device=k_cache.device)
    k_blocks, v_blocks = (cache.unflatten(1, (-1, size)).flatten(0, 1) for cache in (k_cache, v_cache))
    if k_blocks.data_ptr() != k_cache.data_ptr() or v_blocks.data_ptr() != v_cache.data_ptr():
        raise ValueError("k_cache and v_cache must have rows that follow one another in memory")
    return k_blocks, v_blocks, table.to(torch.int32)


def _lengths(given: int | Tensor | None, most: int, batch: int, device: torch.device) -> Tensor:
    """Tokens in each row of the cache, int64 [B]: all of it where nothing is said."""
    if isinstance(given, Tensor):
        return given.to(torch.int64)
    return torch.full((batch,), most if given is None else given, dtype=torch.int64, device=device)


def _slots(positions: Tensor, table: Tensor, block_size: int) -> Tensor:
    """The slots of positions [B, n], int64 [B * n]."""
    blocks = table.gather(1, positions // block_size)
    return (blocks * block_size + positions % block_size).flatten()


def _check_rotation(queries: int, keys: int, causal: bool) -> None:
    if queries != keys:
        raise ValueError(f"q and k must have as many tokens where they are rotated, got {queries} and {keys}")
    if queries > 1 and not causal:
        raise ValueError("causal must be True where several queries are rotated: without it all get one position")


def _host(value: int | Tensor) -> int:
    return int(value.item()) if isinstance(value, Tensor) else value
