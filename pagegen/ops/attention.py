"""The attention operator's implementation: check, find the prepared kernel, run it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagegen import settings
from pagegen.ops import checks, gradients, operands, plans
from pagegen.ops.schemas import LIBRARY
from pagegen.reference import reference_attention, value_width
from pagegen.spec import AttentionSpec, CacheLayout, Variant
from pagegen.targets.call import AttentionCall, AttentionKernel

# What a call looks like to the host -> its plan. A tuple of integers and strings costs 1 us to hash where a
# validated AttentionSpec costs 20 us to build.
PLANS: dict[tuple[Any, ...], plans.Plan] = {}
# What the checks look at, of calls that passed them -> what follows from it. Checking costs 25 us, the look-up 2. The
# keys hold shapes, strides and dtypes, never a tensor; whatever differs from a call that passed is checked.
_PASSED: dict[tuple[Any, ...], _Known] = {}
_MOST_PASSED = 4096  # of 2 KiB each; then they are forgotten
_UNSEEN = ("captures", "variant")  # looked at in every call


@dataclass(frozen=True, slots=True)
class _Known:
    """What the shapes and options of a call say: the key of its plan, the columns of a value, whether sequences have
    any number of queries, and the most queries and keys that one of them can have where the caller bounds neither."""

    key: tuple[Any, ...]
    width: int
    ragged: bool
    queries: int
    keys: int


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    out: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`torch.ops.pagegen.paged_attention`; see `pagegen.paged_attention` for the arguments."""
    if q.requires_grad or k_cache.requires_grad or (v_cache is not None and v_cache.requires_grad):  # a call: 0.3 us
        gradients.refuse(q=q, k_cache=k_cache, v_cache=v_cache)
    seen = _seen(q, k_cache, v_cache, block_table, seq_lens, options)
    passed = _PASSED.get(seen)
    known = passed or _checked(q, k_cache, v_cache, block_table, seq_lens, options)
    if settings.check_values():
        _check_values(q, k_cache, block_table, seq_lens, options)
    given = out is not None
    if out is None:
        out = _allocate(q, known)
    else:
        gradients.refuse(out=out)
        checks.output(out, q, known.width, k_cache, v_cache)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32) if return_lse else q.new_empty(0, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    options["captures"] = captures = operands.captures(q, options)
    plan = PLANS.get(known.key) or _plan(known, q, k_cache, v_cache, options)
    if passed is None:
        _remember(seen, known)
    max_query_len, max_seq_len = _bounds(known, options)
    kernel = _kernel(plan, seq_lens.shape[0], max_query_len, max_seq_len, options.get("variant"))
    if kernel is None:
        _dense(q, k_cache, v_cache, block_table, seq_lens, out, lse if return_lse else None, options)
        return out, lse
    keys, values = operands.caches(k_cache, v_cache, plan.spec)
    if given and known.ragged:  # only now: nothing can be refused any more
        out.zero_()
    kernel(
        AttentionCall(
            q=q,
            k_cache=keys,
            v_cache=values,
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=options.get("query_start_loc"),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            scale=plan.spec.scale,
            alibi_slopes=_float32(options.get("alibi_slopes")),
            sinks=_float32(options.get("sinks")),
            out=out,
            lse=lse if return_lse else None,
            tree_mask=options.get("tree_mask"),
            captures=captures,
            **operands.scales(k_cache, options, shared_kv=plan.spec.shared_kv),
        )
    )
    return out, lse


def _kernel(
    plan: plans.Plan, num_seqs: int, max_query_len: int, max_seq_len: int, named: str | None
) -> AttentionKernel | None:
    """The kernel for a call, or None where the dense path serves it. Raises ValueError when a variant was named and
    no kernel can serve the call."""
    if named is None:
        return plan.kernel(num_seqs, max_query_len, max_seq_len)
    if plan.dense_reason is None:
        return plan.load(Variant.parse(named))
    raise ValueError(f"variant must be None where no generated kernel serves ({plan.dense_reason}), got {named}")


def _checked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, seq_lens: Tensor, options: dict[str, Any]
) -> _Known:
    """What is known of a call that was not seen before. Raises TypeError or ValueError naming the argument."""
    gradients.refuse(**{name: value for name, value in options.items() if isinstance(value, Tensor)})
    _check(q, k_cache, v_cache, block_table, seq_lens, **options)
    width = value_width(v_cache, options.get("v_head_dim"), options.get("kv_dtype"))
    ragged = options.get("query_start_loc") is not None
    return _Known(
        key=_plan_key(q, k_cache, v_cache, width, options),
        width=width,
        ragged=ragged,
        queries=q.shape[0] if ragged else 1,
        keys=block_table.shape[1] * k_cache.shape[1],
    )


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, seq_lens: Tensor, **options: Any
) -> None:
    named = ("query_start_loc", "max_query_len", "max_seq_len", "window", "logit_softcap", "kv_dtype", "v_head_dim")
    checks.attention(q, k_cache, v_cache, block_table, seq_lens, **{name: options.get(name) for name in named})
    for name in ("alibi_slopes", "sinks"):
        checks.per_head(name, options.get(name), q.shape[1], q.device)
    checks.scales(k_cache, v_cache, options.get("kv_dtype"), options)
    tree_mask = options.get("tree_mask")
    ragged = options.get("query_start_loc") is not None
    checks.tree_mask(tree_mask, q, options.get("max_query_len"), ragged=ragged)


