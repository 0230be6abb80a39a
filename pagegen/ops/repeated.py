"""Calls like one before. A step of an engine makes the same call once a layer, with other memory: what was found for
the first one holds for the others, where nothing differs that was looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pagegen.ops import gradients

Found = TypeVar("Found")
_MOST = 8  # of a step: window or none, decode or mixed


class Recent(Generic[Found]):
    """What was found for the last few calls. Holds forms of tensors, never a tensor; any thread may ask and keep."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[bool, list[Any], Callable[..., bool], Found], ...] = ()

    def find(self, tensors: list[Tensor], values: list[Any]) -> Found | None:
        """What was kept for tensors of the form of these and for equal `values`, which say how many tensors there are
        and which. None where nothing was, or a tensor is there twice."""
        grad = torch.is_grad_enabled()  # whether requires_grad means anything: no part of torch's check
        for graded, known, like, found in self._kept:
            if graded is grad and known == values and like(*tensors):
                return found
        return None

    def keep(self, tensors: list[Tensor], values: list[Any], found: Found) -> None:
        """From now on `find` knows it, for as long as few others come."""
        like = of_the_form(tensors)
        if like(*tensors):  # of a tensor that is there twice torch's check says no
            self._kept = ((torch.is_grad_enabled(), values, like, found), *self._kept[: _MOST - 1])


def form(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """All that checks look at but values and addresses. (One flat list: a function a tensor took 1.5 us more.)"""
    found: list[Any] = []
    for tensor in tensors:
        found += tensor.shape, tensor.stride(), tensor.dtype, tensor.device, gradients.wanted(tensor)
    return tuple(found)


def of_the_form(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether they have the form of these, of which it keeps none. It holds where
    gradients are enabled as they are now."""
    if _Guards is not None:
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        guard: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return guard
    known = form(tensors)
    return lambda *others: form(others) == known


def _guards() -> Any:
    """What torch.compile checks tensors with: dtype, device, sizes, strides, class and requires_grad, of five in 0.4 us
    where `form` and its comparison take 3. It is private: None where it is not there, or not what it is in torch 2.13
    (other versions were not tried), and `form` serves."""
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        one = torch.empty(2, 3, dtype=torch.float32, device="cpu")  # whatever the default is where it is imported
        like = guards(one, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]]).check
        others = (one.half(), one[:1], one[:, :2], one.new_empty(3, 2).t(), one.clone().requires_grad_())
        works = like(one) and like(one.clone()) and not any(map(like, others))
    except (AttributeError, TypeError, RuntimeError):
        return None
    return guards if works else None


_Guards = _guards()
