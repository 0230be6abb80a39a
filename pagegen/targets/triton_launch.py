"""Running generated Triton kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pagegen import settings
from pagegen.codegen import triton as codegen
from pagegen.codegen.insert import captured_names
from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant, check
from pagegen.spec.dtypes import FLOAT8_DTYPES
from pagegen.targets.call import AttentionCall, AttentionKernel
from pagegen.targets.errors import CompileError
from pagegen.targets.triton_module import import_source


class TritonAttention:
    """The kernels of one variant, one a form (decode or ragged, with or without lse, ...), each rendered when first
    called. Triton itself compiles at the first launch."""

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, target: Target) -> None:
        self.spec = spec
        self.layout = layout
        self.variant = variant
        self.target = target
        self.launchers: dict[tuple[codegen.Form, str], Callable[[AttentionCall], None]] = {}

    def __call__(self, call: AttentionCall) -> None:
        self._launch(call, wide=None)

    def warm(self, call: AttentionCall) -> None:
        """Runs `call` with the offsets of small caches and with those of large ones. Raises CompileError where Triton
        cannot compile it, or not for this device."""
        from triton.errors import TritonError

        for wide in (False, True):
            try:
                self._launch(call, wide=wide)
            except (TritonError, RuntimeError) as error:
                # a pass that fails is a plain RuntimeError, as are errors of the driver, which are no compiler's
                if not isinstance(error, TritonError) and "PassManager" not in str(error):
                    raise
                raise CompileError(str(self.target), self.variant.name, check.class_and_line(error)) from error

    def _launch(self, call: AttentionCall, wide: bool | None) -> None:
        if self.spec.batch_invariant and call.query_start_loc is None:
            # one kernel for decode and mixed batches, so that a row's neighbours do not choose its kernel
            starts = torch.arange(call.seq_lens.shape[0] + 1, dtype=torch.int32, device=call.q.device)
            call = replace(call, query_start_loc=starts)
        form = form_of(call, self.variant, self.target)
        if wide is not None:
            form = replace(form, wide=wide)
        variant = self.variant
        if variant.loads == "descriptor" and not _aligned(call):
            variant = replace(variant, loads="pointer")
        key = (form, variant.loads)
        launcher = self.launchers.get(key)
        if launcher is None:
            launcher = self.launchers[key] = _launcher(self.spec, self.layout, variant, form)
        launcher(_stored(call, form))


def form_of(call: AttentionCall, variant: TritonVariant, target: Target) -> codegen.Form:
    """The form that serves a call."""
    interpreting = target.kind == "interpreter"
    return codegen.Form(
        decode=call.query_start_loc is None,
        write_lse=call.lse is not None,
        tree=call.tree_mask is not None,
        wide=_wide(call, variant),
        upcast=interpreting,
        native_float8=interpreting or target.native_float8,
    )


def _wide(call: AttentionCall, variant: TritonVariant) -> bool:
    """Whether the offset of some element, or of a tile's end behind the last one, may pass 2^31."""
    splits = -(-call.max_seq_len // variant.split_tokens) if variant.split_tokens else variant.num_splits
    out = call.out
    farthest = out.shape[0] * out.shape[1] * splits * (out.shape[2] + 1)  # partial results
    scales = (call.k_scale, call.v_scale, call.k_zero, call.v_zero)
    for tensor in (call.q, call.k_cache, call.v_cache, out, call.block_table, call.tree_mask, *scales):
        if tensor is not None:
            farthest = max(farthest, sum(map(operator.mul, tensor.shape, tensor.stride())))
    return farthest + 2**16 > 2**31


def _aligned(call: AttentionCall) -> bool:
    """Whether tensor descriptors can describe the caches: addresses and strides of whole 16 bytes."""
    return all(
        cache.data_ptr() % 16 == 0 and all(stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:-1])
        for cache in (call.k_cache, call.v_cache)
    )


def _stored(call: AttentionCall, form: codegen.Form) -> AttentionCall:
    """The call with its tensors as the kernel reads them: masks, and float8 where the target lacks it, as bytes."""
    changes: dict[str, Any] = {}
    if call.tree_mask is not None:
        changes["tree_mask"] = call.tree_mask.view(torch.uint8)
    if call.k_cache.dtype in FLOAT8_DTYPES and not form.native_float8:
        changes["k_cache"] = call.k_cache.view(torch.uint8)
        changes["v_cache"] = call.v_cache.view(torch.uint8)
    if any(tensor.dtype == torch.bool for tensor in call.captures):
        bytes_ = [t.view(torch.uint8) if t.dtype == torch.bool else t for t in call.captures]
        changes["captures"] = tuple(bytes_)
    return replace(call, **changes) if changes else call


def _launcher(
    spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, form: codegen.Form
) -> Callable[[AttentionCall], None]:
    """The generated host function as a function of the call: it takes the operands that its specialisation kept."""
    module = import_source(codegen.render_attention(spec, layout, variant, form))
    launch = getattr(module, codegen.launcher_name(variant))
    captured = captured_names(spec)
    names = [name for name in inspect.signature(launch).parameters if name not in captured]
    operands = operator.attrgetter(*names)

    def run(call: AttentionCall) -> None:
        launch(**dict(zip(names, operands(call), strict=True)), **dict(zip(captured, call.captures, strict=True)))

    return run if captured else lambda call: launch(*operands(call))


def load_attention(spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, target: Target) -> AttentionKernel:
    """The kernel for a GPU or the interpreter. Raises RuntimeError when the interpreter was not switched on
    before triton was imported, or is on for a GPU target."""
    interpreting = settings.interpreting()
    if (target.kind == "interpreter") != interpreting:
        wanted = "TRITON_INTERPRET=1 set before triton is imported" if not interpreting else "TRITON_INTERPRET unset"
        raise RuntimeError(f"target {target} needs {wanted}")
    codegen.bindings(spec, layout, variant, codegen.Form(decode=True))  # an illegal tile is refused here
    return TritonAttention(spec, layout, variant, target)
