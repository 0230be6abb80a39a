"""Cascade attention: a prefix that sequences share is attended once, with all their queries as rows.

    prefix pass   every group is one sequence: its shared blocks, met by the queries of all its members; no mask
    own pass      every sequence over the blocks behind its prefix; causal and tree masks as ever, sinks counted here
    merge         of both states, row by row

Both passes are `pagegen.paged_attention`, so whatever serves a spec serves its cascade. The prefix pass reads K and V
of a prefix once a group instead of once a sequence; what that must pay for is a second launch and the merge:
`pagegen.lowering` (and `pagegen explain --shared-prefix`) weighs them.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from pagegen import modifiers
from pagegen.ops.api import paged_attention
from pagegen.ops.cascade_plan import Cascade, plan_cascade
from pagegen.spec import Variant
from pagegen.spec.shared_prefix import PrefixGroups, flat_reason

log = logging.getLogger(__name__)


def cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    prefix_groups: PrefixGroups | None = None,
    cascade: Cascade | None = None,
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
    prefix_variant: Variant | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`pagegen.paged_attention` of a batch in which sequences share leading blocks, which are read once a group.

    Arguments and results are those of `paged_attention`, equal within q's dtype (the two states are rounded to it
    before they are merged). What is shared is `cascade`, made once a step by `plan_cascade` from the same block table
    and lengths, or `prefix_groups` for a single call; with neither, or where nothing is shared, this is
    `paged_attention`. So it is for `batch_invariant`, score and mask functions, and a window that does not reach over
    the longest sequence; the log says so once. `variant` serves the own pass, `prefix_variant` the prefix pass.

    Nothing here waits for the device. Before capturing a CUDA graph, prepare both `spec` and
    `pagegen.spec.shared_prefix.prefix_spec(spec)`; a captured graph serves the one cascade it was captured with. Raises
    what `paged_attention` raises.
    """
    shared: dict[str, Any] = {
        "scale": scale, "logit_softcap": logit_softcap, "alibi_slopes": alibi_slopes, "k_scale": k_scale,
        "v_scale": v_scale, "k_zero": k_zero, "v_zero": v_zero, "kv_dtype": kv_dtype, "v_head_dim": v_head_dim,
    }  # fmt: skip
    own: dict[str, Any] = {
        **shared, "causal": causal, "window": window, "sinks": sinks, "tree_mask": tree_mask, "score_mod": score_mod,
        "mask_mod": mask_mod, "query_start_loc": query_start_loc, "max_query_len": max_query_len,
        "batch_invariant": batch_invariant, "out": out, "variant": variant,
    }  # fmt: skip
    if cascade is not None and prefix_groups is not None:
        raise ValueError("prefix_groups must be None where cascade is given, got both")
    longest = block_table.shape[1] * k_cache.shape[1] if max_seq_len is None else max_seq_len
    reason = flat_reason(
        window=window, score_mod=score_mod, mask_mod=mask_mod, batch_invariant=batch_invariant, max_seq_len=longest
    )
    if reason is not None and (cascade is not None or prefix_groups) and not torch.compiler.is_compiling():
        _announce_flat(reason)
    if prefix_groups and reason is None:
        counts = _counts(query_start_loc)
        cascade = plan_cascade(prefix_groups, block_table, seq_lens, block_size=k_cache.shape[1], query_lens=counts)
    if cascade is None or reason is not None:
        return paged_attention(
            q, k_cache, v_cache, block_table, seq_lens, max_seq_len=max_seq_len, return_lse=return_lse, **own
        )
    _check_cascade(cascade, q, k_cache, seq_lens)
    prefix_state = _prefix_pass(cascade, q, k_cache, v_cache, prefix_variant, shared)
    own_longest = None if max_seq_len is None else max(max_seq_len - cascade.least_shared, 0)
    own_state = paged_attention(
        q, k_cache, v_cache, cascade.block_table, cascade.seq_lens, max_seq_len=own_longest, return_lse=True, **own
    )
    result, lse = _merge(cascade, prefix_state, (own_state[0], own_state[1]))
    return (result, lse) if return_lse else result


def _counts(query_start_loc: Tensor | None) -> list[int] | None:
    """Queries of each sequence, as far as the host can know them without waiting."""
    if query_start_loc is None:
        return None
    if query_start_loc.device.type != "cpu":
        raise ValueError(
            "prefix_groups without cascade must come with a query_start_loc on the CPU or none, since reading it from "
            f"{query_start_loc.device} waits for the device: pass cascade=plan_cascade(..., query_lens=...)"
        )
    counts: list[int] = query_start_loc.diff().tolist()
    return counts


def _prefix_pass(
    cascade: Cascade,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    variant: Variant | str | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The state of every query that stands behind a prefix, over that prefix: [num_rows, Hq, Dv] and its lse."""
    first, count = cascade.first_row, len(cascade.rows)
    rows = q.index_select(0, cascade.rows) if first is None else q[first : first + count]
    state = paged_attention(
        rows, k_cache, v_cache, cascade.prefix_table, cascade.prefix_lens, causal=False,
        query_start_loc=cascade.prefix_starts, max_query_len=cascade.prefix_max_query_len,
        max_seq_len=cascade.prefix_max_seq_len, return_lse=True, variant=variant, **options,
    )  # fmt: skip
    out, lse = state
    slopes = options["alibi_slopes"]
    if slopes is not None:  # a bias of slope * (k_pos - q_pos): another q_pos moves a row's scores by one number
        lse = lse + cascade.distance[:, None] * slopes.float()
    return out, lse


def _merge(cascade: Cascade, prefix: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Both states in the own pass's tensors; rows behind no prefix have theirs there already. What `merge_states` does,
    for two states: on a CPU in one launch, elsewhere in ten instead of twenty: half of a short step's time."""
    first, count = cascade.first_row, len(cascade.rows)
    if own[0].device.type == "cpu":
        out, own_lse = own if first is None else (state[first : first + count] for state in own)
        torch.ops.pagegen.merge_into(out, own_lse, *prefix, cascade.rows if first is None else None)
        return own
    if first is not None:
        out, own_lse = (state[first : first + count] for state in own)
    else:
        out, own_lse = (state.index_select(0, cascade.rows) for state in own)
    lse = torch.logaddexp(prefix[1], own_lse)
    share = torch.sigmoid(prefix[1] - own_lse).nan_to_num(0.5)  # both states are empty, or both are infinite
    merged = torch.lerp(out.float(), prefix[0].float(), share[..., None])
    for state, rows in zip(own, (merged, lse), strict=True):
        if first is not None:
            state[first : first + count].copy_(rows)
        else:
            state.index_copy_(0, cascade.rows, rows.to(state.dtype))
    return own


def _check_cascade(cascade: Cascade, q: Tensor, k_cache: Tensor, seq_lens: Tensor) -> None:
    made = (cascade.block_size, len(cascade.seq_lens))
    given = (k_cache.shape[1], len(seq_lens))
    if made != given or cascade.num_queries > q.shape[0]:
        raise ValueError(
            f"cascade must be of this batch: made for block size and sequences {made} and {cascade.num_queries} "
            f"queries, got {given} and {q.shape[0]}"
        )


@functools.cache
def _announce_flat(reason: str) -> None:
    log.warning("cascade_attention attends every sequence by itself: %s", reason)
