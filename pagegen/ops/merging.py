"""Operators that merge partial states: `merge_states`, and `merge_into` for a cascade."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagegen.ops import checks, gradients, plans
from pagegen.ops.schemas import LIBRARY
from pagegen.targets.cache_call import Merger, State

_OUT = "[total_q, num_q_heads, v_head_dim]"
_LSE = "[total_q, num_q_heads]"


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.ops.pagegen.merge_states`; see `pagegen.merge_states`."""
    gradients.refuse(outs=outs, lses=lses)
    checks.tensor("outs", outs, "[num_states, total_q, num_q_heads, v_head_dim]", checks.FLOATS, None)
    checks.tensor("lses", lses, "[num_states, total_q, num_q_heads]", (torch.float32,), outs.device)
    checks.sizes("lses", lses, tuple(outs.shape[:3]), "[num_states, total_q, num_q_heads]")
    if not len(outs):
        raise ValueError(f"outs must hold at least one state, got {checks.describe(outs)}")
    merger = _merger(outs)
    if merger is None:
        return merge_by_torch(outs, lses)
    return _merged(merger, outs.unbind(), lses.unbind())


def merge_listed_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`torch.ops.pagegen.merge_states.list`: the same of states that lie apart, which no copy brings together where a
    kernel merges."""
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs and lses must be one state or more, as many of each, got {len(outs)} and {len(lses)}")
    first = outs[0]
    rows: list[Tensor] = []
    for out, lse in zip(outs, lses, strict=True):
        gradients.refuse(outs=out, lses=lse)
        row = out if out.stride(-1) == 1 else out.contiguous()
        checks.tensor("outs", row, _OUT, checks.FLOATS if out is first else (first.dtype,), first.device)
        checks.sizes("outs", row, tuple(first.shape), _OUT)
        checks.tensor("lses", lse, _LSE, (torch.float32,), first.device)
        checks.sizes("lses", lse, tuple(first.shape[:2]), _LSE)
        rows.append(row)
    merger = _merger(first)
    if merger is None:
        return merge_by_torch(torch.stack(rows), torch.stack(list(lses)))
    return _merged(merger, rows, lses)


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, rows: Tensor | None) -> None:
    """`torch.ops.pagegen.merge_into`: a state's rows (`rows` int64, or all) become what merging them with the rows of
    another one gives. out [total_q, Hq, Dv] and lse float32 [total_q, Hq] change in place; the other has as many rows
    as are named. An operator of the package's own: its caller has checked what it passes."""
    merger = _merger(out)
    if merger is not None:
        if len(other_out):
            merger(State(out, lse, rows), (State(other_out, other_lse), State(out, lse, rows)))
        return
    held = (out, lse) if rows is None else (out.index_select(0, rows), lse.index_select(0, rows))
    merged = merge_by_torch(torch.stack([other_out, held[0]]), torch.stack([other_lse, held[1]]))
    for state, values in zip((out, lse), merged, strict=True):
        if rows is None:
            state.copy_(values)
        else:
            state.index_copy_(0, rows, values)


def _merger(states: Tensor) -> Merger | None:
    from pagegen import targets

    return targets.state_merger(plans.target_of(states.device))


def _merged(merger: Merger, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    target = State(outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape))
    if target.out.numel() or target.lse.numel():
        merger(target, [State(out, lse) for out, lse in zip(outs, lses, strict=True)])
    return target.out, target.lse


def merge_by_torch(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The merged state of outs [num_states, num_rows, Hq, Dv] and lses float32 [num_states, num_rows, Hq] by torch's
    own operators, twenty launches."""
    top = lses.amax(dim=0)
    # an empty state has lse -inf: weigh it 0 without ever computing -inf - -inf
    behind = lses - top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(behind.masked_fill(lses == torch.inf, 0.0))  # nor inf - inf: these outweigh all others
    total = weights.sum(dim=0)
    shares = weights / total.masked_fill(total == 0, 1.0)
    merged = (outs.float().masked_fill((weights == 0)[..., None], 0.0) * shares[..., None]).sum(dim=0)
    return merged.to(outs.dtype), top + torch.log(total.masked_fill(total == 0, 1.0))


_IMPLEMENTATIONS: dict[str, Any] = {
    "merge_states": merge_states,
    "merge_states.list": merge_listed_states,
    "merge_into": merge_into,
}
for _name, _function in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _function, _key)
