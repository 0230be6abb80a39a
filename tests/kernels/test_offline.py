"""Generated kernels compiled for GPUs that are not here: no spills, the right instructions, and no need of pagegen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagegen.codegen import triton
from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant
from pagegen.targets import offline
from pagegen.targets.disassembly import main_loop
from pagegen.targets.errors import CompileError

LLAMA = AttentionSpec.from_model("llama-3.1-8b")
BLOCKS = CacheLayout(block_size=16)


def default_facts(spec: AttentionSpec, target: str, *, decode: bool) -> offline.ResourceFacts:
    variant = triton.default_variant(spec, BLOCKS, decode=decode)
    return offline.compile_facts(spec, BLOCKS, variant, Target.parse(target), decode=decode)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "ragged"])
def test_default_variants_spill_nothing_and_use_matrix_instructions(target: str, decode: bool) -> None:
    facts = default_facts(LLAMA, target, decode=decode)
    assert facts.spills == 0
    assert facts.loop is not None
    assert facts.loop.matrix > 0
    if decode:
        assert facts.programs_per_unit >= 2


@pytest.mark.parametrize("model", ["smollm2-135m", "phi-3.5-mini-instruct", "gemma-2-2b", "gpt-oss-20b"])
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_default_decode_variants_of_other_geometries_spill_nothing(model: str, target: str) -> None:
    assert default_facts(AttentionSpec.from_model(model), target, decode=True).spills == 0


def test_keys_and_values_are_copied_asynchronously_on_nvidia() -> None:
    facts = default_facts(LLAMA, "sm_80", decode=True)
    assert facts.loop is not None
    # K and V tiles of 64 x 128 bf16 by 128 threads in 16-byte pieces: 8 copies a thread each
    assert facts.loop.async_copies == 16


def test_an_emitted_file_compiles_without_pagegen(tmp_path: Path) -> None:
    variant = triton.default_variant(LLAMA, BLOCKS, decode=True)
    kernel = tmp_path / "kernel.py"
    kernel.write_text(triton.render_attention(LLAMA, BLOCKS, variant, triton.Form(decode=True)))
    script = tmp_path / "compile.py"
    script.write_text(
        """
import sys
sys.modules["pagegen"] = None  # importing it fails
import kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
names = kernel.paged_attention_kernel.arg_names
types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "partial_out_ptr": "*fp32",
         "partial_lse_ptr": "*fp32", "block_table_ptr": "*i32", "seq_lens_ptr": "*i32", "scale": "fp32"}
source = ASTSource(fn=kernel.paged_attention_kernel, signature={n: types.get(n, "i32") for n in names})
print(len(compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]) > 0)
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_a_kernel_that_the_compiler_refuses_is_an_error_with_its_name_and_first_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variant = TritonVariant(num_warps=2, num_stages=1)
    good = triton.render_attention(LLAMA, BLOCKS, variant, triton.Form(decode=True))
    monkeypatch.setattr(triton, "render_attention", lambda *_: good.replace("tl.trans(k)", "k"))
    with pytest.raises(CompileError) as caught:
        offline.compile_facts(LLAMA, BLOCKS, variant, Target.parse("sm_80"), decode=True)
    assert str(caught.value).startswith(f"{variant.name} does not compile for sm_80: ")
    assert "\n" not in str(caught.value)


def test_a_target_that_is_no_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="target must be a GPU"):
        offline.compile_facts(LLAMA, BLOCKS, TritonVariant(), Target.parse("cpu"), decode=True)


def test_the_main_loop_is_the_innermost_one_with_matrix_instructions() -> None:
    listing = """
.L_x_1:
        /*0000*/  MOV R1, R2 ;
.L_x_2:
        /*0010*/  LDGSTS.E.BYPASS.128 [R1], [R2] ;
        /*0020*/  HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/  @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0040*/  IADD3 R1, R2, R3 ;
        /*0050*/  @P1 BRA `(.L_x_3) ;
        /*0060*/  @P1 BRA `(.L_x_1) ;
"""
    loop = main_loop(listing)
    assert loop is not None
    assert (loop.instructions, loop.matrix, loop.async_copies) == (3, 1, 1)
    assert main_loop("        /*0000*/  EXIT ;\n") is None
