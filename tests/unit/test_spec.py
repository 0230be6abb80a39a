"""The nouns: what they accept, what they refuse and how, and that they survive being written down."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagegen.spec import (
    DTYPES,
    AttentionSpec,
    CacheLayout,
    Clause,
    CppVariant,
    Device,
    DispatchRule,
    Measurement,
    Profile,
    Selection,
    Status,
    Target,
    TritonVariant,
    Variant,
    Workload,
    bytes_per_element,
    dtype_name,
    parse_dtype,
)
from pagegen.spec.variant import PAGE_WALKS, PREFETCHES

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
MLA = AttentionSpec(num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, shared_kv=True, scale=192**-0.5)
RICH = SPEC.replace(
    kv_dtype="float8_e4m3fn", window=128, logit_softcap=30, alibi=True, sinks=True, kv_scale_granularity="token_head",
    score_mod="mine.bias", mask_mod="mine.mask", batch_invariant=True, causal=False, v_head_dim=48,
)  # fmt: skip
LAYOUT = CacheLayout(block_size=16)
LOAD = Workload(context_lens=(5, 17, 0), query_lens=(1, 3, 0))
PROFILE = Profile(name="two", workloads=(LOAD, Workload(context_lens=(9,))), weights=(3, 1), source="a test")
DEVICE = Device(name="a CPU", target=Target("cpu"), units=2, features=("avx2", "fma"))
RULE = DispatchRule(
    clauses=(Clause(variant=CppVariant(), max_num_seqs=4, max_context_len=512), Clause(variant=CppVariant(tile_kv=32))),
    reason="measured",
    evidence={"kind": "measured"},
)
TRIAL = Measurement(
    spec=SPEC, layout=LAYOUT, target=Target("cpu"), device=DEVICE, variant=CppVariant(), workload=LOAD,
    status=Status.OK, samples_us=(3.0, 1.0, 2.0), environment={"torch": "2.13"},
)  # fmt: skip
VALUES = [SPEC, MLA, RICH, LAYOUT, LOAD, PROFILE, DEVICE, RULE, TRIAL, Target("cuda", "sm_90"), TritonVariant()]
ids = {"ids": lambda value: type(value).__name__}


# --- what every noun is


@pytest.mark.parametrize("value", VALUES, **ids)
def test_a_value_cannot_be_changed(value):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, 1)


@pytest.mark.parametrize("value", VALUES, **ids)
def test_equal_values_are_one_key(value):
    twin = pickle.loads(pickle.dumps(value))
    assert twin == value
    assert {value: 1}[twin] == 1


# --- AttentionSpec


def test_a_spec_fills_in_what_follows_from_the_rest():
    assert (SPEC.v_head_dim, SPEC.kv_dtype, SPEC.scale, SPEC.group) == (64, torch.bfloat16, 1 / 8, 4)
    assert SPEC.causal


def test_a_spec_takes_dtypes_by_name_and_short_name():
    by_name = SPEC.replace(q_dtype="float16", kv_dtype="fp8")
    assert (by_name.q_dtype, by_name.kv_dtype) == (torch.float16, torch.float8_e4m3fn)
    assert by_name == SPEC.replace(q_dtype=torch.float16, kv_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_q_heads": 0}, ValueError, "num_q_heads must be at least 1, got 0"),
        ({"num_q_heads": True}, TypeError, "num_q_heads must be an integer, got bool True"),
        ({"num_kv_heads": 8.0}, TypeError, "num_kv_heads must be an integer, got float 8.0"),
        ({"num_kv_heads": 3}, ValueError, "num_q_heads must be a multiple of num_kv_heads, got 8 and 3"),
        ({"head_dim": -1}, ValueError, "head_dim must be at least 1, got -1"),
        ({"v_head_dim": 0}, ValueError, "v_head_dim must be at least 1, got 0"),
        ({"q_dtype": "int8"}, ValueError, "q_dtype must be float32, float16 or bfloat16, got int8"),
        ({"q_dtype": torch.float64}, ValueError, "q_dtype must be one of float32, .*, got torch.float64"),
        ({"kv_dtype": "fp4"}, ValueError, "kv_dtype must be one of float32, .*, got 'fp4'"),
        ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
        ({"scale": "big"}, TypeError, "scale must be a number, got str 'big'"),
        ({"scale": True}, TypeError, "scale must be a number, got bool True"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 1.5}, TypeError, "window must be an integer, got float 1.5"),
        ({"logit_softcap": 0}, ValueError, "logit_softcap must be positive, got 0"),
        ({"logit_softcap": math.inf}, ValueError, "logit_softcap must be finite, got inf"),
        ({"causal": 1}, TypeError, "causal must be True or False, got int 1"),
        ({"alibi": None}, TypeError, "alibi must be True or False, got NoneType None"),
        ({"kv_scale_granularity": "row"}, ValueError, "kv_scale_granularity must be one of 'none', .*, got 'row'"),
        ({"shared_kv": True, "v_head_dim": 65}, ValueError, "v_head_dim must be at most head_dim .*, got 65 and 64"),
        ({"score_mod": print}, TypeError, "score_mod must be a name or None, got builtin_function_or_method"),
        ({"mask_mod": ""}, ValueError, "mask_mod must be a name or None, got an empty one"),
    ],
)
def test_a_spec_refuses_bad_input_naming_the_field_and_what_came(change, error, message):
    with pytest.raises(error, match=message):
        SPEC.replace(**change)


@pytest.mark.parametrize("spec", [SPEC, MLA, RICH])
def test_a_spec_survives_json(spec):
    assert AttentionSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_spec_from_a_newer_program_is_refused_by_the_field_it_does_not_know():
    with pytest.raises(ValueError, match="AttentionSpec has no field rotary"):
        AttentionSpec.from_dict({**SPEC.to_dict(), "rotary": 1})


def test_a_spec_with_a_missing_field_is_refused_by_its_name():
    with pytest.raises(ValueError, match="AttentionSpec needs head_dim, num_kv_heads, got num_q_heads"):
        AttentionSpec.from_dict({"num_q_heads": 8})


def test_bytes_of_a_token_count_keys_values_and_scales():
    assert SPEC.kv_bytes_per_token == 2 * (64 + 64) * 2
    assert SPEC.replace(kv_dtype="int8").kv_bytes_per_token == 2 * (64 + 64)
    assert SPEC.replace(kv_dtype="int4").kv_bytes_per_token == 2 * (64 + 64) // 2
    # one float32 scale for each of K and V, a token and a head
    assert SPEC.replace(kv_dtype="int8", kv_scale_granularity="token_head").kv_bytes_per_token == 2 * (64 + 64 + 8)
    assert MLA.kv_bytes_per_token == 576 * 2


# --- dtypes


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_and_its_name_are_two_ways_to_say_the_same(name):
    assert dtype_name(parse_dtype(name)) == name
    assert parse_dtype(f"torch.{name}") is DTYPES[name] is parse_dtype(DTYPES[name])


def test_two_int4_values_share_a_byte():
    assert bytes_per_element(DTYPES["int4"]) * 2 == 1
    assert bytes_per_element(torch.bfloat16) == 2


# --- CacheLayout


@pytest.mark.parametrize(("tokens", "blocks", "waste"), [(0, 0, 0), (1, 1, 15), (16, 1, 0), (17, 2, 15)])
def test_a_layout_counts_blocks_and_the_unused_tail(tokens, blocks, waste):
    assert (LAYOUT.blocks_for(tokens), LAYOUT.wasted_slots(tokens)) == (blocks, waste)


def test_a_layout_refuses_bad_input():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        CacheLayout(block_size=0)
    with pytest.raises(ValueError, match="order must be one of 'NHD', 'HND', got 'nhd'"):
        CacheLayout(block_size=16, order="nhd")


def test_a_layout_survives_json():
    layout = CacheLayout(block_size=24, order="HND")
    assert CacheLayout(**json.loads(json.dumps(layout.to_dict()))) == layout


# --- variants

POWERS = st.sampled_from([16, 32, 64, 128, 256])
triton_variants = st.builds(
    TritonVariant, tile_rows=POWERS, tile_kv=POWERS, page_walk=st.sampled_from(PAGE_WALKS),
    num_splits=st.integers(1, 64), num_warps=st.sampled_from([1, 2, 4, 8, 16]), num_stages=st.integers(1, 5),
)  # fmt: skip
cpp_variants = st.builds(
    lambda tile, tiles, **rest: CppVariant(tile_kv=tile, split_tokens=tile * tiles, **rest),
    POWERS, st.integers(1, 100), streams=st.sampled_from([1, 2, 4, 8, 16]), prefetch_ahead=st.sampled_from(PREFETCHES),
)  # fmt: skip


@given(triton_variants | cpp_variants)
def test_a_variant_survives_its_name_and_json(variant):
    assert Variant.parse(variant.name) == variant
    assert Variant.from_dict(json.loads(json.dumps(variant.to_dict()))) == variant


@given(triton_variants | cpp_variants, triton_variants | cpp_variants)
def test_different_variants_have_different_names(one, other):
    assert (one.name == other.name) == (one == other)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("triton:tile_rows=17", "tile_rows must be a power of two in 16..256, got 17"),
        ("triton:tile_kv=1024", "tile_kv must be a power of two in 16..512, got 1024"),
        ("triton:page_walk=best", "page_walk must be one of 'tile_in_page', .*, got 'best'"),
        ("triton:num_splits=0", "num_splits must be at least 1, got 0"),
        ("triton:warps=4", "a triton variant has no field warps"),
        ("cpp:tile_kv=64,split_tokens=100", "split_tokens must be a multiple of tile_kv 64, got 100"),
        ("cpp:streams=3", "streams must be a power of two in 1..16, got 3"),
        ("cpp:prefetch_ahead=3", "prefetch_ahead must be one of 0, 1, 2, 4, 8, got 3"),
        ("cuda:tile_kv=64", "family must be one of 'triton', 'cpp', got 'cuda'"),
        ("", "family must be one of 'triton', 'cpp', got ''"),
    ],
)
def test_a_variant_refuses_a_bad_name(name, message):
    with pytest.raises(ValueError, match=message):
        Variant.parse(name)


# --- Workload and Profile


def test_a_workload_without_query_lengths_is_decode():
    load = Workload(context_lens=[3, 4])
    assert load == Workload(context_lens=(3, 4), query_lens=(1, 1))
    assert load.is_decode
    assert not LOAD.is_decode


def test_a_workload_knows_its_sums_and_bounds():
    found = (LOAD.num_seqs, LOAD.total_q, LOAD.max_query_len, LOAD.max_context_len, LOAD.total_context)
    assert found == (3, 4, 3, 17, 22)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"context_lens": ()}, ValueError, "context_lens must hold at least one sequence, got none"),
        ({"context_lens": 5}, TypeError, "context_lens must be a sequence of integers, got int 5"),
        ({"context_lens": "12"}, TypeError, "context_lens must be a sequence of integers, got str '12'"),
        ({"context_lens": (-1,)}, ValueError, "context_lens must be at least 0, got -1"),
        ({"context_lens": (1.0,)}, TypeError, "context_lens must be an integer, got float 1.0"),
        ({"context_lens": (1, 2), "query_lens": (1,)}, ValueError, r"one entry a sequence \(2\), got 1"),
    ],
)
def test_a_workload_refuses_bad_input(values, error, message):
    with pytest.raises(error, match=message):
        Workload(**values)


def test_weights_of_a_profile_become_shares():
    assert PROFILE.weights == (0.75, 0.25)
    assert dict(PROFILE) == {LOAD: 0.75, Workload(context_lens=(9,)): 0.25}


@pytest.mark.parametrize("weights", [(1,), (1, 0), (1, -1), (1, math.nan), (1, math.inf)])
def test_a_profile_refuses_weights_that_are_no_shares(weights):
    with pytest.raises(ValueError, match="weights must"):
        Profile(name="p", workloads=(LOAD, LOAD), weights=weights)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50))
def test_a_profile_survives_saving_and_loading_to_the_last_bit(weights):
    profile = Profile(name="p", workloads=(LOAD,) * len(weights), weights=tuple(weights))
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))).weights == profile.weights


def test_a_profile_file_is_the_profile(tmp_path):
    profile = dataclasses.replace(PROFILE, licence="CC-BY-4.0", figures={"requests": 10})
    profile.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded == profile
    assert (loaded.figures, loaded.licence) == ({"requests": 10}, "CC-BY-4.0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.json is not a profile"),
        ("[1]", "must have version 1, got 'list'"),
        ('{"version": 2}', "must have version 1, got 2"),
        ('{"version": 1}', "must have name and batches"),
        ('{"version": 1, "name": "p", "batches": [{"weight": 1}]}', "must have name and batches with context_lens"),
        ('{"version": 1, "name": "p", "batches": []}', "weights must have one entry a workload, got 0"),
        ("\xff", "p.json is not a profile"),
    ],
)
def test_a_broken_profile_file_is_refused_by_its_name(tmp_path, text, message):
    path = tmp_path / "p.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        Profile.load(path)


# --- Measurement, Selection, DispatchRule


def test_a_trial_is_worth_the_median_of_its_samples():
    assert TRIAL.median_us == 2.0


@pytest.mark.parametrize("samples", [(), (1.0, 0.0), (math.inf,), (math.nan,), (-1.0,)])
def test_a_trial_that_went_well_has_positive_finite_samples(samples):
    with pytest.raises(ValueError, match="samples_us must be positive and finite for an ok trial"):
        dataclasses.replace(TRIAL, samples_us=samples)


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_a_failed_trial_has_a_status_and_no_time(status):
    failed = dataclasses.replace(TRIAL, status=status, samples_us=(), detail="line 1")
    assert failed.median_us is None
    with pytest.raises(ValueError, match=f"a {status.value} trial has no samples, got 3"):
        dataclasses.replace(TRIAL, status=status)


def test_a_selection_carries_its_reason():
    assert Selection(variant=CppVariant(), reason="nearest batch: 64 for 71", distance=0.1).distance == 0.1
    with pytest.raises(TypeError, match="reason"):
        Selection(variant=CppVariant())


@pytest.mark.parametrize(("seqs", "context", "tile"), [(4, 512, 64), (5, 512, 32), (4, 513, 32), (1, 1, 64)])
def test_the_first_clause_that_admits_a_batch_decides(seqs, context, tile):
    assert RULE.choose(seqs, 1, context).tile_kv == tile


def test_a_rule_must_end_with_a_clause_for_every_batch():
    for clauses in ((), (Clause(variant=CppVariant(), max_query_len=1),)):
        with pytest.raises(ValueError, match="the last clause of a dispatch rule must have no bounds"):
            DispatchRule(clauses=clauses, reason="none")


def test_a_rule_survives_json_and_names_each_variant_once():
    assert DispatchRule.from_dict(json.loads(json.dumps(RULE.to_dict()))) == RULE
    assert RULE.variants == (CppVariant(), CppVariant(tile_kv=32))
    assert DispatchRule(clauses=(RULE.clauses[0], Clause(variant=CppVariant())), reason="").variants == (CppVariant(),)
