"""The rest of the kernel family in the interpreter: quantised and shared caches, head pieces, schedules, reductions,
trees, score and mask functions. As in test_triton_attention.py, against float64 and on batches full of poison."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import compare
from test_cpu_addresses import moved_far
from triton_cases import DECODE, RAGGED, Case, coarser, on_both_batches, tiles

from pagegen import modifiers
from pagegen.codegen import triton as codegen
from pagegen.targets import triton_launch

TENSOR = {"kv_scale_granularity": "tensor"}
HEAD = {"kv_scale_granularity": "head"}
TOKEN = {"kv_scale_granularity": "token_head"}
ZEROS = {**TOKEN, "kv_zero_points": True}
LATENT = {"shared_kv": True}

CASES = [
    # quantised caches
    Case("e4m3", 4, 64, 16, "pool", variant=tiles("pages_in_tile"), fields={"kv_dtype": "float8_e4m3fn", **TENSOR}),
    Case("e4m3-head-bf16", 2, 96, 24, dtype="bfloat16", variant=tiles("any", splits=3),
         fields={"kv_dtype": "float8_e4m3fn", **HEAD}),
    Case("e5m2-sinks", 4, 64, 16, variant=tiles("pages_in_tile", splits=4),
         fields={"kv_dtype": "float8_e5m2", "sinks": True, **HEAD}),
    Case("e5m2-token", 4, 64, 16, variant=tiles("pages_in_tile"), fields={"kv_dtype": "float8_e5m2", **TOKEN}),
    Case("int8-head", 3, 80, 16, "HND", variant=tiles("pages_in_tile", head_pieces="split"),
         fields={"kv_dtype": "int8", **HEAD}),
    Case("int8-token", 4, 64, 24, variant=tiles("any", splits=2), fields={"kv_dtype": "int8", **TOKEN}),
    Case("int8-zeros", 4, 64, 16, variant=tiles("pages_in_tile"), fields={"kv_dtype": "int8", **ZEROS}),
    Case("int4-head", 3, 64, 24, "pool", variant=tiles("any", splits=2), fields={"kv_dtype": "int4", **HEAD}),
    Case("int4-token", 4, 64, 16, "packed", variant=tiles("pages_in_tile"), fields={"kv_dtype": "int4", **TOKEN}),
    Case("int4-zeros-window", 2, 80, 24, variant=tiles("any", head_pieces="split", kv=32),
         fields={"kv_dtype": "int4", "window": 40, **ZEROS}),
    # latent caches
    Case("latent", 20, 72, 16, kv_heads=1, variant=tiles("pages_in_tile", head_pieces="split", splits=2),
         fields={"v_head_dim": 64, **LATENT}),
    Case("latent-576", 17, 576, 64, kv_heads=1, variant=tiles("tile_in_page", head_pieces="split"),
         fields={"v_head_dim": 512, **LATENT}),
    Case("latent-padded", 4, 72, 16, kv_heads=1, variant=tiles("pages_in_tile"), fields={"v_head_dim": 40, **LATENT}),
    Case("latent-e4m3", 20, 72, 16, kv_heads=1, variant=tiles("pages_in_tile", head_pieces="split"),
         fields={"v_head_dim": 64, "kv_dtype": "float8_e4m3fn", **TOKEN, **LATENT}),
    # head pieces, and groups that share a tile's rows or do not fit it
    Case("pieces-80", 2, 80, 16, variant=tiles("pages_in_tile", head_pieces="split", splits=2)),
    Case("pieces-192-128", 2, 192, 32, kv_heads=1, variant=tiles("pages_in_tile", head_pieces="split"),
         fields={"v_head_dim": 128}),
    Case("pieces-of-values", 2, 64, 24, variant=tiles("any", head_pieces="split"), fields={"v_head_dim": 100}),
    Case("group-29-in-two-tiles", 29, 64, 16, kv_heads=1, variant=tiles("pages_in_tile", splits=2)),
    Case("fma-group-1", 1, 64, 16, variant=tiles("pages_in_tile", rows=1, kv=32, dot="fma")),
    Case("fma-group-3", 3, 80, 16, variant=tiles("pages_in_tile", rows=4, kv=16, dot="fma", head_pieces="split")),
    # loads, schedules and reductions
    Case("descriptors", 4, 64, 64, "HND", variant=tiles("tile_in_page", kv=32, loads="descriptor")),
    Case("descriptor-pieces", 2, 80, 32, variant=tiles("tile_in_page", kv=32, loads="descriptor", head_pieces="split")),
    Case("warp-specialised", 2, 64, 32, variant=tiles("tile_in_page", kv=32, loads="descriptor", warp_specialize=True)),
    Case("last-to-finish", 4, 80, 16, variant=tiles("pages_in_tile", kv=16, splits=4, reduce="last"),
         fields={"sinks": True}),
    Case("last-pieces", 4, 80, 16, variant=tiles("pages_in_tile", kv=16, splits=4, reduce="last", head_pieces="split")),
    Case("split-tokens", 4, 64, 16, variant=tiles("pages_in_tile", kv=16, split_tokens=32), fields={"sinks": True}),
    Case("split-tokens-last", 4, 64, 16, variant=tiles("pages_in_tile", kv=16, split_tokens=32, reduce="last")),
    Case("balanced", 4, 64, 16, variant=tiles("pages_in_tile", kv=16, programs=7), fields={"sinks": True}),
    Case("balanced-window", 4, 64, 24, variant=tiles("any", kv=16, programs=3), fields={"window": 40}),
    Case("balanced-group-20", 20, 64, 16, kv_heads=1, variant=tiles("pages_in_tile", programs=5, kv=16)),
    Case("balanced-many-programs", 2, 64, 16, variant=tiles("pages_in_tile", kv=16, programs=64, rows=16)),
    Case("invariant", 4, 64, 16, variant=tiles("pages_in_tile", kv=16, split_tokens=32),
         fields={"batch_invariant": True}),
    # as modifiers
    Case("chunked", 4, 64, 16, variant=tiles("pages_in_tile", kv=32), fields={"mask_mod": "chunked(48)"}),
    Case("chunked-balanced", 4, 64, 16, variant=tiles("pages_in_tile", kv=16, programs=6),
         fields={"mask_mod": "chunked(48)"}),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(("sequences", "case"), on_both_batches(CASES, "test_triton_features"))
def test_a_kernel_equals_the_reference_whatever_unused_memory_holds(
    case: Case, sequences: list[tuple[int, int]]
) -> None:
    batch = case.batch(sequences)
    call = case.run(batch)
    compare(call.out, call.lse, *batch.expected(), coarser(case.spec))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_bits_decode_as_the_hardware_would(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sm_80 runs: every one of the 256 values, the NaNs and infinities among them, as a key and as a value."""
    case = Case("bits", 1, 16, 16, kv_heads=1, variant=tiles("pages_in_tile"), fields={"kv_dtype": kv_dtype})
    monkeypatch.setattr(triton_launch, "form_of", lambda *a: replace(_form_of(*a), native_float8=False))
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for row in every:
        batch = case.batch([(1, 1)])
        block = int(batch.block_table[0, 0])
        batch.k_cache.view(torch.uint8)[block, 0, 0] = 0
        batch.v_cache.view(torch.uint8)[block, 0, 0] = row
        call = case.run(batch)
        torch.testing.assert_close(call.out[0, 0], row.view(case.spec.kv_dtype).float(), rtol=0, atol=0, equal_nan=True)


