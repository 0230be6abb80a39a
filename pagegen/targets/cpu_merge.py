"""Merging partial states of attention on the CPU target, through templates/merge.hpp."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from pagegen.targets import cpu
from pagegen.targets.cache_call import State
from pagegen.targets.cpu_cache import DTYPE_CODES

# The structs of templates/merge.hpp: sizes, then the target and the states.
_SIZES = struct.Struct("@6q")
_STATE = struct.Struct("@3Q4q")


def merge(target: State, states: Sequence[State]) -> None:
    """Writes the merged state of one state or more into `target`, which may be one of them, on
    `torch.get_num_threads()` threads. Raises CompileError where no compiler works."""
    named = next((state.rows for state in (target, *states) if state.rows is not None), None)
    rows, heads, dim = target.out.shape
    sizes = _SIZES.pack(
        len(states), rows if named is None else len(named), heads, dim, DTYPE_CODES[target.out.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    cpu.library().pagegen_merge_states(sizes + b"".join(map(_packed, (target, *states))))


def _packed(state: State) -> bytes:
    """A `pagegen_state`."""
    out, lse, rows = state
    named = 0 if rows is None else rows.data_ptr()
    return _STATE.pack(out.data_ptr(), lse.data_ptr(), named, *out.stride()[:2], *lse.stride())
