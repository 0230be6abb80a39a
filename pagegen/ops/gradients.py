"""The operators are for inference: what would need a gradient is refused, not computed without one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def wanted(tensor: Tensor) -> bool:
    """Whether autograd would want this tensor's gradient."""
    return tensor.requires_grad and torch.is_grad_enabled()


def refuse(**operands: Tensor | None) -> None:
    """Raises RuntimeError naming the first operand whose gradient autograd would want. Registering an autograd kernel
    that raises would cost every call 5 us outside of inference mode; this costs 0.1."""
    for name, tensor in operands.items():
        if tensor is not None and wanted(tensor):
            raise _refusal(name)


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} must not require gradients, got a tensor that does: paged attention computes none. Run under "
        "torch.no_grad() or torch.inference_mode(), or detach it"
    )


def transforms_are_active() -> bool:
    """Whether `torch.func`'s transforms or forward-mode gradients may hide in the operands. They are taken off before
    an operator's implementation sees its tensors, and the gradient would be 0. Costs 0.2 us."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def refuse_transformed(names: Iterable[str], operands: Iterable[Any], options: dict[str, Any]) -> None:
    """`refuse` for tensors inside of `torch.func.grad`, `jvp` and those built on them, and for dual tensors. `names`
    are those of the positional operands."""
    for name, value in [*zip(names, operands, strict=False), *options.items()]:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, Tensor) and _is_tracked(tensor):
                raise _refusal(name)


def _is_tracked(tensor: Tensor) -> bool:
    """Whether a transform at any level follows what is computed with a tensor."""
    while True:
        if wanted(tensor) or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None):
            return True
        # torch.compile cannot look below the topmost transform
        if torch.compiler.is_compiling() or not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
