"""Running generated Triton kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pagegen import settings
from pagegen.codegen import triton as codegen
from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant
from pagegen.targets.call import AttentionCall, AttentionKernel
from pagegen.targets.triton_module import import_source


class TritonAttention:
    """The kernels of one variant, one a form (decode or ragged, with or without lse), each rendered when first
    called. Triton itself compiles at the first launch."""

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, *, upcast: bool) -> None:
        self.spec = spec
        self.layout = layout
        self.variant = variant
        self.upcast = upcast
        self.launchers: dict[codegen.Form, Callable[[AttentionCall], None]] = {}

    def __call__(self, call: AttentionCall) -> None:
        form = form_of(call, upcast=self.upcast)
        launcher = self.launchers.get(form)
        if launcher is None:
            source = codegen.render_attention(self.spec, self.layout, self.variant, form)
            launcher = self.launchers[form] = _launcher(import_source(source).launch)
        launcher(call)


def form_of(call: AttentionCall, *, upcast: bool) -> codegen.Form:
    """The form that serves a call."""
    return codegen.Form(decode=call.query_start_loc is None, write_lse=call.lse is not None, upcast=upcast)


def _launcher(launch: Callable[..., None]) -> Callable[[AttentionCall], None]:
    """A generated `launch` as a function of the call: it takes the operands that its specialisation kept."""
    operands = operator.attrgetter(*inspect.signature(launch).parameters)
    return lambda call: launch(*operands(call))


def load_attention(spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, target: Target) -> AttentionKernel:
    """The kernel for a GPU or the interpreter. Raises RuntimeError when the interpreter was not switched on
    before triton was imported, or is on for a GPU target."""
    interpreting = settings.interpreting()
    if (target.kind == "interpreter") != interpreting:
        wanted = "TRITON_INTERPRET=1 set before triton is imported" if not interpreting else "TRITON_INTERPRET unset"
        raise RuntimeError(f"target {target} needs {wanted}")
    codegen.bindings(spec, layout, variant, codegen.Form(decode=True))  # an illegal tile is refused here
    return TritonAttention(spec, layout, variant, upcast=interpreting)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Stores k and v at their slots. Operands are checked by the operator."""
    _cache_module(k_cache.shape[3], v_cache.shape[3], k_cache.shape[1]).launch_write_kv(k, v, k_cache, v_cache, slots)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, pairs: Tensor) -> None:
    """Copies blocks. Operands are checked by the operator."""
    if len(pairs):
        _cache_module(k_cache.shape[3], v_cache.shape[3], k_cache.shape[1]).launch_copy_blocks(k_cache, v_cache, pairs)


@functools.cache
def _cache_module(head_dim: int, v_head_dim: int, block_size: int) -> Any:
    return import_source(codegen.render_cache_ops(head_dim, v_head_dim, block_size))
