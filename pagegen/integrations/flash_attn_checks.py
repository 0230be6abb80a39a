"""What flash-attention's functions accept here. Most of it would otherwise attend memory that nobody wrote, or other
rows than those meant, without an error: the operator sees blocks and lengths, not what they were made of."""

from __future__ import annotations

import torch
from torch import Tensor

from pagegen.ops import checks

_DENSE = "[batch, seqlen, heads, head_dim]"
_PACKED = "[total, heads, head_dim]"
_INTEGERS = (torch.int32, torch.int64)


def dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v are of one batch, and each key has a value."""
    checks.tensor("q", q, _DENSE, checks.FLOATS, None)
    rows(k, v, q)


def rows(k: Tensor, v: Tensor, q: Tensor) -> None:
    """New keys and values, one of each a token, of the batch of q."""
    checks.tensor("k", k, _DENSE, checks.FLOATS, q.device)
    checks.tensor("v", v, _DENSE, (k.dtype,), q.device)
    checks.sizes("k", k, (q.shape[0], None, None, q.shape[3]), _DENSE)
    checks.sizes("v", v, (*k.shape[:3], None), _DENSE)


def packed(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int, *, paged: bool
) -> None:
    """Sequences of different lengths, one behind the other, or with keys in blocks."""
    checks.tensor("q", q, _PACKED, checks.FLOATS, None)
    if not paged:
        checks.tensor("k", k, _PACKED, checks.FLOATS, q.device)
        checks.tensor("v", v, _PACKED, (k.dtype,), q.device)
        checks.sizes("v", v, (*k.shape[:2], None), _PACKED)
    checks.tensor("cu_seqlens_q", starts_q, "[num_seqs + 1]", _INTEGERS, q.device)
    checks.tensor("cu_seqlens_k", starts_k, "[num_seqs + 1]", _INTEGERS, q.device)
    if not len(starts_q):
        raise ValueError("cu_seqlens_q must hold the first start, got none")
    checks.sizes("cu_seqlens_k", starts_k, (len(starts_q),), "[num_seqs + 1]")
    if _readable(starts_q):
        _starts("q", starts_q.tolist(), len(q), longest_q)
        _starts("k", starts_k.tolist(), None if paged else len(k), longest_k)


def _starts(letter: str, starts: list[int], total: int | None, longest: int) -> None:
    name = f"cu_seqlens_{letter}"
    lengths = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    if starts[0] < 0 or min(lengths, default=0) < 0 or (total is not None and starts[-1] > total):
        ends = "" if total is None else f" and end at most at {total}"
        raise ValueError(f"{name} must rise from 0{ends}, got {starts}")
    if max(lengths, default=0) > longest:
        raise ValueError(f"max_seqlen_{letter} must be at least {max(lengths)}, got {longest}")


def cache(k_cache: Tensor, v_cache: Tensor, batch: int, *, named: bool) -> None:
    """Caches [batch, max_seqlen, heads, head_dim], with a row for each of q's unless others are `named`."""
    checks.tensor("k_cache", k_cache, _DENSE, (*checks.FLOATS, *checks.EIGHT_BIT), None)
    checks.tensor("v_cache", v_cache, _DENSE, (k_cache.dtype,), k_cache.device)
    checks.sizes("v_cache", v_cache, (*k_cache.shape[:3], None), _DENSE)
    if not named and k_cache.shape[0] < batch:
        raise ValueError(f"k_cache must have {batch} rows like q, got {checks.describe(k_cache)}")


def named_rows(index: Tensor, batch: int, num_rows: int) -> None:
    """`cache_batch_idx` [batch] of rows of the cache."""
    checks.tensor("cache_batch_idx", index, "[batch]", _INTEGERS, None)
    checks.sizes("cache_batch_idx", index, (batch,), "[batch]")
    if _readable(index) and not all(0 <= row < num_rows for row in index.tolist()):
        raise ValueError(f"cache_batch_idx must be in 0..{num_rows - 1}, got {index.tolist()}")


def lengths(given: int | Tensor | None, batch: int, new: int, most: int) -> None:
    """`cache_seqlens`, behind which `new` tokens must fit."""
    if isinstance(given, Tensor):
        checks.tensor("cache_seqlens", given, "[batch]", _INTEGERS, None)
        checks.sizes("cache_seqlens", given, (batch,), "[batch]")
        found = given.tolist() if _readable(given) else []
    else:
        found = [most if given is None else given]
    if not all(0 <= length <= most - new for length in found):
        raise ValueError(f"cache_seqlens must be in 0..{most - new} ({new} new tokens, room for {most}), got {given}")


def rotation(cos: Tensor | None, sin: Tensor | None, *, new: bool) -> None:
    """`rotary_cos` and `rotary_sin` come together, and with keys to rotate."""
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin must both be given or both be None, got one without the other")
    if cos is not None and not new:
        raise ValueError("rotary_cos must be None where no k is given to rotate and write")


def alibi(slopes: Tensor | None, queries: int, *, causal: bool) -> None:
    """flash-attn's bias falls off to both sides of a query, the operator's rises behind it: they are one bias where a
    query sees no key behind its own."""
    if slopes is None:
        return
    if slopes.dim() != 1:
        raise ValueError(f"alibi_slopes must be [num_heads], got {list(slopes.shape)}")
    if not causal and queries > 1:
        raise ValueError(
            f"alibi_slopes must be None unless causal, or of one query, got causal=False, {queries} queries"
        )


def _readable(tensor: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device; on a GPU, PAGEGEN_CHECK=1 looks at what the
    operator gets of them."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
