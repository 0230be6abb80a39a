"""The symbols: bytes, flops, legality and time, against counting by hand."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from database_fakes import CPU, H100, SM_90, SPEC
from hypothesis import given, settings
from hypothesis import strategies as st

from pagegen import costs, targets
from pagegen.costs import model, rules
from pagegen.costs import symbols as s
from pagegen.costs.devices import shipped_devices
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device, Target, TritonVariant, Workload

LAYOUT = CacheLayout(block_size=16)


def seen(spec: AttentionSpec, position: int, length: int) -> range:
    """The keys that the query at `position` of a sequence of `length` tokens may attend."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    return range(first, position + 1 if spec.causal else length)


def counted(spec: AttentionSpec, workload: Workload) -> tuple[int, int]:
    """(keys that some query sees, (query, key) pairs), one by one."""
    keys = pairs = 0
    for length, queries in zip(workload.context_lens, workload.query_lens, strict=True):
        ranges = [seen(spec, position, length) for position in range(length - queries, length)]
        keys += len(set().union(*ranges))
        pairs += sum(len(r) for r in ranges)
    return keys, pairs


sequences = st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(
    lengths=st.lists(sequences, min_size=1, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 60)),
    causal=st.booleans(),
)
def test_bytes_and_flops_are_what_counting_every_pair_gives(lengths, window, causal):
    spec = SPEC.replace(window=window, causal=causal)
    workload = Workload(context_lens=tuple(n for n, _ in lengths), query_lens=tuple(q for _, q in lengths))
    keys, pairs = counted(spec, workload)
    assert costs.kv_bytes(spec, LAYOUT, workload) == keys * spec.kv_bytes_per_token
    assert costs.flops(spec, LAYOUT, workload) == pairs * 32 * 2 * (128 + 128)


@pytest.mark.parametrize(
    ("context", "queries", "window", "causal"), [(9, 4, 3, 1), (9, 4, 50, 1), (9, 4, 3, 0), (6, 6, 8, 0)]
)
def test_the_closed_form_of_pairs_is_the_sum_that_explain_prints(context, queries, window, causal):
    values = {s.context: context, s.queries: queries, s.window: window, s.causal: causal}
    named = {symbol.name: value for symbol, value in values.items()}
    assert int(s.PAIRS_AS_SUM.subs(values).doit()) == int(s.evaluate(s.PAIRS_AS_SUM, named))


def test_long_contexts_without_a_window_lose_no_precision():
    workload = Workload(context_lens=(1_000_003,) * 128)
    assert costs.kv_bytes(SPEC.replace(causal=False), LAYOUT, workload) == 128 * 1_000_003 * 4096
    assert costs.flops(SPEC.replace(causal=False), LAYOUT, workload) == 128 * 1_000_003 * 32 * 2 * 256


def test_known_bytes_of_llama_and_of_an_mla_cache():
    llama = AttentionSpec.from_model("llama-3.1-8b")
    assert costs.kv_bytes(llama, LAYOUT, Workload(context_lens=(4096,) * 8)) == 8 * 4096 * 2 * 8 * 128 * 2
    mla = AttentionSpec(num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, shared_kv=True)
    assert costs.kv_bytes(mla, LAYOUT, Workload(context_lens=(1000,))) == 1000 * 576 * 2
    assert costs.kv_bytes(mla.replace(kv_dtype="int4"), LAYOUT, Workload(context_lens=(1000,))) == 1000 * 288


@pytest.mark.parametrize("block_size", [1, 16, 24, 49, 544])
def test_slots_wasted_agree_with_the_layout_even_where_division_rounds(block_size):
    layout = CacheLayout(block_size=block_size)
    contexts = (0, 1, block_size - 1, block_size, block_size * 7, block_size * 1001, 98765)
    values = {**s.bind_spec(SPEC, layout), **s.bind_workload(SPEC, Workload(context_lens=contexts))}
    assert s.evaluate(s.WASTED_SLOTS, values).tolist() == [layout.wasted_slots(n) for n in contexts]
    assert s.evaluate(s.BLOCKS, values).tolist() == [layout.blocks_for(n) for n in contexts]


