"""Compiling the cache kernels for GPUs that are not here: what registers they take, and what they spill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagegen import settings
from pagegen.codegen import triton_cache as codegen
from pagegen.spec import Target, check
from pagegen.spec.dtypes import QUERY_DTYPES
from pagegen.targets import offline
from pagegen.targets.errors import CompileError
from pagegen.targets.triton_module import import_source

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # as templates/cache_ops.py launches it


@dataclass(frozen=True, kw_only=True)
class WriterFacts:
    """What the compiler gave one writer. `spills` is bytes of local memory a thread on NVIDIA, spilled vector
    registers on AMD."""

    target: str
    registers: int
    spills: int
    assembly: str


def compile_writer(form: codegen.WriteForm, target: Target, *, source_dtype: torch.dtype) -> WriterFacts:
    """Compiles the writer of `form` for `target`, present or not, for rows and angles of `source_dtype`.

    Raises CompileError with the compiler's first line, ValueError for a target that is no GPU, and RuntimeError in an
    interpreting process.
    """
    if settings.interpreting():
        raise RuntimeError("compiling needs TRITON_INTERPRET unset: in an interpreting process nothing is compiled")
    if not target.is_gpu:
        raise ValueError(f"target must be a GPU such as sm_90 or gfx942 to compile for, got {target}")
    kernel = import_source(codegen.render_write(form)).write_kv_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    arch = target.capability if target.kind == "cuda" else target.arch
    names = kernel.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if _is_aligned(name)}
    try:
        compiled = triton_compile(
            ASTSource(
                fn=kernel,
                signature={name: _argument_type(name, form, source_dtype) for name in names},
                constexprs={},
                attrs=aligned,
            ),
            target=GPUTarget(target.kind, arch, target.warp_size),
            options=_OPTIONS,
        )
    except Exception as error:  # noqa: BLE001  triton, LLVM and ptxas raise many types
        raise CompileError(str(target), "write_kv", check.first_line(error)) from error
    return _facts(compiled, target)


def _is_aligned(name: str) -> bool:
    """Pointers come from the allocator, strides of rows are multiples of the head dim; those of scales need not be."""
    return name.endswith("_ptr") or (name.startswith("stride_") and not ("scale" in name or "zero" in name))


def _argument_type(name: str, form: codegen.WriteForm, source_dtype: torch.dtype) -> str:
    if not name.endswith("_ptr"):
        return "i32"
    if name in ("slots_ptr", "positions_ptr"):
        return "*i64"
    if "scale" in name or "zero" in name:
        return "*fp32"
    if name in ("k_cache_ptr", "v_cache_ptr"):
        return "*" + _TYPES[form.stored] if form.stored in QUERY_DTYPES else "*u8"
    return "*" + _TYPES[source_dtype]


def _facts(compiled: Any, target: Target) -> WriterFacts:
    registers, spills, assembly = offline.machine_code(compiled, target)
    return WriterFacts(target=str(target), registers=registers, spills=spills, assembly=assembly)
