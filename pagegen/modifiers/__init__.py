"""Score and mask functions: plain Python functions that change what attention computes.

A function is registered under a name (`score_mod`, `mask_mod`, or a shipped one such as `chunked(8192)`), traced to one
sympy expression (`trace`), asked for the keys it can touch (`mask_range`) and printed into the kernels (`print_triton`,
`print_cpp`). Registering needs torch only; sympy loads with the first trace.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pagegen.modifiers.closures import Capture
from pagegen.modifiers.registry import Modifier, mask_mod, score_mod
from pagegen.modifiers.shipped import (
    alibi,
    captured_tensors,
    causal,
    chunked,
    documents,
    find,
    find_both,
    prefix_lm,
    sliding_window,
    soft_cap,
)

if TYPE_CHECKING:
    from pagegen.modifiers.cpp_printer import print_cpp
    from pagegen.modifiers.ranges import mask_range
    from pagegen.modifiers.tracing import Traced, Untraceable, trace
    from pagegen.modifiers.triton_printer import print_triton

__all__ = [
    "Capture",
    "Modifier",
    "Traced",
    "Untraceable",
    "alibi",
    "captured_tensors",
    "causal",
    "chunked",
    "documents",
    "find",
    "find_both",
    "mask_mod",
    "mask_range",
    "prefix_lm",
    "print_cpp",
    "print_triton",
    "score_mod",
    "sliding_window",
    "soft_cap",
    "trace",
]

_LAZY = {
    "Traced": "tracing",
    "Untraceable": "tracing",
    "mask_range": "ranges",
    "print_cpp": "cpp_printer",
    "print_triton": "triton_printer",
    "trace": "tracing",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pagegen.modifiers' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pagegen.modifiers.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