# --- legality -------------------------------------------------------------------------------------------


def reasons(variant, *, block_size=16, spec=SPEC, device=H100) -> list[str]:
    return costs.legal(spec, CacheLayout(block_size=block_size), variant, device)


@pytest.mark.parametrize(
    ("walk", "tile_kv", "block_size", "fits"),
    [
        ("tile_in_page", 64, 64, True),
        ("tile_in_page", 64, 256, True),
        ("tile_in_page", 64, 192, True),
        ("tile_in_page", 64, 16, False),
        ("tile_in_page", 64, 96, False),
        ("pages_in_tile", 64, 16, True),
        ("pages_in_tile", 64, 64, True),
        ("pages_in_tile", 64, 1, True),
        ("pages_in_tile", 64, 128, False),
        ("pages_in_tile", 64, 24, False),
        ("any", 64, 24, True),
        ("any", 64, 2048, True),
    ],
)
def test_a_page_walk_is_legal_where_its_sizes_divide(walk, tile_kv, block_size, fits):
    found = reasons(TritonVariant(page_walk=walk, tile_kv=tile_kv), block_size=block_size)
    assert (not found) == fits
    assert all(walk in reason and str(block_size) in reason for reason in found)


@pytest.mark.parametrize(("group", "rows", "tiles"), [(1, 16, 1), (16, 16, 1), (17, 16, 2), (48, 16, 3), (128, 64, 2)])
def test_heads_that_do_not_fit_a_tile_take_more_tiles(group, rows, tiles):
    spec = AttentionSpec(num_q_heads=group, num_kv_heads=1, head_dim=64)
    variant = TritonVariant(tile_rows=rows)
    assert reasons(variant, spec=spec) == []
    values = {
        **s.bind_spec(spec, LAYOUT),
        **s.bind_variant(variant),
        **s.bind_workload(spec, Workload(context_lens=(100,), query_lens=(3,))),
    }
    queries_a_tile = max(1, rows // group)
    assert s.evaluate(s.query_tiles, values) == -(-3 // queries_a_tile) * tiles


def test_shared_memory_is_held_against_the_devices_limit():
    wide = TritonVariant(tile_rows=16, tile_kv=256)
    assert reasons(wide) == []
    (reason,) = reasons(wide, device=costs.shipped_device("sm_89"))
    assert "bytes of shared memory are more than the device's 101376" in reason
    unknown = replace(H100, shared_memory_kib=0.0)
    assert reasons(TritonVariant(tile_kv=512), device=unknown) == []


def test_threads_are_counted_in_the_targets_own_warps():
    variant = TritonVariant(num_warps=16)
    assert reasons(variant, device=costs.shipped_device("gfx942")) == []  # 16 x 64 = 1024
    assert reasons(variant, device=replace(H100, max_threads_per_unit=256)) != []


def test_a_variant_of_another_family_is_not_legal_and_has_no_time():
    assert "cpp variant does not run on sm_90" in reasons(CppVariant())[0]
    assert "triton variant does not run on cpu" in reasons(TritonVariant(), device=CPU)[0]
    with pytest.raises(TypeError, match="family triton"):
        costs.predict_us(SPEC, LAYOUT, CppVariant(), H100, Workload(context_lens=(1,)))


def test_every_rule_can_be_broken_and_says_so_under_its_name():
    """A rule that nothing can break is no rule."""
    broken = set()
    trials = [
        (TritonVariant(tile_rows=16, page_walk="tile_in_page"), SPEC, 16, H100),
        (TritonVariant(page_walk="pages_in_tile"), SPEC, 24, H100),
        (TritonVariant(tile_kv=512), SPEC, 16, replace(H100, max_threads_per_unit=64)),
        (
            TritonVariant(page_walk="tile_in_page", loads="descriptor"),
            SPEC.replace(head_dim=100),
            64,
            costs.shipped_device("sm_80"),
        ),
        (TritonVariant(warp_specialize=True), SPEC, 16, H100),
        (TritonVariant(dot="fma", tile_rows=64), SPEC, 16, H100),
        (TritonVariant(programs=132), SPEC.replace(batch_invariant=True), 16, H100),
        (TritonVariant(tile_rows=256, tile_kv=128), SPEC, 16, H100),
        (TritonVariant(), SPEC, 16, replace(H100, registers_per_unit=4096)),
        (TritonVariant(), SPEC, 16, costs.shipped_device("sm_75")),
    ]
    for variant, spec, block_size, device in trials:
        broken |= {name for name, _ in rules.broken_rules(spec, CacheLayout(block_size=block_size), variant, device)}
    assert broken == {rule.name for rule in rules.RULES}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreting process compiles nothing")
@pytest.mark.parametrize(
    ("target", "variant", "decode"),
    [
        ("sm_90", TritonVariant(tile_kv=64, page_walk="pages_in_tile", num_splits=8), True),
        ("sm_90", TritonVariant(tile_rows=64, tile_kv=64, page_walk="any", num_warps=8), False),
        ("gfx942", TritonVariant(tile_kv=64, num_stages=4, page_walk="any"), True),
    ],
    ids=str,
)
def test_the_estimates_are_near_what_the_compiler_takes_and_that_of_shared_memory_covers_it(target, variant, decode):
    pytest.importorskip("triton")
    from pagegen.targets.offline import compile_facts

    device = costs.shipped_device(target)
    values = {**s.bind_spec(SPEC, LAYOUT), **s.bind_variant(variant), **s.bind_device(device)}
    estimate = float(s.evaluate(s.SHARED_BYTES, values))
    facts = compile_facts(SPEC, LAYOUT, variant, Target.parse(target), decode=decode)
    assert facts.shared_bytes <= estimate <= 1.35 * facts.shared_bytes
    if target == "sm_90":  # what a warp issues a tile, and what a thread keeps
        assert 0.6 < float(s.evaluate(s.INSTRUCTIONS, values)) / facts.loop.instructions < 1.5
        assert 0.5 < float(s.evaluate(s.REGISTERS, values)) / facts.registers < 1.5


# --- time -----------------------------------------------------------------------------------------------

DECODE = Workload(context_lens=(4096,) * 64)


def predict(variant, workload=DECODE, *, spec=SPEC, layout=LAYOUT, device=H100) -> float:
    return costs.predict_us(spec, layout, variant, device, workload)


def test_the_roofline_is_bytes_over_bandwidth_for_decode_and_flops_over_rate_for_prefill():
    assert costs.roofline_us(SPEC, LAYOUT, H100, DECODE) == pytest.approx(64 * 4096 * 4096 / 3.35e6, rel=0.01)
    prefill = Workload(context_lens=(8192,), query_lens=(8192,))
    flops = 8192 * 8193 / 2 * 32 * 512
    assert costs.roofline_us(SPEC, LAYOUT, H100, prefill) == pytest.approx(flops / 989e6, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(
        st.integers(1, 5000).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=1, max_size=9
    ),
    rows=st.sampled_from([16, 64]),
    tile_kv=st.sampled_from([16, 64, 128]),
    splits=st.sampled_from([1, 3, 32]),
    device=st.sampled_from([H100, costs.shipped_device("gfx942"), costs.shipped_device("sm_75"), CPU]),
)
def test_no_prediction_beats_the_roofline(lengths, rows, tile_kv, splits, device):
    workload = Workload(context_lens=tuple(n for n, _ in lengths), query_lens=tuple(q for _, q in lengths))
    variant = TritonVariant(tile_rows=rows, tile_kv=tile_kv, num_splits=splits)
    if device is CPU:
        variant = CppVariant(tile_kv=tile_kv, split_tokens=tile_kv * splits)
    us = predict(variant, workload, device=device)
    assert math.isfinite(us)
    assert us >= costs.roofline_us(SPEC, LAYOUT, device, workload)


def test_splits_pay_where_few_sequences_leave_the_device_idle_and_cost_where_many_fill_it():
    one, many = TritonVariant(num_splits=1), TritonVariant(num_splits=16)
    lone = Workload(context_lens=(32768,))
    assert predict(many, lone) < 0.5 * predict(one, lone)
    crowd = Workload(context_lens=(300,) * 512)
    assert predict(many, crowd) > predict(one, crowd)


def test_one_long_sequence_among_short_ones_holds_the_step_up():
    even = Workload(context_lens=(2000,) * 64)
    skewed = Workload(context_lens=(65000,) + (1000,) * 63)
    assert skewed.total_context <= even.total_context
    assert predict(TritonVariant(), skewed) > 2 * predict(TritonVariant(), even)
    assert predict(
        CppVariant(split_tokens=131072), skewed, device=CPU, spec=SPEC.replace(num_q_heads=4, num_kv_heads=1)
    ) > (
        1.5
        * predict(CppVariant(split_tokens=1024), skewed, device=CPU, spec=SPEC.replace(num_q_heads=4, num_kv_heads=1))
    )


def test_more_rows_than_the_group_needs_cost_matrix_work_in_decode_only():
    decode = Workload(context_lens=(512,) * 2000)
    assert predict(TritonVariant(tile_rows=256), decode) > predict(TritonVariant(tile_rows=16), decode)
    prefill = Workload(context_lens=(4096,), query_lens=(4096,))
    assert predict(TritonVariant(tile_rows=64), prefill) < predict(TritonVariant(tile_rows=16), prefill)


def test_on_a_cpu_prefetch_and_larger_chunks_read_faster():
    hnd = CacheLayout(block_size=16, order="HND")
    blind, looking = CppVariant(prefetch_ahead=0, streams=1), CppVariant(prefetch_ahead=1)
    assert predict(looking, layout=hnd, device=CPU) < predict(blind, layout=hnd, device=CPU)
    large = CacheLayout(block_size=128, order="HND")
    assert predict(blind, layout=large, device=CPU) < predict(blind, layout=hnd, device=CPU)


def test_a_cpu_prefill_is_bound_by_the_instructions_it_has():
    prefill = Workload(context_lens=(2048,), query_lens=(2048,))
    plain = predict(CppVariant(), prefill, device=replace(CPU, features=()))
    avx2 = predict(CppVariant(), prefill, device=CPU)
    bf16 = predict(CppVariant(), prefill, device=replace(CPU, features=("avx2", "avx512_bf16", "avx512f")))
    float32 = SPEC.replace(q_dtype="float32", kv_dtype="float32")
    no_use = predict(CppVariant(), prefill, spec=float32, device=replace(CPU, features=("avx512_bf16", "avx512f")))
    assert plain > avx2 > no_use > bf16


def test_the_interpreter_is_counted_in_loop_iterations():
    device = targets.current_device(Target("interpreter"))
    workload = Workload(context_lens=(256, 256))
    assert predict(TritonVariant(tile_kv=64), workload, device=device) == 2 * 8 * 4 * model.INTERPRETER_ITERATION_US
    with pytest.raises(ValueError, match="must have a known bandwidth_gb_s"):
        costs.roofline_us(SPEC, LAYOUT, device, workload)


@pytest.mark.parametrize("workload", [Workload(context_lens=(0,)), Workload(context_lens=(5, 0), query_lens=(0, 0))])
@pytest.mark.parametrize("device", [H100, CPU], ids=["gpu", "cpu"])
def test_batches_with_nothing_to_do_have_a_finite_time(workload, device):
    variant = CppVariant() if device is CPU else TritonVariant(num_splits=8)
    assert 0 < predict(variant, workload, device=device) < 100


# --- candidates and devices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_70", "sm_80", "sm_90", "sm_120", "gfx90a", "gfx942"])
@pytest.mark.parametrize("block_size", [1, 16, 24, 256])
def test_every_spec_has_a_legal_candidate_on_every_gpu(target, block_size):
    device = costs.shipped_device(target)
    layout = CacheLayout(block_size=block_size)
    for head_dim, group in ((64, 3), (80, 1), (128, 4), (256, 8), (128, 48)):
        # sm_70 has no bfloat16
        spec = AttentionSpec(
            num_q_heads=group, num_kv_heads=1, head_dim=head_dim, q_dtype="float16", kv_dtype="float16"
        )
        asked = costs.candidates(spec, layout, device.target, decode=True)
        found = [v for v in asked if not costs.legal(spec, layout, v, device)]
        assert found, (head_dim, group)
        assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("target", "name"),
    [("sm_80", "NVIDIA A100-SXM4-40GB"), ("sm_90", "NVIDIA H100 80GB HBM3"), ("sm_100", "NVIDIA B200"),
     ("sm_120", "NVIDIA GeForce RTX 5090"), ("gfx942", "AMD Instinct MI300X"), ("gfx950", "AMD Instinct MI355X")],
)  # fmt: skip
def test_an_absent_gpu_is_the_first_verified_row_of_its_arch(target, name):
    device = costs.shipped_device(target)
    assert device.name == name
    assert device.target == Target.parse(target)
    assert device.bandwidth_gb_s > 0
    assert device.units > 0


def test_a_product_of_the_table_may_be_asked_by_name_and_another_name_gets_the_archs_row():
    assert costs.shipped_device(SM_90, name="NVIDIA H200").bandwidth_gb_s == 4800
    assert costs.shipped_device(SM_90, name="NVIDIA H20").name == H100.name


@pytest.mark.parametrize(
    ("target", "name", "meant"),
    [
        ("sm_90", "NVIDIA H200", "NVIDIA H200"),
        ("sm_90", "h200", "NVIDIA H200"),
        ("sm_80", "a100 pcie", "NVIDIA A100 80GB PCIe"),
        ("gfx942", "MI325X", "AMD Instinct MI325X"),
    ],
)
def test_a_product_is_named_in_full_or_by_words_that_no_other_of_its_arch_has(target, name, meant):
    assert costs.product(target, name).name == meant


@pytest.mark.parametrize(
    ("target", "name", "said"),
    [
        ("sm_90", "h100", "NVIDIA H100 80GB HBM3, NVIDIA H100 PCIe"),  # two of them
        ("sm_90", "a100", "NVIDIA H200"),  # none: all that there are
        ("sm_90", "", "got ''"),
        ("sm_90", "h", "NVIDIA H100 PCIe"),  # a word, not a part of one
        ("cpu", "EPYC", "none in the device table"),
    ],
)
def test_a_name_that_fits_no_product_or_several_is_refused_with_those_that_there_are(target, name, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        costs.product(target, name)


def test_an_arch_without_a_row_is_refused_with_those_that_have_one():
    with pytest.raises(ValueError, match=r"gfx942.*sm_90.*got sm_61"):
        costs.shipped_device("sm_61")


def test_every_shipped_row_is_a_device():
    assert len(shipped_devices()) == len({d.name for d in shipped_devices()}) > 20
    assert all(isinstance(d, Device) and d.shared_memory_kib > 0 and d.memory_gib > 0 for d in shipped_devices())


def test_expressions_may_be_compiled_first_by_several_threads_at_once() -> None:
    """In a process of its own: sympy loads numpy's names once a process."""
    code = """
from threading import Barrier, Thread
import sympy
from pagegen.costs import symbols
barrier, found = Barrier(4), []
def work(i):
    barrier.wait()
    found.append(symbols.evaluate(sympy.Max(symbols.block_size, i), {"block_size": 2}))
threads = [Thread(target=work, args=(i,)) for i in range(3, 7)]
[t.start() for t in threads], [t.join() for t in threads]
assert sorted(map(int, found)) == [3, 4, 5, 6], found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
