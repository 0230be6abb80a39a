"""What a predicted time on a GPU is made of, and what a compiler's facts change of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from database_fakes import H100, LAYOUT, SM_90, SPEC

from pagegen import costs
from pagegen.costs import rules
from pagegen.costs.devices import shipped_devices
from pagegen.costs.gpu import MAX_RESIDENT, UNIT_SHARE
from pagegen.costs.rates import clock_mhz
from pagegen.spec import CompileFacts, Device, Target, TritonVariant, Workload

PLAIN = TritonVariant(page_walk="any", num_stages=3)
CROWD = Workload(context_lens=(4000,) * 256)
LONE = Workload(context_lens=(16000,))


def facts(variant=PLAIN, **changes) -> CompileFacts:
    plain = {
        "spec": SPEC, "layout": LAYOUT, "target": SM_90, "variant": variant, "form": "decode", "code_hash": "c0de",
        "registers": 90, "spills": 0, "shared_bytes": 40_000, "num_warps": 4, "programs_per_unit": 4,
    }  # fmt: skip
    return CompileFacts(**{**plain, **changes})


def parts(variant=PLAIN, workload=CROWD, *, device=H100, spec=SPEC, told=None) -> costs.Parts:
    return costs.parts(spec, LAYOUT, variant, device, workload, facts=told)


def test_the_total_is_what_is_fixed_the_longest_of_what_overlaps_and_the_merging():
    made = costs.Parts(fixed_us=3.0, memory_us=10.0, matrix_us=4.0, issue_us=11.0, latency_us=2.0, merge_us=5.0)
    assert made.total_us == 19.0 and made.bound == "issue"
    assert made.shares["memory"] == pytest.approx(10 / 19) and set(made.shares) == {
        "fixed", "memory", "matrix", "issue", "latency", "merge"
    }  # fmt: skip


def test_a_decode_of_many_long_sequences_waits_for_memory_and_a_lone_one_for_latency():
    assert parts().bound == "memory"
    assert parts(workload=LONE).bound == "latency"


def test_a_main_loop_that_issues_more_takes_longer_where_issuing_is_what_is_waited_for():
    few, many = (facts(loop={"instructions": n}) for n in (400, 20_000))
    assert parts(told=few).bound == "memory" and parts(told=many).bound == "issue"
    assert parts(told=many).issue_us == pytest.approx(50 * parts(told=few).issue_us)
    assert parts(workload=LONE, told=many).latency_us > 10 * parts(workload=LONE, told=few).latency_us


def test_fewer_resident_programs_keep_less_in_flight():
    """Little's law: tiles of 16 keys of few programs do not cover the latency of memory."""
    small = replace(PLAIN, tile_kv=16, num_stages=2)
    alone, four = (parts(small, told=facts(small, programs_per_unit=n)) for n in (1, 4))
    assert alone.memory_us > 1.5 * four.memory_us


def test_pipeline_stages_hide_the_latency_of_loads():
    """One program a multiprocessor: nobody else's work hides it. Without a pipeline loads and arithmetic alternate."""
    quick = facts(programs_per_unit=1, loop={"instructions": 50})
    times = [parts(replace(PLAIN, tile_kv=16, num_stages=n), LONE, told=quick).latency_us for n in (1, 2, 4)]
    assert times[0] > times[1] > times[2]


def test_what_does_not_fill_the_last_turn_costs_arithmetic_a_whole_turn_and_memory_less():
    """133 programs on 132 multiprocessors: one of them computes twice as long, and memory hardly notices."""
    spec = SPEC.replace(num_q_heads=4, num_kv_heads=1)
    long = Workload(context_lens=(1000,) * 132)
    longer = Workload(context_lens=(1000,) * 133)
    told = facts(programs_per_unit=1)
    before, after = (parts(workload=w, spec=spec, told=told) for w in (long, longer))
    assert after.matrix_us == pytest.approx(2 * before.matrix_us, rel=0.02)
    assert after.issue_us == pytest.approx(2 * before.issue_us, rel=0.02)
    assert after.memory_us < 1.7 * before.memory_us
    assert after.memory_us > before.memory_us * (1 + 0.9 * 132 / 133 / UNIT_SHARE / 132)


def test_tiles_of_few_rows_read_the_keys_of_a_prompt_again_and_again_from_the_cache():
    prompt = Workload(context_lens=(8192,), query_lens=(8192,))
    few, many = (parts(replace(PLAIN, tile_rows=rows, num_warps=4), prompt) for rows in (16, 64))
    assert few.memory_us > 3 * many.memory_us