def _check_values(q: Tensor, k_cache: Tensor, block_table: Tensor, seq_lens: Tensor, options: dict[str, Any]) -> None:
    bounds = {name: options.get(name) for name in ("query_start_loc", "max_query_len", "max_seq_len", "tree_mask")}
    checks.validate_batch(k_cache, block_table, seq_lens, total_q=q.shape[0], **bounds)


def _seen(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, seq_lens: Tensor, options: dict[str, Any]
) -> tuple[Any, ...]:
    """All that `_check` and `_plan_key` look at. (One flat list: a function a tensor took 1.5 us more.)"""
    found: list[Any] = [
        q.shape, q.stride(), q.dtype, q.device, k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device,
        block_table.shape, block_table.stride(), block_table.dtype, block_table.device,
        seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.device,
    ]  # fmt: skip
    if v_cache is not None:
        found += v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device
    for name, value in options.items():
        if isinstance(value, Tensor):
            found += name, value.shape, value.stride(), value.dtype, value.device, gradients.wanted(value)
        elif name == "max_seq_len":
            found.append(value is not None and value < 0)
        elif name not in _UNSEEN:
            found += name, value
    return tuple(found)


def _remember(seen: tuple[Any, ...], known: _Known) -> None:
    if len(_PASSED) >= _MOST_PASSED:
        _PASSED.clear()
    _PASSED[seen] = known


def _allocate(q: Tensor, known: _Known) -> Tensor:
    """Rows that belong to no sequence must be 0, and only a ragged call can have such rows."""
    total_q, heads, _ = q.shape
    made: Tensor = (q.new_zeros if known.ragged else q.new_empty)(total_q, heads, known.width)  # a tuple: 0.4 us more
    return made


def _bounds(known: _Known, options: dict[str, Any]) -> tuple[int, int]:
    """Upper bounds known without a synchronisation."""
    queries, keys = options.get("max_query_len"), options.get("max_seq_len")
    most_queries = known.queries if queries is None else int(queries)
    return most_queries, known.keys if keys is None else min(int(keys), known.keys)


def _float32(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(torch.float32)


def _plan_key(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, width: int, options: dict[str, Any]
) -> tuple[Any, ...]:
    """What decides a call's plan."""
    option = options.get
    granularity = _granularity(option("k_scale"), option("v_scale"))
    zeros = option("k_zero") is not None or option("v_zero") is not None
    return (
        q.shape[1:], width, k_cache.shape[1:], k_cache.dtype, q.dtype, q.device, plans.order_of(k_cache),
        v_cache is None, option("scale"), option("causal", True), option("window"), option("logit_softcap"),
        option("alibi_slopes") is None, option("sinks") is None, granularity, zeros,
        option("score_mod"), option("mask_mod"), option("kv_dtype"), option("batch_invariant", False),
    )  # fmt: skip


def _plan(known: _Known, q: Tensor, k_cache: Tensor, v_cache: Tensor | None, options: dict[str, Any]) -> plans.Plan:
    """The plan of calls of one key, from now on in PLANS."""
    option = options.get
    spec = AttentionSpec(
        num_q_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        v_head_dim=known.width,
        q_dtype=q.dtype,
        kv_dtype=option("kv_dtype") or k_cache.dtype,
        scale=option("scale"),  # type: ignore[arg-type]  # None is the default scale
        causal=option("causal", True),
        window=option("window"),
        logit_softcap=option("logit_softcap"),
        alibi=option("alibi_slopes") is not None,
        sinks=option("sinks") is not None,
        kv_scale_granularity=_granularity(option("k_scale"), option("v_scale")),
        kv_zero_points=option("k_zero") is not None or option("v_zero") is not None,
        shared_kv=v_cache is None,
        score_mod=option("score_mod"),
        mask_mod=option("mask_mod"),
        batch_invariant=option("batch_invariant", False),
    )
    layout = CacheLayout(block_size=k_cache.shape[1], order=plans.order_of(k_cache))
    plan = PLANS[known.key] = plans.lookup(spec, layout, plans.target_of(q.device))
    return plan


def _granularity(*scales: Tensor | None) -> str:
    """The finest granularity among the scales of a call."""
    given = [scale for scale in scales if scale is not None]
    if not given:
        return "none"
    if any(scale.dim() == 3 for scale in given):
        return "token_head"
    return "head" if any(scale.numel() > 1 for scale in given) else "tensor"


def _dense(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Gathers each sequence's blocks and computes in float32: what serves a call that no kernel does."""
    rows, row_lse = reference_attention(
        q, k_cache, v_cache, block_table, seq_lens, return_lse=True, compute_dtype=torch.float32, **options
    )
    out.copy_(rows)
    if lse is not None:
        lse.copy_(row_lse)


def _paged_attention_out(q: Tensor, *others: Tensor, out: Tensor, **options: Any) -> Tensor:
    return paged_attention(q, *others, out=out, **options)[1]


for key in ("CPU", "CUDA"):  # ROCm uses the CUDA key too
    LIBRARY.impl("paged_attention", paged_attention, key)
    LIBRARY.impl("paged_attention.out", _paged_attention_out, key)
