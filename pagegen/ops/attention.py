"""The attention operator's implementation: check, find the prepared kernel, run it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagegen import settings
from pagegen.ops import checks, gradients, operands, plans, repeated
from pagegen.ops.schemas import LIBRARY
from pagegen.reference import reference_attention, value_width
from pagegen.spec import AttentionSpec, CacheLayout, Variant
from pagegen.targets.call import AttentionCall, AttentionKernel

# PAGEGEN_TARGET, and what a call looks like to the host -> its plan. A tuple of integers and strings costs 1 us to hash
# where a validated AttentionSpec costs 20 us to build.
PLANS: dict[tuple[Any, ...], plans.Plan] = {}
# What the checks look at, of calls that passed them -> what follows from it. Checking costs 25 us, the look-up 4. The
# keys hold shapes, strides and dtypes, never a tensor; whatever differs from a call that passed is checked.
_PASSED: dict[tuple[Any, ...], _Known] = {}
_MOST_PASSED = 4096  # of 2 KiB each; then they are forgotten
# The last of them with their kernels: another 4 us less where a call differs in its memory alone.
_RECENT: repeated.Recent[_Prepared] = repeated.Recent()
_UNSEEN = ("max_seq_len", "variant")  # the form of a call does not depend on them
_TENSORS = frozenset(("query_start_loc", "alibi_slopes", "sinks", "tree_mask", *checks.SCALES))


@dataclass(frozen=True, slots=True)
class _Known:
    """What the shapes and options of a call say: the key of its plan, the shape of its result, whether sequences have
    any number of queries, the most queries and keys that one of them can have where the caller bounds neither, and
    whether there are scales or modifiers."""

    key: tuple[Any, ...]
    shape: tuple[int, int, int]
    ragged: bool
    queries: int
    keys: int
    scaled: bool
    modified: bool


class _Prepared(NamedTuple):
    """What serves a call, and the bounds it is told."""

    known: _Known
    plan: plans.Plan
    kernel: AttentionKernel | None
    max_query_len: int
    max_seq_len: int


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    out: Tensor | None = None,
    return_lse: bool = False,
    captures: Sequence[Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`torch.ops.pagegen.paged_attention`; see `pagegen.paged_attention` for the arguments."""
    tensors, values = _divided(q, k_cache, v_cache, block_table, seq_lens, options)
    recent = _RECENT
    prepared = recent.find(tensors, values)
    known = prepared.known if prepared else _known(tensors, q, k_cache, v_cache, block_table, seq_lens, options)
    if settings.check_values():
        _check_values(q, k_cache, block_table, seq_lens, options)
    if out is None:
        out = q.new_empty(*known.shape)  # a tuple: 0.4 us more
    else:
        gradients.refuse(out=out)
        checks.output(out, q, known.shape[2], k_cache, v_cache)
    lse = _lse(q, known) if return_lse else q.new_empty(0, dtype=torch.float32)
    if 0 in known.shape:
        return out, lse
    captured = operands.captures(q, options, captures) if known.modified or captures else ()
    if prepared is None:
        prepared = _prepared(known, q, k_cache, v_cache, seq_lens, options)
        recent.keep(tensors, values, prepared)
    if prepared.kernel is None:
        options["captures"] = captured
        _dense(q, k_cache, v_cache, block_table, seq_lens, out, lse if return_lse else None, options)
        return out, lse
    spec = prepared.plan.spec
    keys, read = operands.caches(k_cache, v_cache, spec)
    if known.ragged:  # rows that belong to no sequence must be 0; only now, when nothing can be refused any more
        out.zero_()
    scales = operands.scales(k_cache, options, shared_kv=spec.shared_kv) if known.scaled else operands.NO_SCALES
    option = options.get
    slopes, sinks = option("alibi_slopes"), option("sinks")
    prepared.kernel(  # by position: 0.5 us less
        AttentionCall(
            q, keys, read, block_table, seq_lens, option("query_start_loc"), prepared.max_query_len,
            prepared.max_seq_len, spec.scale, None if slopes is None else _float32(slopes),
            None if sinks is None else _float32(sinks), out, lse if return_lse else None, *scales,
            option("tree_mask"), captured,
        )
    )  # fmt: skip
    return out, lse


