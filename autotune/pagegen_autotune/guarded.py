"""Memory with guards on both sides: who writes past its end is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# A page: a kernel that is off by a row or a head hits it, one that is off by far more hits nothing of ours.
_GUARD_BYTES = 4096
_GUARD = 0xA5


@dataclass(frozen=True)
class Guarded:
    """`inside` and the bytes before and after it, all of them _GUARD while nobody wrote there."""

    inside: Tensor
    before: Tensor
    after: Tensor

    @classmethod
    def empty(cls, *shape: int, dtype: torch.dtype, device: torch.device | str) -> Guarded:
        """Uninitialised memory between guards."""
        size = math.prod(shape) * dtype.itemsize
        whole = torch.full((size + 2 * _GUARD_BYTES,), _GUARD, dtype=torch.uint8, device=device)
        inside = whole[_GUARD_BYTES : _GUARD_BYTES + size].view(dtype).view(shape)
        return cls(inside, whole[:_GUARD_BYTES], whole[_GUARD_BYTES + size :])

    @property
    def intact(self) -> bool:
        """Whether nobody wrote outside."""
        return bool((self.before == _GUARD).all() and (self.after == _GUARD).all())
