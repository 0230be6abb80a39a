"""Modifiers that come with pagegen. Those made from numbers alone are found by name in every process.

Make them outside of functions that torch compiles, or give those the name alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagegen.modifiers.registry import REGISTERED, Modifier, register
from pagegen.spec import check


def causal() -> Modifier:
    """A query sees the keys up to its own position: the option `causal` as a mask function."""

    def mask(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return k_pos <= q_pos

    return register("mask", mask, "causal()")


def sliding_window(size: int) -> Modifier:
    """A query sees keys that are less than `size` positions before it: the option `window`, whose own key counts.
    Raises TypeError or ValueError for a size that is no integer of at least 1."""
    check.integer("size", size)

    def mask(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return k_pos > q_pos - size

    return register("mask", mask, f"sliding_window({size})")


def chunked(size: int) -> Modifier:
    """A query sees the keys of its own chunk of `size` positions (the local layers of Llama 4). Raises TypeError or
    ValueError for a size that is no integer of at least 1."""
    check.integer("size", size)

    def mask(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return k_pos // size == q_pos // size

    return register("mask", mask, f"chunked({size})")


def prefix_lm(prefix_lengths: Tensor) -> Modifier:
    """Sequence s sees its first prefix_lengths[s] keys from everywhere, and the others causally. To be used with
    `causal=False`. `prefix_lengths` is int32 or int64 [num_seqs]. Raises TypeError or ValueError for another."""
    _integers("prefix_lengths", prefix_lengths, 1)

    def mask(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return (k_pos <= q_pos) | (k_pos < prefix_lengths[batch])

    return register("mask", mask, f"prefix_lm({_name(prefix_lengths)})")


def documents(starts: Tensor, ends: Tensor | None = None) -> Modifier:
    """Packed documents: a query at position p of sequence s sees keys from starts[s, p] on, where its document begins,
    up to itself, or with `ends` (and `causal=False`) to all before ends[s, p]. Both are int32 or int64 [num_seqs,
    positions]; a position past the last column counts as the last. Raises TypeError or ValueError for others."""
    _integers("starts", starts, 2)
    if ends is None:

        def mask(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
            return (k_pos >= starts[batch, q_pos]) & (k_pos <= q_pos)

        return register("mask", mask, f"documents({_name(starts)})")
    _integers("ends", ends, 2)

    def between(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return (k_pos >= starts[batch, q_pos]) & (k_pos < ends[batch, q_pos])

    return register("mask", between, f"documents({_name(starts)}, {_name(ends)})")


def soft_cap(cap: float) -> Modifier:
    """cap * tanh(score / cap): the option `logit_softcap` as a score function. Raises TypeError or ValueError for a cap
    that is not positive and finite."""
    if check.number("cap", cap) <= 0:
        raise ValueError(f"cap must be positive, got {cap!r}")
    cap = float(cap)

    def score_function(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return register("score", score_function, f"soft_cap({cap!r})")


def alibi(slopes: Tensor) -> Modifier:
    """score + slopes[head] * (k_pos - q_pos): the option `alibi_slopes` as a score function. `slopes` is float32
    [num_q_heads]. Raises TypeError or ValueError for another."""
    check.instance("slopes", slopes, Tensor)
    if slopes.dtype != torch.float32 or slopes.dim() != 1:
        raise ValueError(f"slopes must be float32 [num_q_heads], got {_name(slopes)} {list(slopes.shape)}")

    def score_function(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return score + slopes[head] * (k_pos - q_pos)

    return register("score", score_function, "alibi(float32)")


def _integers(name: str, value: Tensor, rank: int) -> None:
    check.instance(name, value, Tensor)
    if value.dtype not in (torch.int32, torch.int64) or value.dim() != rank:
        shape = "[num_seqs]" if rank == 1 else "[num_seqs, positions]"
        raise ValueError(f"{name} must be int32 or int64 {shape}, got {_name(value)} {list(value.shape)}")


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# What a name alone stands for; those over tensors are not here, since a name does not hold a tensor.
_FROM_NUMBERS: dict[str, Callable[..., Modifier]] = {
    "causal": causal,
    "sliding_window": sliding_window,
    "chunked": chunked,
    "soft_cap": soft_cap,
}
_OVER_TENSORS = ("alibi", "documents", "prefix_lm")


def find(value: str | Modifier | None, kind: str) -> Modifier | None:
    """The modifier for a name or a modifier; None for None. Raises ValueError for an unknown name or the wrong kind."""
    if value is None:
        return None
    modifier = (REGISTERED.get(value) or _shipped(value, kind)) if isinstance(value, str) else value
    if not isinstance(modifier, Modifier):
        if isinstance(value, str) and value.split("(")[0] in _OVER_TENSORS:
            maker = f"pagegen.modifiers.{value.split('(')[0]}"
            raise ValueError(f"{kind}_mod must be made with {maker} in this process, got the name {value!r} alone")
        names = ", ".join(sorted({*REGISTERED, *(f"{name}(...)" for name in _FROM_NUMBERS)}))
        raise ValueError(
            f"{kind}_mod must be a function decorated with @pagegen.{kind}_mod, or the name of one ({names}), "
            f"got {value!r}"
        )
    if modifier.kind != kind:
        raise ValueError(f"{kind}_mod must be a {kind} function, got the {modifier.kind} function {modifier.name}")
    return modifier


def find_both(score_mod: str | Modifier | None, mask_mod: str | Modifier | None) -> tuple[Modifier, ...]:
    """The score function and then the mask function, those that there are. Raises ValueError as `find` does."""
    if score_mod is None and mask_mod is None:  # nearly every call
        return ()
    found = find(score_mod, "score"), find(mask_mod, "mask")
    return tuple(modifier for modifier in found if modifier is not None)


def captured_tensors(score_mod: str | Modifier | None, mask_mod: str | Modifier | None) -> tuple[Tensor, ...]:
    """The tensors that both functions were registered with, in the order in which a call hands them over."""
    return tuple(tensor for modifier in find_both(score_mod, mask_mod) for tensor in modifier.tensors.values())


def _shipped(name: str, kind: str) -> Modifier | None:
    """The shipped modifier that has `name`, or None. Raises ValueError for one that its number makes impossible."""
    parts = re.fullmatch(r"(\w+)\(([\d.e+-]*)\)", name)
    if parts is None or parts[1] not in _FROM_NUMBERS:
        return None
    try:
        numbers = [int(parts[2]) if parts[2].isdecimal() else float(parts[2])] if parts[2] else []
        modifier = _FROM_NUMBERS[parts[1]](*numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind}_mod must name a modifier as its maker does, got {name!r}: {error}") from None
    return modifier if modifier.name == name else None
