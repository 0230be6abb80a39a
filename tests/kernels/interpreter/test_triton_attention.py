"""The Triton kernels in Triton's interpreter against the float64 reference, on batches full of poison.

Run with TRITON_INTERPRET=1, in a process of its own: the interpreter replaces triton.jit for the whole process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import compare
from triton_cases import DECODE, INTERPRETER, RAGGED, Case, coarser, on_both_batches, tiles

from pagegen import paths
from pagegen.codegen import triton as codegen
from pagegen.targets.triton_launch import form_of
from pagegen.targets.triton_module import import_source

CASES = [
    # head dims, groups, block sizes, orders and page walks
    Case("llama", 4, 128, 16, dtype="bfloat16", variant=tiles("pages_in_tile", splits=4)),
    Case("smollm", 3, 64, 64, "HND", kv_heads=3, variant=tiles("tile_in_page", kv=32)),
    Case("mha-block-1", 1, 64, 1, variant=tiles("pages_in_tile", kv=32)),
    Case("block-1-any", 1, 64, 1, "HND", variant=tiles("any")),
    Case("group-7", 7, 80, 8, "pool", variant=tiles("pages_in_tile", splits=3)),
    Case("group-8-block-24", 8, 96, 24, "packed", variant=tiles("any", splits=2)),
    Case("group-16", 16, 96, 256, dtype="float16", kv_heads=1, variant=tiles("tile_in_page", kv=128)),
    Case("group-48", 48, 128, 16, kv_heads=1, variant=tiles("pages_in_tile", rows=64)),
    Case("group-71", 71, 64, 16, kv_heads=1, variant=tiles("any", rows=128)),
    Case("wide-head", 4, 256, 64, "pool", "bfloat16", kv_heads=1, variant=tiles("tile_in_page", kv=16)),
    Case("odd-head", 2, 100, 24, "packed", variant=tiles("any", kv=32)),
    Case("tiny-head", 2, 8, 16, variant=tiles("pages_in_tile")),
    Case("narrow-value", 4, 64, 16, variant=tiles("pages_in_tile", splits=2), fields={"v_head_dim": 40}),
    Case("many-rows", 4, 64, 16, variant=tiles("pages_in_tile", rows=64)),
    Case("group-128", 128, 32, 16, kv_heads=1, variant=tiles("pages_in_tile", rows=64)),
    Case("block-528", 2, 56, 528, "pool", variant=tiles("tile_in_page", kv=16)),
    Case("group-29", 29, 112, 272, "HND", kv_heads=1, variant=tiles("tile_in_page", kv=16, rows=32)),
    Case("group-6", 6, 160, 784, kv_heads=1, variant=tiles("tile_in_page", kv=16, head_pieces="split")),
    Case("group-9", 9, 224, 544, "packed", kv_heads=1, variant=tiles("tile_in_page", kv=32, splits=2)),
    Case("group-5", 5, 192, 1056, "HND", kv_heads=1, variant=tiles("tile_in_page", kv=32, head_pieces="split")),
    Case("group-12", 12, 80, 2048, kv_heads=1, variant=tiles("tile_in_page", kv=64)),
    # features
    Case("window", 4, 64, 16, variant=tiles("pages_in_tile", kv=32), fields={"window": 33}),
    Case("window-splits", 4, 64, 24, variant=tiles("any", kv=16, splits=3), fields={"window": 40}),
    Case("window-of-one", 2, 64, 16, variant=tiles("pages_in_tile", kv=16), fields={"window": 1}),
    Case("softcap", 4, 64, 16, variant=tiles("pages_in_tile"), fields={"logit_softcap": 5.0}),
    Case("alibi", 4, 64, 16, variant=tiles("pages_in_tile", splits=2), fields={"alibi": True}),
    Case("sinks", 4, 64, 16, variant=tiles("pages_in_tile"), fields={"sinks": True}),
    Case("sinks-splits", 4, 64, 16, variant=tiles("pages_in_tile", kv=16, splits=5), fields={"sinks": True}),
    Case("bidirectional", 4, 64, 16, variant=tiles("pages_in_tile"), fields={"causal": False}),
    Case("bidirectional-window", 4, 64, 16, variant=tiles("any"), fields={"causal": False, "window": 21}),
    Case("mixed-dtypes", 4, 64, 16, variant=tiles("pages_in_tile"), fields={"kv_dtype": "bfloat16"}),
    Case("everything", 3, 80, 24, "packed", kv_heads=1, variant=tiles("any", kv=16, splits=3),
         fields={"window": 50, "logit_softcap": 8.0, "alibi": True, "sinks": True, "scale": 0.3}),
]  # fmt: skip


@pytest.mark.parametrize(("sequences", "case"), on_both_batches(CASES, "test_triton_attention"))
def test_a_kernel_equals_the_reference_whatever_unused_memory_holds(
    case: Case, sequences: list[tuple[int, int]]
) -> None:
    batch = case.batch(sequences)
    call = case.run(batch)
    out, lse = batch.expected()
    compare(call.out, call.lse, out, lse, coarser(case.spec))


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[7]], ids=lambda case: case.name)
def test_moving_blocks_changes_no_bit(case: Case) -> None:
    batch = case.batch(DECODE)
    here, there = case.run(batch), case.run(batch.permuted())
    assert torch.equal(here.out, there.out)
    assert here.lse is not None
    assert there.lse is not None
    assert torch.equal(here.lse, there.lse)


@pytest.mark.parametrize("length", [31, 32, 33, 34, 100])
def test_a_window_counts_keys_its_own_included(length: int) -> None:
    case = Case("window", 2, 64, 24, variant=tiles("any", kv=16), fields={"window": 33})
    batch = case.batch([(length, 1), (length, min(length, 5))])
    call = case.run(batch)
    compare(call.out, call.lse, *batch.expected(), torch.float32)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_a_sink_counts_once_however_the_work_is_split(splits: int) -> None:
    case = Case("sinks", 4, 64, 16, variant=tiles("pages_in_tile", kv=16, splits=splits), fields={"sinks": True})
    batch = case.batch(DECODE)
    call = case.run(batch)
    compare(call.out, call.lse, *batch.expected(), torch.float32)
    assert call.lse is not None
    assert batch.sinks is not None
    torch.testing.assert_close(call.lse[0], batch.sinks)  # an empty sequence: the sink alone


def test_soft_cap_is_finite_for_enormous_scores() -> None:
    case = Case("softcap", 2, 64, 16, variant=tiles("pages_in_tile"), fields={"logit_softcap": 50.0})
    batch = case.batch([(40, 1), (9, 4)], magnitude=1e14)  # scores up to 1e30
    call = case.run(batch)
    assert call.out[: batch.spec.num_q_heads].isfinite().all()
    compare(call.out, call.lse, *batch.expected(), torch.float32)


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "ragged"])
@pytest.mark.parametrize("name", ["llama", "sinks-splits", "everything", "window"])
def test_the_specialised_kernel_equals_the_unspecialised_template_bit_for_bit(name: str, decode: bool) -> None:
    case = next(c for c in CASES if c.name == name)
    batch = case.batch(DECODE if decode else RAGGED)
    special = case.run(batch)
    call = batch.call()
    form = form_of(call, case.variant, INTERPRETER)
    template = import_source((paths.data("templates") / codegen.ATTENTION).read_text())
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc", "max_seq_len", "scale",
             "alibi_slopes", "sinks", "tree_mask", "k_scale", "v_scale", "k_zero", "v_zero", "captures", "out",
             "lse")  # fmt: skip
    template.launch(
        **{name: getattr(call, name) for name in names},
        **codegen.bindings(case.spec, case.layout, case.variant, form),
    )
    assert call.lse is not None
    assert special.lse is not None
    assert torch.equal(call.out, special.out)
    assert torch.equal(call.lse, special.lse)


def test_results_do_not_depend_on_other_requests_in_the_batch() -> None:
    case = CASES[1]
    batch = case.batch([(40, 1), (90, 1)])
    alone = replace(
        batch, q=batch.q[1:], block_table=batch.block_table[1:], seq_lens=batch.seq_lens[1:], sequences=((90, 1),)
    )
    assert torch.equal(case.run(batch).out[1:], case.run(alone).out)


def test_the_operator_runs_the_kernels_when_the_interpreter_is_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    import pagegen
    from pagegen.ops import attention

    monkeypatch.setenv("PAGEGEN_TARGET", "interpreter")
    attention.forget()
    batch = CASES[1].batch(RAGGED)
    out, lse = pagegen.paged_attention(**batch.kwargs(), return_lse=True)
    compare(out, lse, *batch.expected(), torch.float32)
    attention.forget()
