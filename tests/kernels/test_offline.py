"""Generated kernels compiled for GPUs that are not here: no spills, the right instructions, and no need of pagegen."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pagegen.cli.main import main
from pagegen.codegen import triton
from pagegen.codegen.defaults import default_variant
from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant
from pagegen.targets import offline
from pagegen.targets.disassembly import MainLoop, main_loop
from pagegen.targets.errors import CompileError

LLAMA = AttentionSpec.from_model("llama-3.1-8b")
BLOCKS = CacheLayout(block_size=16)
LARGE_BLOCKS = CacheLayout(block_size=64)


def night(*values: Any) -> Any:
    """Parameters of a test that is left to --nightly."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def facts_of(
    spec: AttentionSpec, target: str, *, decode: bool, layout: CacheLayout = BLOCKS, **changes: Any
) -> offline.ResourceFacts:
    """The default variant's facts, with some of its fields changed."""
    named = Target.parse(target)
    variant = replace(default_variant(spec, layout, named, decode=decode), **changes)
    return offline.compile_facts(spec, layout, variant, named, decode=decode)


def loop_of(facts: offline.ResourceFacts) -> MainLoop:
    assert facts.loop is not None
    return facts.loop


@pytest.mark.parametrize(
    ("target", "decode"),
    [
        *((target, decode) for target in ("sm_80", "sm_90", "sm_100", "gfx942") for decode in (True, False)),
        ("sm_120", True), ("gfx950", False), night("sm_120", False), night("gfx950", True),
    ],
)  # fmt: skip
def test_default_variants_spill_nothing_and_use_matrix_instructions(target: str, decode: bool) -> None:
    facts = facts_of(LLAMA, target, decode=decode)
    assert facts.spills == 0
    assert loop_of(facts).matrix > 0
    if decode:
        assert facts.programs_per_unit >= 2