_form_of = triton_launch.form_of


@pytest.mark.parametrize("name", ["e4m3", "int4-zeros-window", "split-tokens", "balanced", "latent", "last-to-finish"])
def test_moving_blocks_changes_no_bit(name: str) -> None:
    case = BY_NAME[name]
    batch = case.batch(DECODE)
    here, there = case.run(batch), case.run(batch.permuted())
    assert torch.equal(here.out, there.out)
    assert torch.equal(here.lse, there.lse)  # type: ignore[arg-type]


@pytest.mark.parametrize("sequences", [[(40, 1), (70, 1)], [(33, 2), (5, 5)]], ids=["decode", "ragged"])
@pytest.mark.parametrize("name", ["chunked", "int8-zeros"])
def test_blocks_past_two_billion_elements_are_found(name: str, sequences: list[tuple[int, int]]) -> None:
    case = BY_NAME[name]
    near = case.batch(sequences, padded_rows=0)
    far = moved_far(near, 2**31 // 3072 + 1, 3072, 64, 1024)
    here, there = case.run(near), case.run(far)
    assert torch.equal(here.out, there.out)
    assert torch.equal(here.lse, there.lse)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "ahead"])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_tree_mask_says_which_of_this_steps_tokens_a_query_sees(causal: bool, splits: int) -> None:
    case = Case("tree", 3, 64, 16, variant=tiles("pages_in_tile", kv=16, splits=splits), fields={"causal": causal})
    batch = case.batch([(40, 7), (9, 9), (33, 1), (70, 12)], tree=True)
    call = case.run(batch)
    compare(call.out, call.lse, *batch.expected(), torch.float32)


