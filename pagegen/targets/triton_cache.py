"""Running the generated Triton kernels that write to and copy within a cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from pagegen.codegen import triton_cache as codegen
from pagegen.spec import Target
from pagegen.spec.dtypes import FLOAT8_DTYPES, QUERY_DTYPES
from pagegen.targets.cache_call import WriteCall, Writer
from pagegen.targets.capture import refuse_in_capture
from pagegen.targets.triton_module import import_source

# A generated host function, and the operands that its specialisation kept.
Launcher = tuple[Callable[..., None], tuple[str, ...]]
ONE_CALL = "make one such call"
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@functools.cache
def writer(target: Target) -> Writer:
    """What writes to caches on one target. Each form of call is rendered when it first comes; Triton compiles it at
    that launch."""
    native = codegen.native_float8(target)

    def write(call: WriteCall) -> None:
        rotation = call.rotation
        dtypes = (call.k.dtype,) if rotation is None else (call.k.dtype, rotation.q.dtype, rotation.cos.dtype)
        launch, names = _launcher(form_of(call, native_float8=native), dtypes)
        given = operands(call)
        launch(**{name: given[name] for name in names})

    return write


def form_of(call: WriteCall, *, native_float8: bool) -> codegen.WriteForm:
    """The form that serves a call."""
    rotation = call.rotation
    return codegen.WriteForm(
        num_kv_heads=call.k.shape[1],
        head_dim=call.k.shape[2],
        v_head_dim=0 if call.v is None else call.v.shape[2],
        block_size=call.k_cache.shape[1],
        stored=call.stored,
        scaled=call.k_scale is not None,
        zero_points=call.k_zero is not None,
        num_q_heads=0 if rotation is None else rotation.q.shape[1],
        rotary_half=0 if rotation is None else rotation.cos.shape[1],
        interleaved=rotation is not None and rotation.interleaved,
        # of the others every target makes the same code
        native_float8=native_float8 and call.stored in FLOAT8_DTYPES,
    )


@functools.cache
def _launcher(form: codegen.WriteForm, dtypes: tuple[torch.dtype, ...]) -> Launcher:
    """The launcher of a form. Triton compiles each of `dtypes` apart, so the first call of each must come here."""
    refuse_in_capture("this write to a cache is not compiled yet", ONE_CALL)
    launch = import_source(codegen.render_write(form)).launch_write_kv
    return launch, tuple(inspect.signature(launch).parameters)


def operands(call: WriteCall) -> dict[str, Tensor | None]:
    """Everything that a launcher can take, by the template's names."""
    rotation = call.rotation
    return {
        "k": call.k,
        "v": call.v,
        "k_cache": _storage(call.k_cache, call.stored),
        "v_cache": None if call.v_cache is None else _storage(call.v_cache, call.stored),
        "slots": call.slots,
        "k_scale": call.k_scale,
        "v_scale": call.v_scale,
        "k_zero": call.k_zero,
        "v_zero": call.v_zero,
        "q": None if rotation is None else rotation.q,
        "rotated": None if rotation is None else rotation.rotated,
        "positions": None if rotation is None else rotation.positions,
        "cos": None if rotation is None else rotation.cos,
        "sin": None if rotation is None else rotation.sin,
    }


def _storage(cache: Tensor, stored: torch.dtype) -> Tensor:
    """Quantised caches as bytes: a target that lacks a float8 takes no pointer to it either."""
    return cache if stored in QUERY_DTYPES else cache.view(torch.uint8)


def copy_blocks(k_cache: Tensor, v_cache: Tensor | None, pairs: Tensor) -> None:
    """Copies blocks of any dtype, as integers of the same size. Operands are checked by the operator."""
    integers = _BYTES[k_cache.element_size()]
    values = None if v_cache is None else v_cache.view(integers)
    launch, names = _copier(k_cache.shape[3], 0 if v_cache is None else v_cache.shape[3], k_cache.shape[1], integers)
    given = {"k_cache": k_cache.view(integers), "v_cache": values, "pairs": pairs.contiguous()}
    launch(**{name: given[name] for name in names})


@functools.cache
def _copier(
    head_dim: int, v_head_dim: int, block_size: int, integers: torch.dtype
) -> tuple[Callable[..., None], tuple[str, ...]]:
    refuse_in_capture("this copy of blocks is not compiled yet", ONE_CALL)
    launch = import_source(codegen.render_copy(head_dim, v_head_dim, block_size)).launch_copy_blocks
    return launch, tuple(inspect.signature(launch).parameters)
