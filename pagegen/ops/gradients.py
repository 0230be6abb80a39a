"""The operators are for inference: what would need a gradient is refused, not computed without one."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse(**operands: Tensor | None) -> None:
    """Raises RuntimeError naming the first operand whose gradient autograd would want. Registering an autograd kernel
    that raises would cost every call 5 us outside of inference mode; this costs 0.1."""
    for name, tensor in operands.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} must not require gradients, got a tensor that does: paged attention computes none. Run under "
                "torch.no_grad() or torch.inference_mode(), or detach it"
            )