@pytest.mark.parametrize("sequences", [DECODE, RAGGED], ids=["decode", "ragged"])
def test_a_window_reads_no_block_outside_it(sequences: list[tuple[int, int]]) -> None:
    case = Case("window", 2, 64, 8, variant=tiles("pages_in_tile", kv=32), fields={"window": 21})
    batch = case.batch(sequences)
    call = case.run(batch.poisoned_outside())
    compare(call.out, call.lse, *batch.expected(), torch.float32)


@pytest.mark.parametrize("walk", ["pages_in_tile", "any"])
@pytest.mark.parametrize("sequences", [DECODE, RAGGED], ids=["decode", "ragged"])
def test_chunked_attention_reads_no_block_of_another_chunk(walk: str, sequences: list[tuple[int, int]]) -> None:
    case = Case("chunked", 2, 64, 8, variant=tiles(walk, kv=32), fields={"mask_mod": "chunked(24)"})
    batch = case.batch(sequences)
    call = case.run(batch.poisoned_outside(lambda s, q: (q // 24 * 24, q // 24 * 24 + 24)))
    compare(call.out, call.lse, *batch.expected(), torch.float32)


STARTS = torch.tensor([0, 0, 16, 64, 0, 1], dtype=torch.int32)


@modifiers.mask_mod
def _from_its_start(batch, head, q_pos, k_pos):  # type: ignore[no-untyped-def]
    return k_pos >= STARTS[batch]


PREFIX = torch.tensor([12, 0, 20, 33, 3, 2])


@modifiers.mask_mod
def _prefix_lm(batch, head, q_pos, k_pos):  # type: ignore[no-untyped-def]
    return (k_pos <= q_pos) | (k_pos < PREFIX[batch])


BIAS = torch.linspace(-1.0, 1.0, 6 * 160).view(6, 160)
OPEN = torch.tensor([True, False, True, True])


@modifiers.score_mod
def _biased(score, batch, head, q_pos, k_pos):  # type: ignore[no-untyped-def]
    capped = 8.0 * torch.tanh(score / 8.0) - 0.01 * abs(q_pos - k_pos) * (head + 1)
    return torch.where(OPEN[head], capped + BIAS[batch, k_pos], score)


@pytest.mark.parametrize("sequences", [DECODE, RAGGED], ids=["decode", "ragged"])
def test_documents_by_captured_boundaries_are_read_from_their_start(sequences: list[tuple[int, int]]) -> None:
    fields = {"mask_mod": _from_its_start.name}
    case = Case("documents", 2, 64, 8, variant=tiles("pages_in_tile", kv=32, splits=2), fields=fields)
    batch = case.batch(sequences, captures=(STARTS,))
    call = case.run(batch.poisoned_outside(lambda s, q: (int(STARTS[s]), q + 1)))
    compare(call.out, call.lse, *batch.expected(), torch.float32)


def test_a_prefix_is_seen_whole_and_the_rest_causally() -> None:
    fields = {"causal": False, "mask_mod": _prefix_lm.name}
    case = Case("prefix", 2, 64, 16, variant=tiles("pages_in_tile", kv=16), fields=fields)
    batch = case.batch(RAGGED, captures=(PREFIX,))
    call = case.run(batch)
    compare(call.out, call.lse, *batch.expected(), torch.float32)


@pytest.mark.parametrize("sequences", [DECODE, RAGGED], ids=["decode", "ragged"])
def test_a_score_function_with_captured_tensors_of_every_kind(sequences: list[tuple[int, int]]) -> None:
    fields = {"score_mod": _biased.name, "mask_mod": _from_its_start.name}
    case = Case("biased", 2, 64, 16, variant=tiles("pages_in_tile", kv=32), fields=fields)
    captures = (*_biased.tensors.values(), STARTS)
    batch = case.batch(sequences, captures=captures)
    call = case.run(batch)
    compare(call.out, call.lse, *batch.expected(), torch.float32)


@pytest.mark.parametrize(
    ("feature", "modifier"),
    [
        ({"window": 24}, {"mask_mod": "sliding_window(24)"}),
        ({"logit_softcap": 5.0}, {"score_mod": "soft_cap(5.0)"}),
        ({}, {"causal": False, "mask_mod": "causal()"}),
    ],
    ids=["window", "softcap", "causal"],
)
def test_a_feature_and_its_modifier_read_the_same_and_give_the_same(feature: dict, modifier: dict) -> None:  # type: ignore[type-arg]
    """Equivalent work: the same key tiles of the same sequences, shown by poison outside the feature's range."""
    variant = tiles("pages_in_tile", kv=16)
    as_feature = Case("feature", 2, 64, 16, variant=variant, fields=feature)
    as_modifier = Case("modifier", 2, 64, 16, variant=variant, fields=modifier)
    batch = as_feature.batch(RAGGED)
    poisoned = batch.poisoned_outside()
    one = as_feature.run(poisoned)
    other = as_modifier.run(replace(poisoned, spec=as_modifier.spec))
    torch.testing.assert_close(one.out, other.out, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["invariant"])
def test_a_row_is_the_same_whatever_else_is_in_the_batch(name: str) -> None:
    case = BY_NAME[name]
    batch = case.batch([(40, 1), (90, 1), (150, 1)])
    mixed = case.batch([(40, 1), (90, 1), (150, 1)], seed=0)
    together = case.run(batch)
    for row in range(3):
        one = slice(row, row + 1)
        alone = replace(
            mixed, q=mixed.q[one], block_table=mixed.block_table[one], seq_lens=mixed.seq_lens[one],
            sequences=(mixed.sequences[row],),
        )  # fmt: skip
        assert torch.equal(case.run(alone).out[0], together.out[row])


def test_a_generated_kernel_has_no_trace_of_what_it_does_not_do() -> None:
    case = BY_NAME["chunked"]
    text = codegen.render_attention(case.spec, case.layout, case.variant, codegen.Form(decode=True))
    for absent in (
        "sinks",
        "alibi",
        "scale_ptr",
        "zero_ptr",
        "rest",
        "desc",
        "unit_",
        "counter",
        "captures",
        "warp_special",
    ):
        assert absent not in text, absent


@modifiers.mask_mod
def _even(batch, head, q_pos, k_pos):  # type: ignore[no-untyped-def]
    return k_pos % 2 == 0


@pytest.mark.parametrize("tree", [False, True], ids=["mask", "tree"])
def test_a_value_that_no_query_may_see_does_not_matter_be_it_nan(tree: bool) -> None:
    fields = {"v_head_dim": 80, **({} if tree else {"mask_mod": _even.name})}
    case = Case("nan", 2, 64, 16, variant=tiles("pages_in_tile", kv=32, head_pieces="split"), fields=fields)
    batch = case.batch([(40, 7), (21, 3)], tree=tree)
    for s, (length, queries) in enumerate(batch.sequences):
        hidden = range(1, length, 2)
        if tree:
            batch.tree_mask[:, 1] = False  # type: ignore[index]
            hidden = range(length - queries + 1, length - queries + 2)
        for token in hidden:
            batch.v_cache[int(batch.block_table[s, token // 16]), token % 16] = float("nan")  # type: ignore[index]
    call = case.run(batch)
    assert not call.out.isnan().any()
    compare(call.out, call.lse, *batch.expected(), torch.float32)


@pytest.mark.parametrize("cap", [1e3, 1e5, 1e7, 1e30])
def test_a_large_soft_cap_changes_nothing_much(cap: float) -> None:
    case = Case("cap", 2, 64, 16, variant=tiles("pages_in_tile"), fields={"logit_softcap": cap})
    batch = case.batch([(40, 1), (9, 1)])
    call = case.run(batch)
    compare(call.out, call.lse, *batch.expected(), torch.float32)
