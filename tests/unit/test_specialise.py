"""The specialiser: what it binds, folds and drops, and what it must leave alone."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import subprocess
import sys

import pytest

from pagegen.codegen import triton
from pagegen.codegen.specialise import specialise
from pagegen.spec import AttentionSpec, CacheLayout, TritonVariant

TEMPLATE = '''"""Doc."""

import os
import triton
import triton.language as tl


@triton.jit
def helper(x, y, WIDE: tl.constexpr):
    if WIDE:
        x = x + y
    return x


@triton.jit(do_not_specialize=["n", "unused"])
def kernel(
    a_ptr,
    b_ptr,  # only when HAS_B
    n,
    unused,
    SIZE: tl.constexpr,  # elements a program
    MODE: tl.constexpr,
    HAS_B: tl.constexpr,
    WIDE: tl.constexpr,
):
    # about the offsets
    offsets = tl.arange(0, SIZE)
    left_over = offsets + 1
    # about the value
    if MODE == "add" and not HAS_B:
        # inside add
        value = helper(x=offsets, y=n, WIDE=WIDE)
    elif MODE == "load":
        value = tl.load(a_ptr + offsets)
    else:
        value = tl.load(b_ptr + offsets)
    if n > 3:
        value += 1
    tl.store(a_ptr + offsets, value)


def launch(a, b, n, SIZE: int, MODE: str, HAS_B: bool, WIDE: bool):
    kernel[(n // SIZE,)](a_ptr=a, b_ptr=b, n=n, unused=7, SIZE=SIZE, MODE=MODE, HAS_B=HAS_B, WIDE=WIDE)
'''


def special(**changes: object) -> str:
    bindings = {"SIZE": 64, "MODE": "add", "HAS_B": False, "WIDE": True, **changes}
    return specialise(TEMPLATE, bindings, header=["made by a test"], roots=["launch"])  # type: ignore[arg-type]


def test_the_branch_that_the_constants_choose_stays_with_its_comments() -> None:
    source = special()
    assert "    # about the value\n    # inside add\n    value = helper(x=offsets, y=n)\n" in source
    assert "tl.load" not in source


def test_a_chain_of_elifs_is_folded_to_the_branch_that_is_left() -> None:
    assert "value = tl.load(a_ptr + offsets)" in special(MODE="load")
    other = special(MODE="other")
    assert "value = tl.load(b_ptr + offsets)" in other
    assert "if MODE" not in other


def test_a_test_on_run_time_values_is_not_folded() -> None:
    assert "    if n > 3:\n        value += 1\n" in special()


def test_unread_assignments_arguments_functions_and_imports_are_dropped() -> None:
    source = special(MODE="load")
    for gone in ("left_over", "helper", "b_ptr", "unused", "import os", "WIDE", "HAS_B"):
        assert gone not in source
    assert '@triton.jit(do_not_specialize=["n"])' in source
    assert "def launch(a, n):" in source


def test_constants_that_are_read_are_named_at_the_top_with_their_comment() -> None:
    source = special()
    assert "SIZE = tl.constexpr(64)  # elements a program\n" in source
    assert "MODE =" not in source
    assert "n // SIZE.value" in source


def test_the_header_stands_before_the_docstring() -> None:
    assert special().startswith('# made by a test\n"""Doc."""\n')


def test_an_unknown_or_missing_constant_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="TYPO"):
        special(TYPO=1)
    with pytest.raises(ValueError, match="SIZE"):
        specialise(TEMPLATE, {"MODE": "add", "HAS_B": False, "WIDE": True}, header=[], roots=["launch"])
    with pytest.raises(ValueError, match="start"):
        specialise(TEMPLATE, {"SIZE": 1, "MODE": "a", "HAS_B": True, "WIDE": True}, header=[], roots=["start"])


SPECS = {
    "llama": AttentionSpec.from_model("llama-3.1-8b"),
    "smollm2": AttentionSpec.from_model("smollm2-135m"),
    "gemma": AttentionSpec.from_model("gemma-2-2b", layer="sliding"),
    "gpt-oss": AttentionSpec.from_model("gpt-oss-20b"),
    "alibi": AttentionSpec(
        num_q_heads=6, num_kv_heads=2, head_dim=80, v_head_dim=48, alibi=True, causal=False, window=9
    ),
    "latent": AttentionSpec(num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, shared_kv=True),
    "int4": AttentionSpec(
        num_q_heads=8, num_kv_heads=2, head_dim=96, kv_dtype="int4", kv_scale_granularity="token_head",
        kv_zero_points=True, score_mod="soft_cap(30.0)",
    ),
    "float8": AttentionSpec(
        num_q_heads=8, num_kv_heads=8, head_dim=192, v_head_dim=128, kv_dtype="float8_e4m3fn",
        kv_scale_granularity="head", mask_mod="chunked(512)",
    ),
}  # fmt: skip
VARIANTS = {
    "one-pass": TritonVariant(),
    "splits": TritonVariant(num_splits=3),
    "fixed-splits": TritonVariant(split_tokens=128, reduce="last", head_pieces="split"),
    "balanced": TritonVariant(programs=8, head_pieces="split"),
    "fma": TritonVariant(dot="fma", tile_rows=2, tile_kv=16),
    "descriptors": TritonVariant(loads="descriptor", page_walk="tile_in_page", tile_kv=32),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(
    "form",
    [
        triton.Form(decode=True, wide=False, native_float8=False),
        triton.Form(decode=False, write_lse=True, tree=True, native_float8=True),
    ],
    ids=["decode", "ragged"],
)
def test_generated_kernels_have_no_unused_argument_no_dead_branch_and_no_free_name(
    spec: AttentionSpec, variant: TritonVariant, form: triton.Form
) -> None:
    tree = ast.parse(triton.render_attention(spec, CacheLayout(block_size=32), variant, form))
    constants = {t.id for s in tree.body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
    called = {n.id for s in tree.body for n in ast.walk(s) if isinstance(n, ast.Name)}
    for function in [s for s in tree.body if isinstance(s, ast.FunctionDef)]:
        loaded = {n.id for s in function.body for n in ast.walk(s) if isinstance(n, ast.Name) and n.id != "_"}
        assert {a.arg for a in function.args.args} <= loaded, function.name
        assert function.name.startswith("launch") or function.name in called
        for branch in [n for n in ast.walk(function) if isinstance(n, ast.If | ast.IfExp)]:
            tested = {n.id for n in ast.walk(branch.test) if isinstance(n, ast.Name)}
            assert tested - constants, f"{function.name} still tests {ast.unparse(branch.test)}"
        for block in [n.body for n in ast.walk(function) if hasattr(n, "body") and isinstance(n.body, list)]:
            assert not any(isinstance(s, ast.Return) for s in block[:-1]), f"{function.name} goes on after a return"
        free = {name for name in loaded if name.isupper()}
        assert free <= constants


def test_the_same_inputs_give_the_same_bytes_under_another_hash_seed() -> None:
    script = (
        "from pagegen.codegen import triton; from pagegen.spec import *;"
        "spec = AttentionSpec.from_model('llama-3.1-8b', kv_dtype='int8')"
        ".replace(mask_mod='chunked(64)', score_mod='soft_cap(3.0)', kv_scale_granularity='token_head');"
        "print(triton.render_attention(spec, CacheLayout(block_size=16), TritonVariant(programs=4),"
        " triton.Form(decode=True)))"
    )
    there = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, check=True,
        text=True,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as here:  # whose seed is a random one or 0
        exec(script, {})
    assert there.stdout == here.getvalue()


@pytest.mark.parametrize(
    ("variant", "block_size", "message"),
    [
        (TritonVariant(page_walk="tile_in_page", tile_kv=64), 24, "tile_in_page needs"),
        (TritonVariant(page_walk="pages_in_tile", tile_kv=64), 128, "pages_in_tile needs"),
        (TritonVariant(page_walk="pages_in_tile", tile_kv=64), 24, "pages_in_tile needs"),
    ],
)
def test_a_page_walk_that_does_not_fit_the_block_size_is_refused(
    variant: TritonVariant, block_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        triton.bindings(SPECS["llama"], CacheLayout(block_size=block_size), variant, triton.Form(decode=True))


def test_an_option_that_is_false_and_a_division_by_one_leave_no_trace() -> None:
    template = """
import triton.language as tl
def launch(n, PACK: int, STAGES: bool):
    return tl.range(0, n // PACK, stages=STAGES)
"""
    assert "tl.range(0, n)" in specialise(template, {"PACK": 1, "STAGES": False}, header=[], roots=["launch"])
    kept = specialise(template, {"PACK": 2, "STAGES": True}, header=[], roots=["launch"])
    assert "tl.range(0, n // PACK, stages=STAGES)" in kept