def forget() -> None:
    """Every plan is looked up anew: what is prepared has changed. What a call of another thread found before, it keeps
    where nobody looks any more."""
    global PLANS, _RECENT
    PLANS, _RECENT = {}, repeated.Recent()


def _divided(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, seq_lens: Tensor, options: dict[str, Any]
) -> tuple[list[Tensor], list[Any]]:
    """The tensors of a call, and the values of its other options behind the target, whether V is part of K, and the
    names of all."""
    tensors = [q, k_cache, block_table, seq_lens]
    values: list[Any] = [settings.target_name(), v_cache is None, *options]
    if v_cache is not None:
        tensors.append(v_cache)
    for name, value in options.items():
        (tensors if name in _TENSORS and value is not None else values).append(value)
    return tensors, values


def _known(
    tensors: list[Tensor],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    options: dict[str, Any],
) -> _Known:
    """What is known of a call. Raises TypeError or ValueError naming the argument."""
    bounded = options.get("max_seq_len")
    others = tuple(given for given in options.items() if given[0] not in _UNSEEN and not isinstance(given[1], Tensor))
    seen = (repeated.form(tensors), v_cache is None, tuple(options), bounded is not None and bounded < 0, others)
    known = _PASSED.get(seen)
    if known is None:
        known = _checked(q, k_cache, v_cache, block_table, seq_lens, options)
        if len(_PASSED) >= _MOST_PASSED:
            _PASSED.clear()
        _PASSED[seen] = known
    return known


def _checked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, seq_lens: Tensor, options: dict[str, Any]
) -> _Known:
    """What follows from a call that was not seen before. Raises TypeError or ValueError naming the argument."""
    gradients.refuse(q=q, k_cache=k_cache, v_cache=v_cache)
    gradients.refuse(**{name: value for name, value in options.items() if name in _TENSORS})
    _check(q, k_cache, v_cache, block_table, seq_lens, **options)
    width = value_width(v_cache, options.get("v_head_dim"), options.get("kv_dtype"))
    ragged = options.get("query_start_loc") is not None
    return _Known(
        key=_plan_key(q, k_cache, v_cache, width, options),
        shape=(q.shape[0], q.shape[1], width),
        ragged=ragged,
        queries=q.shape[0] if ragged else 1,
        keys=block_table.shape[1] * k_cache.shape[1],
        scaled=any(options.get(name) is not None for name in checks.SCALES),
        modified=options.get("score_mod") is not None or options.get("mask_mod") is not None,
    )


def _prepared(
    known: _Known,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seq_lens: Tensor,
    options: dict[str, Any],
) -> _Prepared:
    """The plan and the kernel for a call."""
    key, made = (settings.target_name(), known.key), PLANS
    plan = made.get(key)
    if plan is None:
        plan = made[key] = _plan(known, q, k_cache, v_cache, options)
    max_query_len, max_seq_len = _bounds(known, options)
    kernel = _kernel(plan, seq_lens.shape[0], max_query_len, max_seq_len, options.get("variant"))
    return _Prepared(known, plan, kernel, max_query_len, max_seq_len)


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


def _lse(q: Tensor, known: _Known) -> Tensor:
    """Every row of a decode call is written. A ragged one has rows that are not: of no sequence, they are empty."""
    made: Tensor = q.new_empty(*known.shape[:2], dtype=torch.float32)  # filled at once: 0.4 us more
    return made.fill_(-math.inf) if known.ragged else made


def _bounds(known: _Known, options: dict[str, Any]) -> tuple[int, int]:
    """Upper bounds known without a synchronisation."""
    queries, keys = options.get("max_query_len"), options.get("max_seq_len")
    most_queries = known.queries if queries is None else int(queries)
    return most_queries, known.keys if keys is None else min(int(keys), known.keys)


def _float32(value: Tensor) -> Tensor:
    return value if value.dtype is torch.float32 else value.to(torch.float32)


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
    """The plan of calls of one key."""
    option = options.get
    spec = AttentionSpec(
        num_q_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        v_head_dim=known.shape[2],
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
    return plans.lookup(spec, layout, plans.target_of(q.device))


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
