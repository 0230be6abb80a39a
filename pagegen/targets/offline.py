"""Compiling Triton kernels for GPUs that are not here: what registers, shared memory and spills they take."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pagegen import settings
from pagegen.codegen import triton as codegen
from pagegen.codegen.insert import captured_dtypes, captured_names
from pagegen.spec import AttentionSpec, CacheLayout, Device, Target, TritonVariant, check
from pagegen.spec.dtypes import INT4
from pagegen.spec.variant import pieces
from pagegen.targets.disassembly import MainLoop, main_loop
from pagegen.targets.errors import CompileError
from pagegen.targets.triton_module import import_source

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", torch.bool: "u8",
}  # fmt: skip
_INT_POINTERS = ("block_table_ptr", "seq_lens_ptr", "query_start_ptr", "tile_start_ptr", "counter_ptr")


@dataclass(frozen=True, kw_only=True)
class ResourceFacts:
    """What the compiler gave one kernel. `spills` is bytes of local memory a thread on NVIDIA, spilled vector
    registers on AMD. `programs_per_unit` is how many programs fit a multiprocessor or compute unit at once,
    `binary_bytes` the size of the machine code's file."""

    kernel: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    num_warps: int
    programs_per_unit: int
    binary_bytes: int
    loop: MainLoop | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return asdict(self)


@functools.lru_cache(maxsize=1024)
def compile_facts(
    spec: AttentionSpec,
    layout: CacheLayout,
    variant: TritonVariant,
    target: Target,
    *,
    decode: bool,
    tree: bool = False,
    wide: bool = False,
    write_lse: bool = False,
) -> ResourceFacts:
    """Compiles the attention kernel for `target`, present or not, and reads its resources: for calls with or without a
    tree mask or a wish for the logarithms of the denominators, and for caches below 2^31 elements or beyond (`wide`).

    Raises ValueError for a target without a row in the device table, before anything is compiled; CompileError with
    the compiler's first line; and RuntimeError in an interpreting process.
    """
    form = codegen.Form(decode=decode, write_lse=write_lse, tree=tree, wide=wide, native_float8=target.native_float8)
    variant = codegen.with_warps_for(variant, form)
    from pagegen.costs import shipped_device

    _refuse_no_gpu(target)
    device = shipped_device(target)  # first: what LLVM makes of an arch that is none (sm_9) ends the process
    compiled = compile_kernel(spec, layout, variant, target, form)
    return _facts(compiled, variant, target, device, "decode" if decode else "ragged")


def _refuse_no_gpu(target: Target) -> None:
    if not target.is_gpu:
        raise ValueError(f"target must be a GPU such as sm_90 or gfx942 to compile for, got {target}")


def compile_kernel(
    spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, target: Target, form: codegen.Form
) -> Any:
    """Triton's compiled kernel. See `compile_facts`."""
    if settings.interpreting():
        raise RuntimeError("compiling needs TRITON_INTERPRET unset: in an interpreting process nothing is compiled")
    _refuse_no_gpu(target)
    source = codegen.render_attention(spec, layout, variant, form)
    module = import_source(source)
    kernel = module.balanced_attention_kernel if variant.programs else module.paged_attention_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    arch = target.capability if target.kind == "cuda" else target.arch
    types = {name: _argument_type(name, spec, variant, form) for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if _is_aligned(name, spec, layout)
    }
    try:
        return triton_compile(
            ASTSource(fn=kernel, signature=types, constexprs={}, attrs=aligned),
            target=GPUTarget(target.kind, arch, target.warp_size),
            options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
        )
    except Exception as error:  # noqa: BLE001  triton, LLVM and ptxas raise many types; each is this candidate's
        raise CompileError(str(target), variant.name, check.first_line(error)) from error


def _argument_type(name: str, spec: AttentionSpec, variant: TritonVariant, form: codegen.Form) -> str:
    captured = dict(zip(captured_names(spec), captured_dtypes(spec), strict=True))
    if name.removesuffix("_ptr") in captured:
        return "*" + _TYPES[captured[name.removesuffix("_ptr")]]
    if name in _INT_POINTERS:
        return "*i32"
    if name == "tree_ptr":
        return "*u8"
    if name in ("q_ptr", "out_ptr"):
        return "*" + _TYPES[spec.q_dtype]
    stored = _TYPES[spec.kv_dtype] if codegen.storage(spec, form) in ("float", "convert") else "u8"
    if name in ("k_ptr", "v_ptr"):
        return "*" + stored
    if name.endswith("_desc"):
        columns = dict(zip(("k_desc", "k_rest_desc"), pieces(spec.head_dim, variant.head_pieces), strict=True))
        columns |= zip(("v_desc", "v_rest_desc"), pieces(spec.v_head_dim, variant.head_pieces), strict=True)
        return f"tensordesc<{stored}[1, {variant.tile_kv}, 1, {columns[name]}]>"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if name == "scale" else "i32"


