"""The C++ kernels under other compilers and for other CPUs: clang++, AVX-512 without its newer parts, AVX2, plain
x86-64, and AArch64 with and without bf16 products, which an emulator runs. What every instruction set shares is tested
elsewhere; here each meets the kinds of cache, in decode and in prefill, on batches full of poison."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import arm_machine
import cache_cases
import cpu_loops
import pytest
import torch
from arm_machine import ArmAttention, ArmLibrary
from cpu_cases import DECODE, PORTABLE, SHORT, Case, check, run, same_bits, source
from cpu_loops import Loop

import pagegen
from pagegen.codegen import cpp
from pagegen.spec import CppVariant
from pagegen.targets import cpp_build, cpu_features
from pagegen.targets.call import AttentionKernel

EVERYTHING = {"window": 90, "logit_softcap": 20.0, "alibi": True, "sinks": True}
TOKEN = {"kv_scale_granularity": "token_head"}
KINDS = {
    "bf16": Case("bf16", 4, 64, 16),
    "bf16-panel": Case("bf16-panel", 16, 96, 8, "HND", kv_heads=1, variant=SHORT),
    "fp16": Case("fp16", 3, 100, 8, "HND", "float16"),
    "fp32": Case("fp32", 1, 80, 24, "pool", "float32", fields=EVERYTHING),
    "e4m3": Case("e4m3", 7, 80, 24, "pool", variant=SHORT, fields={"kv_dtype": "float8_e4m3fn", **TOKEN}),
    "e5m2": Case("e5m2", 4, 64, 8, dtype="float16", fields={"kv_dtype": "float8_e5m2", "kv_scale_granularity": "head"}),
    "int8": Case("int8", 4, 100, 24, fields={"kv_dtype": "int8", **TOKEN, "kv_zero_points": True}),
    "int4": Case("int4", 8, 68, 16, "HND", fields={"kv_dtype": "int4", **TOKEN, "kv_zero_points": True}),
}
RAGGED = [(70, 70), (0, 0), (33, 1), (200, 17), (129, 33)]
NO_BF16 = (*cpp_build.NATIVE, "-mno-avx512bf16")
NO_VBMI = (*NO_BF16, "-mno-avx512vbmi", "-mno-avx512vnni")
AVX2 = ("-march=x86-64", "-mavx2", "-mfma", "-mf16c")
# (compiler, flags, kinds of cache, those that are left to --nightly).
# g++ with the machine's own flags, AVX2 and plain x86-64 meets the others in
# test_cpu_attention.py and test_cpu_quantised.py.
BUILDS = {
    "g++ AVX-512 without bf16": ("c++", NO_BF16, ("bf16", "int4"), ("fp16", "e4m3")),
    "g++ AVX-512 without bf16 and VBMI": ("c++", NO_VBMI, ("bf16-panel", "int8"), ("e5m2",)),
    "g++ AVX2": ("c++", AVX2, ("int4",), ()),
    "g++ plain": ("c++", PORTABLE, ("fp16", "int8"), ()),
    "clang++ native": ("clang++", cpp_build.NATIVE, ("bf16", "int4"), ()),
    "clang++ AVX-512 without bf16": ("clang++", NO_BF16, ("int8",), ()),
    "clang++ AVX2": ("clang++", AVX2, ("bf16", "e5m2"), ("fp16",)),
    "clang++ plain": ("clang++", PORTABLE, ("fp32", "e4m3"), ("int4",)),
}
# (flags, model of CPU, kinds of cache, those that are left to --nightly).
# A Cortex-A72 has neither bf16 products nor SVE; with SVE allowed the compiler
# may use it beside the NEON code.
NEON, BFDOT, SVE = ("-march=armv8-a",), ("-march=armv8.2-a+bf16",), ("-march=armv8.6-a+sve",)
ARM_BUILDS = {
    "NEON": (NEON, "cortex-a72", ("bf16", "fp16", "fp32", "e4m3", "e5m2", "int8", "int4"), ()),
    "bf16 products": (BFDOT, "max", ("bf16", "bf16-panel"), ("int4",)),
    "SVE": (SVE, "max", ("bf16",), ()),
}


def every(builds: Mapping[str, tuple[Any, Any, tuple[str, ...], tuple[str, ...]]]) -> list[Any]:
    """(build, kind of cache), once for each test of a build."""
    found: list[Any] = []
    for name, (_, _, kinds, by_night) in builds.items():
        found += [(name, kind) for kind in kinds]
        found += [pytest.param(name, kind, marks=pytest.mark.nightly) for kind in by_night]
    return found


needs_arm = pytest.mark.skipif(arm_machine.absent() is not None, reason=str(arm_machine.absent()))
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are x86's")


@functools.cache
def compiler_fault(cxx: str) -> str | None:
    """Why `cxx` compiles no kernel here, or None."""
    if shutil.which(cxx) is None:
        return f"needs {cxx} (Debian, Ubuntu: apt-get install {'clang libomp-dev' if cxx == 'clang++' else 'g++'})"
    command = [cxx, "-std=c++20", "-fopenmp", "-E", "-x", "c++", "-"]
    done = subprocess.run(command, input=b"#include <omp.h>\n#include <vector>\n", capture_output=True, check=False)
    return None if done.returncode == 0 else f"{cxx} finds no OpenMP (Debian, Ubuntu: apt-get install libomp-dev)"


def lacks(machine: tuple[str, ...]) -> str | None:
    """What this CPU lacks to run code of these flags, or None."""
    needed = ["avx512f", "avx512bw"] if any("avx512" in flag for flag in machine) else []
    needed += ["avx2", "fma", "f16c"] if "-mavx2" in machine else []
    missing = sorted(set(needed) - set(cpu_features.names()))
    return f"needs a CPU with {', '.join(missing)}" if missing else None


@pytest.fixture
def compiled_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the compiler, as a user does."""
    return lambda cxx: monkeypatch.setenv("CXX", cxx)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Compiles what the tests below load, two at a time."""
    wanted: dict[str, list[Case]] = {}
    for cxx, machine, kinds, _ in BUILDS.values():
        if platform.machine() == "x86_64" and not compiler_fault(cxx) and not lacks(machine):
            wanted.setdefault(cxx, []).extend(replace(KINDS[kind], machine=machine) for kind in kinds)
    if arm_machine.absent() is None:
        for machine, _, kinds, _ in ARM_BUILDS.values():
            wanted.setdefault(arm_machine.CXX, []).extend(replace(KINDS[kind], machine=machine) for kind in kinds)
    for cxx, cases in wanted.items():
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
            patch.setenv("CXX", cxx)
            list(pool.map(lambda case: cpp_build.build(source(case), case.name, machine=case.machine), cases))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arm")


def check_decode_and_prefill(case: Case, kernel: AttentionKernel) -> None:
    for sequences in (DECODE, RAGGED):
        batch = case.batch(sequences)
        result = check(kernel, batch)
        assert same_bits(result, run(kernel, batch.permuted()))


@needs_x86
@pytest.mark.parametrize(("build", "kind"), every(BUILDS))
def test_every_compiler_and_instruction_set_gives_the_reference_result(
    build: str, kind: str, compiled_by: Callable[[str], None]
) -> None:
    cxx, machine, *_ = BUILDS[build]
    fault = compiler_fault(cxx) or lacks(machine)
    if fault:
        pytest.skip(fault)
    compiled_by(cxx)
    case = replace(KINDS[kind], machine=machine)
    check_decode_and_prefill(case, case.load())


@needs_x86
def test_subnormals_of_float16_survive_a_cpu_that_flushes_those_of_float32(compiled_by: Callable[[str], None]) -> None:
    """torch.set_flush_denormal is for the calling thread."""
    compiled_by("c++")
    case = replace(KINDS["fp16"], machine=PORTABLE)
    kernel, threads = case.load(), torch.get_num_threads()
    batch = case.batch([(1, 1)])
    subnormal = torch.arange(1, 101, dtype=torch.int16).view(torch.float16)
    assert batch.v_cache is not None
    batch.v_cache[batch.block_table[0, 0], 0] = subnormal
    try:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        out, _ = run(kernel, batch)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert torch.equal(out[0], subnormal.expand_as(out[0]))


@needs_arm
@pytest.mark.parametrize(("build", "kind"), every(ARM_BUILDS))
def test_an_arm_cpu_gives_the_reference_result(
    build: str, kind: str, compiled_by: Callable[[str], None], folder: Path
) -> None:
    compiled_by(arm_machine.CXX)
    machine, model, *_ = ARM_BUILDS[build]
    case = replace(KINDS[kind], machine=machine)
    library = cpp_build.build(source(case), case.name, machine=machine)
    check_decode_and_prefill(case, ArmAttention(ArmLibrary(library, model, folder), case.spec, case.layout))


@needs_arm
@pytest.mark.parametrize("stored", cache_cases.STORED, ids=cache_cases.name_of)
def test_an_arm_cpu_writes_and_copies_the_bits_that_this_one_does(
    stored: torch.dtype, compiled_by: Callable[[str], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = written_and_copied(stored)
    compiled_by(arm_machine.CXX)
    path = cpp_build.build(cpp.render_cache_ops(), "write_kv and copy_blocks", machine=NEON)
    library = ArmLibrary(path, "cortex-a72", folder)
    arm_machine.divert(library, monkeypatch)
    assert all(cache_cases.same(one, other) for one, other in zip(here, written_and_copied(stored), strict=True))
    assert library.called == {"pagegen_write_kv", "pagegen_copy_blocks"}


def written_and_copied(stored: torch.dtype) -> tuple[torch.Tensor, ...]:
    """What rotating, writing and copying leave: K and V caches and the rotated queries."""
    k_cache, v_cache = cache_cases.caches("HND", stored)
    k = cache_cases.hard_values(5 * 3 * 20).view(5, 3, 20).bfloat16()
    q = cache_cases.hard_values(5 * 7 * 20, seed=1).view(5, 7, 20).half()
    turn = torch.outer(torch.arange(64.0), 0.9 ** torch.arange(7.0))
    options = {"k_scale": 0.37, "v_scale": torch.tensor([1.9, 0.5, 7.0]), "kv_dtype": stored}
    if stored in cache_cases.INTEGERS:
        options["v_zero"] = torch.tensor([0.5, -1.0, 2.0])
    positions, slots = torch.tensor([63, 0, 5, 5, 40]), torch.tensor([17, -1, 0, 23, 6])
    rotated = pagegen.rope_write_kv(
        q, k, k[..., :18], positions, turn.cos(), turn.sin(), k_cache, v_cache, slots, **options
    )
    pagegen.copy_blocks(k_cache, v_cache, [(0, 1), (3, 2)])
    return k_cache, v_cache, rotated


# ---- what the compilers make of the loops ---------------------------------------------------------------


def decode_loops(cxx: str, machine: tuple[str, ...], compiled_by: Callable[[str], None], loads: str) -> list[Loop]:
    """The loops of a bf16 decode kernel that multiply what `loads` brings: 8 products of vectors at least, and one in
    6 instructions (1 in 3 or 4 is usual; in the softmax it is 1 in 7 to 10)."""
    objdump = arm_machine.OBJDUMP if cxx == arm_machine.CXX else "objdump"
    fault = compiler_fault(cxx) or (None if shutil.which(objdump) else f"needs {objdump}")
    if fault:
        pytest.skip(fault)
    compiled_by(cxx)
    case = Case("decode", 4, 128, 32, "HND", kv_heads=1, variant=CppVariant(), machine=machine)
    code = cpu_loops.instructions(cpp_build.build(source(case), case.name, machine=machine), objdump)
    products = r"vfmadd\d+ps|vdpbf16ps|fmla|bfdot"
    loops = [loop for loop in cpu_loops.innermost_loops(code) if cpu_loops.count(loop, loads)]
    return [loop for loop in loops if cpu_loops.count(loop, products) >= max(8, len(loop) / 6)]


def check_registers_hold_the_vectors(loops: list[Loop], products: str) -> None:
    """Few moves through the stack beside the products: sums that are kept for later may lie there, but no operand."""
    assert len(loops) >= 2, "the products with keys and with values"
    for loop in loops:
        moves = cpu_loops.stack_moves(loop)
        assert 3 * len(moves) <= cpu_loops.count(loop, products), moves


@needs_x86
@pytest.mark.parametrize("cxx", ["c++", "clang++"])
def test_no_vector_is_loaded_by_way_of_the_stack_for_avx2(cxx: str, compiled_by: Callable[[str], None]) -> None:
    """g++ 12 makes two 16-byte moves through the stack of a 32-byte memcpy, which made the kernel 8 times slower."""
    check_registers_hold_the_vectors(decode_loops(cxx, AVX2, compiled_by, "vpmovzxwd"), r"vfmadd\d+ps")


@needs_x86
def test_avx512_with_bf16_multiplies_bf16(compiled_by: Callable[[str], None]) -> None:
    machine = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi")  # whatever this CPU has: nothing runs
    loops = decode_loops("c++", machine, compiled_by, "vdpbf16ps")
    assert len(loops) >= 2
    assert sum(cpu_loops.count(loop, r"vfmadd\d+ps") for loop in loops) == 0


@needs_arm
@pytest.mark.parametrize(("machine", "product"), [(NEON, "fmla"), (BFDOT, "bfdot")], ids=["fmla", "bfdot"])
def test_an_arm_kernel_multiplies_by_vectors_that_stay_in_registers(
    machine: tuple[str, ...], product: str, compiled_by: Callable[[str], None]
) -> None:
    loops = decode_loops(arm_machine.CXX, machine, compiled_by, "ushll|shll2?" if product == "fmla" else "zip1|bfdot")
    check_registers_hold_the_vectors(loops, product)
    assert all(cpu_loops.count(loop, product) >= 8 for loop in loops)