@pytest.mark.parametrize(
    ("target", "layout"),
    [
        ("sm_80", BLOCKS), ("sm_90", BLOCKS), ("gfx942", BLOCKS), ("sm_90", LARGE_BLOCKS),
        night("sm_80", LARGE_BLOCKS), night("gfx942", LARGE_BLOCKS),
    ],
    ids=lambda value: f"block-{value.block_size}" if isinstance(value, CacheLayout) else value,
)  # fmt: skip
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "ragged"])
def test_the_main_loop_loads_16_bytes_at_once_and_neither_spills_nor_divides(
    target: str, layout: CacheLayout, decode: bool
) -> None:
    facts = facts_of(LLAMA, target, decode=decode, layout=layout)
    loop = loop_of(facts)
    variant = default_variant(LLAMA, layout, Target.parse(target), decode=decode)
    # a tile of K and one of V, bf16, by all threads in 16-byte pieces
    pieces = 2 * variant.tile_kv * 128 * 2 // 16 // (variant.num_warps * Target.parse(target).warp_size)
    if target == "gfx942":  # it has no asynchronous copies of 16 bytes
        assert (loop.wide_loads, loop.async_copies) == (pieces, 0)
    else:
        assert (loop.wide_loads, loop.async_copies) == (0, pieces)
    # one block number for each block of a tile; AMD's compiler may load one of them twice
    blocks = max(1, variant.tile_kv // layout.block_size)
    assert 1 <= loop.narrow_loads <= blocks + (target == "gfx942")
    assert (loop.local_memory, loop.integer_divisions, facts.spills) == (0, 0, 0)
    matrix = {"sm_80": "HMMA", "sm_90": "HMMA" if decode else "HGMMA", "gfx942": "v_mfma"}
    assert loop.matrix_kind == matrix[target]
    if decode:
        assert facts.programs_per_unit >= 2


@pytest.mark.parametrize("layout", [BLOCKS, night(LARGE_BLOCKS)], ids=["block-16", "block-64"])
def test_each_stage_holds_more_of_the_tiles_to_come(layout: CacheLayout) -> None:
    shared = [facts_of(LLAMA, "sm_90", decode=True, layout=layout, num_stages=n).shared_bytes for n in (2, 3, 4)]
    tiles = 2 * 64 * 128 * 2  # K and V, bf16
    assert [more - less for less, more in zip(shared, shared[1:], strict=False)] == [tiles, tiles]


VARIANTS: dict[str, dict[str, Any]] = {
    "last": {"reduce": "last", "num_splits": 8},
    "split-tokens": {"split_tokens": 512, "num_splits": 1},
    "balanced": {"programs": 264, "num_splits": 1},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("target", "decode"), [("sm_90", True), ("gfx942", False)], ids=["decode", "ragged"])
def test_other_schedules_and_reductions_have_the_same_loop(name: str, target: str, decode: bool) -> None:
    facts = facts_of(LLAMA, target, decode=decode, **VARIANTS[name])
    usual = loop_of(facts_of(LLAMA, target, decode=decode))
    loop = loop_of(facts)
    assert facts.spills == 0
    assert (loop.matrix, loop.matrix_kind) == (usual.matrix, usual.matrix_kind)
    assert (loop.async_copies, loop.wide_loads) == (usual.async_copies, usual.wide_loads)
    assert (loop.local_memory, loop.integer_divisions) == (0, 0)


@pytest.mark.parametrize(
    ("target", "decode"), [("sm_90", True), ("sm_100", False), night("sm_90", False), night("sm_100", True)]
)
def test_descriptors_copy_a_tile_of_keys_and_one_of_values_at_once(target: str, decode: bool) -> None:
    facts = facts_of(LLAMA, target, decode=decode, layout=LARGE_BLOCKS, loads="descriptor", page_walk="tile_in_page")
    loop = loop_of(facts)
    assert facts.spills == 0
    assert (loop.descriptor_copies, loop.async_copies, loop.wide_loads, loop.narrow_loads) == (2, 0, 0, 1)


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_multiply_adds_need_no_matrix_instructions_and_spill_nothing(target: str) -> None:
    facts = facts_of(LLAMA, target, decode=True, dot="fma", tile_rows=4, tile_kv=16, num_stages=2)
    loop = loop_of(facts)
    assert (facts.spills, loop.local_memory, loop.matrix) == (0, 0, 0)
    assert loop.instructions > 4 * 16 * 128 * 2 // (4 * 64)  # the products of both dots, by at most 256 threads


def test_specialised_warps_leave_the_matrix_instructions_a_loop_of_their_own() -> None:
    facts = facts_of(
        LLAMA, "sm_100", decode=False, layout=CacheLayout(block_size=128), tile_kv=128, page_walk="tile_in_page",
        loads="descriptor", warp_specialize=True, num_warps=8, num_stages=2,
    )  # fmt: skip
    loop = loop_of(facts)
    assert facts.spills == 0
    assert loop.matrix_kind == "UTCHMMA"
    assert (loop.descriptor_copies, loop.async_copies, loop.wide_loads) == (0, 0, 0)  # other warps copy


def test_an_emitted_file_compiles_without_pagegen(tmp_path: Path) -> None:
    variant = default_variant(LLAMA, BLOCKS, Target.parse("sm_90"), decode=True)
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


def test_inspect_prints_one_row_a_kernel_and_everything_as_json() -> None:
    arguments = ["inspect", "--model", "llama-3.1-8b", "--block-size", "16", "--target", "sm_90,gfx942"]
    table = CliRunner().invoke(main, arguments).stdout.splitlines()
    assert table[0].split()[:6] == ["target", "kernel", "regs", "spills", "shared", "per"]
    assert [line.split()[:2] for line in table[2:6]] == [
        ["sm_90", "decode"], ["sm_90", "ragged"], ["gfx942", "decode"], ["gfx942", "ragged"],
    ]  # fmt: skip
    assert "HGMMA" in table[3]
    document = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert [kernel["loop"]["async_copies"] for kernel in document["kernels"]] == [16, 8, 0, 0]


SASS = """
        /*0000*/  MOV R1, R2 ;
        /*0010*/  @P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0020*/  I2F.RP R4, R5 ;
.L_x_2:
        /*0030*/  SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0040*/  @!P1 BRA `(.L_x_5) ;
.L_x_3:
        /*0050*/  LDGSTS.E.BYPASS.128 [R1], desc[UR20][R2.64], P6 ;
        /*0060*/  LDGSTS.E.64 [R1], desc[UR20][R2.64] ;
        /*0070*/  @P2 LDG.E.128 R4, desc[UR20][R2.64] ;
        /*0080*/  @P2 LDG.E R4, desc[UR20][R2.64] ;
        /*0090*/  UTMALDG.4D [UR8], [UR4], desc[URZ] ;
        /*00a0*/  HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*00b0*/  I2F.RP R4, R5 ;
        /*00c0*/  MUFU.RCP R4, R4 ;
        /*00d0*/  F2I.FTZ.U32.TRUNC.NTZ R4, R4 ;
        /*00e0*/  I2FP.F32.S32 R4, R5 ;
        /*00f0*/  MUFU.RCP R4, R4 ;
        /*0100*/  STL [R1+0x4], R5 ;
        /*0110*/  @P3 BRA `(.L_x_2) ;
.L_x_4:
        /*0120*/  LDG.E R7, desc[UR20][R2.64] ;
        /*0130*/  @P4 BRA `(.L_x_4) ;
        /*0140*/  @P5 BRA `(.L_x_1) ;
.L_x_9:
        /*0150*/  EXIT ;
.L_x_5:
        /*0160*/  SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0170*/  @!P1 BRA `(.L_x_5) ;
        /*0180*/  BRA `(.L_x_3) ;
.L_x_6:
        /*0190*/  BRA `(.L_x_6);
"""


def test_the_main_loop_is_the_innermost_one_with_matrix_instructions_and_its_waits_elsewhere() -> None:
    loop = main_loop(SASS)
    assert loop == MainLoop(
        instructions=15 + 3,  # the wait behind the end belongs to it
        matrix=1,
        matrix_kind="HMMA",
        async_copies=1,
        wide_loads=1,
        descriptor_copies=1,
        narrow_loads=2,
        local_memory=1,
        integer_divisions=1,  # not the reciprocal of a float
    )
    assert main_loop("        /*0000*/  EXIT ;\n") is None


GCN = """
	s_cbranch_scc1 .LBB0_4
.LBB0_1:
	s_load_dword s9, s[0:1], 0x54
	global_load_dwordx4 v[4:7], v[4:5], off
	buffer_load_dwordx4 v0, s[8:11], 0 offen lds
	buffer_load_dword v20, v20, s[4:7], 0 offen
	s_cbranch_execz .LBB0_3
	scratch_load_dword v3, off, s32
	buffer_store_dword v3, off, s[0:3], 0 offset:4
.LBB0_3:
	v_rcp_iflag_f32_e32 v2, v2
	v_rcp_f32_e32 v2, v2
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_cbranch_scc1 .LBB0_1
.LBB0_4:
	s_endpgm
"""


def test_amd_listings_are_read_alike() -> None:
    assert main_loop(GCN) == MainLoop(
        instructions=11, matrix=1, matrix_kind="v_mfma", async_copies=1, wide_loads=1, descriptor_copies=0,
        narrow_loads=2, local_memory=2, integer_divisions=1,
    )  # fmt: skip


def test_without_matrix_instructions_the_main_loop_is_that_with_most_multiply_adds() -> None:
    listing = """
.L_x_1:
        /*0000*/  FFMA R1, R2, R3, R1 ;
        /*0010*/  @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0020*/  FFMA R1, R2, R3, R1 ;
        /*0030*/  FFMA R1, R2, R3, R1 ;
        /*0040*/  @P0 BRA `(.L_x_2) ;
"""
    loop = main_loop(listing)
    assert loop is not None
    assert (loop.instructions, loop.matrix, loop.matrix_kind) == (3, 0, "")