def _is_aligned(name: str, spec: AttentionSpec, layout: CacheLayout) -> bool:
    """Whether Triton may take a pointer or stride as a multiple of 16, as it does at a launch where it is one: pointers
    come from an allocator, strides are those of a cache that holds nothing else."""
    if name.endswith("_ptr"):
        return True
    side, _, axis = name.removeprefix("stride_").partition("_")
    if (
        not name.startswith("stride_")
        or side not in ("q", "out", "k", "v")
        or axis not in ("token", "head", "block", "slot")
    ):
        return False
    columns = spec.head_dim if side in ("q", "k") else spec.v_head_dim
    if side in ("k", "v") and spec.kv_dtype == INT4:
        columns //= 2
    if axis == "token":
        return columns * spec.num_q_heads % 16 == 0
    if axis == "head":
        rows = layout.block_size if side in ("k", "v") and layout.order == "HND" else 1
        return columns * rows % 16 == 0
    rows = spec.num_kv_heads if layout.order == "NHD" or axis == "block" else 1
    return columns * rows * (layout.block_size if axis == "block" else 1) % 16 == 0


def _facts(compiled: Any, variant: TritonVariant, target: Target, device: Device, kind: str) -> ResourceFacts:
    registers, spills, assembly = machine_code(compiled, target)
    shared = int(compiled.metadata.shared)
    return ResourceFacts(
        kernel=kind,
        target=str(target),
        registers=registers,
        spills=spills,
        shared_bytes=shared,
        num_warps=variant.num_warps,
        programs_per_unit=_programs_per_unit(registers, shared, variant.num_warps, target, device),
        binary_bytes=len(compiled.asm["cubin" if target.kind == "cuda" else "hsaco"]),
        loop=main_loop(assembly),
    )


def machine_code(compiled: Any, target: Target) -> tuple[int, int, str]:
    """Registers a thread, what it spills (see `ResourceFacts`) and the assembly of a kernel that Triton compiled."""
    if target.kind == "cuda":
        return _nvidia(compiled.asm["cubin"])
    assembly = compiled.asm["amdgcn"]
    return _amd_count(assembly, "vgpr_count"), _amd_count(assembly, "vgpr_spill_count"), assembly


def _nvidia(cubin: bytes) -> tuple[int, int, str]:
    """Registers a thread, local bytes a thread, and the SASS, by the tools that ship with triton."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", str(path))
        assembly = _run(knobs.nvidia.nvdisasm.path, "-c", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage[:200]!r}")
    return int(found.group(1)), int(found.group(2)) + int(found.group(4)), assembly


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()[:200]}")
    return done.stdout


def _amd_count(assembly: str, field: str) -> int:
    found = re.search(rf"\.{field}:\s+(\d+)", assembly)
    if found is None:
        raise RuntimeError(f"the AMD listing has no .{field}")
    return int(found.group(1))


def _programs_per_unit(registers: int, shared: int, num_warps: int, target: Target, device: Device) -> int:
    """Programs resident on one unit at once, by registers, shared memory and threads.

    Registers are allotted to a warp in steps of 256 on NVIDIA and of 8 a lane on gfx9 (512 a SIMD lane, four
    SIMDs a compute unit); shared memory a unit is taken as what one program may use, its only published bound here.
    """
    threads = num_warps * target.warp_size
    if target.kind == "cuda":
        per_warp = -(-registers * 32 // 256) * 256
        by_registers = device.registers_per_unit // (per_warp * num_warps)
    else:
        waves = 4 * min(8, 512 // max(8, -(-registers // 8) * 8))
        by_registers = waves // num_warps
    by_shared = int(device.shared_memory_kib * 1024) // shared if shared else by_registers
    return min(by_registers, by_shared, device.max_threads_per_unit // threads)