def test_matrix_instructions_that_go_by_way_of_registers_are_slower_on_hopper_alone():
    prompt = Workload(context_lens=(8192,), query_lens=(8192,))

    def rate(device: Device, rows: int) -> float:
        return parts(replace(PLAIN, tile_rows=rows), prompt, device=device).matrix_us

    assert rate(H100, 32) > 1.4 * rate(H100, 64)
    a100 = costs.shipped_device("sm_80")
    assert rate(a100, 32) == pytest.approx(rate(a100, 64), rel=0.1)


def test_residency_is_bounded_whatever_a_compiler_says_and_one_at_least():
    tiny = facts(programs_per_unit=1000)
    assert parts(told=tiny).memory_us == parts(told=facts(programs_per_unit=MAX_RESIDENT)).memory_us
    assert math.isfinite(parts(told=facts(programs_per_unit=0)).total_us)


def test_unknown_facts_are_estimated():
    empty = facts(registers=None, spills=None, shared_bytes=None, num_warps=None, programs_per_unit=None)
    assert parts(told=empty) == parts()


@pytest.mark.parametrize(
    ("name", "mhz"),
    [("NVIDIA A100-SXM4-80GB", 1410), ("NVIDIA H100 80GB HBM3", 1830), ("NVIDIA B200", 1856),
     ("AMD Instinct MI300X", 2100), ("NVIDIA GeForce RTX 4090", 2520), ("NVIDIA L40S", 2490)],
)  # fmt: skip
def test_a_clock_follows_from_the_matrix_rate(name, mhz):
    device = next(device for device in shipped_devices() if device.name == name)
    assert clock_mhz(device) == pytest.approx(mhz, rel=0.01)
    assert clock_mhz(replace(device, core_clock_mhz=1000.0)) == 1000.0


def test_every_gpu_of_the_table_has_a_plausible_clock_and_a_time():
    for device in shipped_devices():
        assert 1290 < clock_mhz(device) < 2610, device.name
        spec = SPEC.replace(q_dtype="float16", kv_dtype="float16")
        assert costs.predict_us(spec, LAYOUT, PLAIN, device, CROWD) > costs.roofline_us(spec, LAYOUT, device, CROWD)


# --- what a compiler told, against the device ---------------------------------------------------------------


def test_code_that_spills_or_does_not_fit_is_ruled_out_with_figures():
    broken = {
        "spills": facts(spills=24),
        "taken_shared_memory": facts(shared_bytes=300_000),
        "occupancy": facts(programs_per_unit=0, registers=255),
    }
    for rule, told in broken.items():
        ((name, reason),) = rules.broken_by_code(told, H100)
        assert name == rule and any(figure in reason for figure in ("24", "300000", "255 registers"))
    assert {name for name in broken} == {rule.name for rule in rules.CODE_RULES}
    assert rules.broken_by_code(facts(), H100) == []


def test_what_a_compiler_did_not_tell_and_a_limit_that_is_not_known_rule_out_nothing():
    silent = facts(registers=None, spills=None, shared_bytes=None, num_warps=None, programs_per_unit=None)
    assert rules.broken_by_code(silent, H100) == []
    assert rules.broken_by_code(facts(shared_bytes=10**9), Device(name="new", target=Target.parse("sm_90"))) == []


# --- fields that contradict each other -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        ("matrix_minimum", {"tile_rows": 8}),
        ("whole_tiles_a_split", {"split_tokens": 100, "tile_kv": 64}),
        ("one_kind_of_split", {"split_tokens": 128, "num_splits": 4}),
        ("shares_or_splits", {"programs": 132, "num_splits": 4}),
        ("shares_or_splits", {"programs": 132, "reduce": "last"}),
        ("descriptor_tiles", {"loads": "descriptor", "page_walk": "any"}),
    ],
)
def test_a_contradiction_is_named_where_the_variants_class_refuses_it(rule, fields):
    with pytest.raises(ValueError, match="must be"):
        TritonVariant(**fields)
    assert rule in [name for name, _ in rules.contradictions(fields)]


def test_every_contradiction_can_occur_and_no_variant_has_one():
    assert {rule.name for rule in rules.CONTRADICTIONS} == {
        "matrix_minimum", "whole_tiles_a_split", "one_kind_of_split", "shares_or_splits", "descriptor_tiles"
    }  # fmt: skip
    for variant in (PLAIN, TritonVariant(dot="fma", tile_rows=2, tile_kv=16), TritonVariant(programs=132)):
        assert rules.contradictions(variant.to_dict()) == []
