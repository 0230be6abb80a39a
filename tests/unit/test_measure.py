"""Operands, the correctness check and interleaved timing, without a compiled kernel."""

from __future__ import annotations

import errno
import math
import pickle
import random

import pytest
import torch
from pagegen_autotune import inputs, worker
from pagegen_autotune.faults import MachineFault
from pagegen_autotune.measure import KEPT_CHECKS, KernelBench, classify, compare
from pagegen_autotune.rounds import Rounds, interleave

from pagegen.reference import reference_attention
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device, Profile, Status, Target, Workload
from pagegen.targets.errors import CannotBuild, CompileError

SPEC = AttentionSpec(num_q_heads=3, num_kv_heads=1, head_dim=32)
LAYOUT = CacheLayout(block_size=16)
DEVICE = Device(name="fake CPU", target=Target("cpu"), units=2, last_level_cache_mib=1)
VARIANTS = tuple(CppVariant(streams=s) for s in (1, 2, 4, 8))


def exact(call, *, spec=SPEC, **changes):
    """A kernel by the definition; `changes` replace operands, to make it wrong in one way."""
    operands = {
        name: changes.pop(name, getattr(call, name)) for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")
    }
    options = {
        "query_start_loc": call.query_start_loc, "scale": call.scale, "causal": spec.causal, "window": spec.window,
        "logit_softcap": spec.logit_softcap, "alibi_slopes": call.alibi_slopes, "sinks": call.sinks,
        "score_mod": spec.score_mod, "mask_mod": spec.mask_mod, "captures": list(call.captures),
        "kv_dtype": spec.kv_dtype, "k_scale": call.k_scale, "k_zero": call.k_zero,
    }  # fmt: skip
    if spec.shared_kv:
        operands["v_cache"], options["v_head_dim"] = None, spec.v_head_dim
    else:
        options |= {"v_scale": call.v_scale, "v_zero": call.v_zero}
    out, lse = reference_attention(**operands, **{**options, **changes}, return_lse=True)
    call.out.copy_(out)
    if call.lse is not None:
        call.lse.copy_(lse)


@pytest.fixture(scope="module")
def batches():
    return [inputs.check_batch(SPEC, LAYOUT, w, "cpu", seed=3) for w in inputs.check_workloads(SPEC, LAYOUT)]


def verdicts(kernel, batches):
    return [compare(kernel, batch, torch.bfloat16).status for batch in batches]


def test_a_kernel_by_the_definition_passes_both_batches(batches):
    assert verdicts(exact, batches) == [Status.OK, Status.OK]


@pytest.mark.parametrize("on", KEPT_CHECKS)
def test_the_check_batches_of_the_last_layouts_are_kept_as_many_as_the_place_spares(on, monkeypatch):
    bench = KernelBench.__new__(KernelBench)
    bench.spec, bench._on, bench._seed, bench._batches = SPEC, on, 0, {}
    made = []
    monkeypatch.setattr(inputs, "check_batch", lambda spec, layout, *_: made.append(layout.block_size))
    for size in [16, 16, 32, *range(40, 40 + KEPT_CHECKS[on] - 1), 32]:
        bench._checks(CacheLayout(block_size=size))
    assert made[::2] == [16, 32, *range(40, 40 + KEPT_CHECKS[on] - 1)]
    assert len(bench._batches) == KEPT_CHECKS[on] and list(bench._batches)[-1].block_size == 32


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(
    "features",
    [
        {"window": 20}, {"sinks": True}, {"alibi": True}, {"logit_softcap": 20.0}, {"causal": False},
        {"kv_dtype": "float8_e4m3fn", "kv_scale_granularity": "tensor"}, {"mask_mod": "chunked(64)"},
        {"kv_scale_granularity": "head", "kv_dtype": "int8"},
        {"kv_zero_points": True, "kv_scale_granularity": "token_head", "kv_dtype": "int4"},
        {"shared_kv": True, "v_head_dim": 16}, {"v_head_dim": 16}, {"q_dtype": "float32"}, {"q_dtype": "float16"},
    ],
    ids=lambda f: next(iter(f)),
)  # fmt: skip
def test_the_check_batch_is_answered_for_every_feature_and_order(features, order, monkeypatch):
    monkeypatch.setattr(inputs, "LONG_CONTEXT", 999)
    spec, layout = SPEC.replace(**features), CacheLayout(block_size=24, order=order)
    for workload in inputs.check_workloads(spec, layout):
        batch = inputs.check_batch(spec, layout, workload, "cpu", seed=5)
        assert compare(lambda c: exact(c, spec=spec), batch, spec.q_dtype).status is Status.OK


def test_every_unused_slot_is_poisoned_and_every_unused_table_entry_is_garbage(batches):
    call = batches[0].call
    assert call.k_cache.isnan().any() and call.v_cache.isnan().any()
    for s, length in enumerate(call.seq_lens.tolist()):
        used = LAYOUT.blocks_for(length)
        assert (call.block_table[s, used:] == inputs.GARBAGE_BLOCK).all()
        if length % 16:
            last = call.k_cache[call.block_table[s, used - 1]]
            assert last[length % 16 :].isnan().all() and not last[: length % 16].isnan().any()
    blocks = call.block_table[call.block_table != inputs.GARBAGE_BLOCK].tolist()
    assert len(set(blocks)) == len(blocks) and blocks != sorted(blocks)


def test_the_check_batch_holds_an_empty_sequence_and_one_that_every_split_divides(batches):
    lengths = batches[0].call.seq_lens.tolist()
    assert 0 in lengths and max(lengths) > 2 * 8192


def scale_twice(call):
    exact(call, scale=call.scale * 2)


def drop_the_last_key(call):
    exact(call, seq_lens=(call.seq_lens - 1).clamp_min(0), query_start_loc=call.query_start_loc)


def read_poison(call):
    exact(call)
    call.out[-1, 0, 0] = math.nan


def leave_a_row(call):
    kept = call.out[3].clone()
    exact(call)
    call.out[3] = kept


def swap_heads(call):
    exact(call)
    call.out.copy_(call.out.flip(1))


def ignore_the_first_split(call):
    long = int(call.seq_lens.max())
    exact(call, window=long - 8192 if long > 8192 else None)


def wrong_lse(call):
    exact(call)
    call.lse.add_(0.5)


@pytest.mark.parametrize("kernel", [scale_twice, read_poison, leave_a_row, swap_heads, wrong_lse])
def test_a_wrong_kernel_fails_both_batches(kernel, batches):
    assert verdicts(kernel, batches) == [Status.WRONG_RESULT, Status.WRONG_RESULT]


@pytest.mark.parametrize("kernel", [drop_the_last_key, ignore_the_first_split])
def test_a_kernel_that_misses_keys_fails(kernel, batches):
    assert verdicts(kernel, batches[:1]) == [Status.WRONG_RESULT]


def test_a_kernel_that_ignores_causality_fails_the_mixed_batch(batches):
    assert verdicts(lambda c: exact(c, causal=False), batches) == [Status.OK, Status.WRONG_RESULT]


def test_what_an_earlier_candidate_wrote_does_not_pass_for_the_next(batches):
    assert verdicts(exact, batches) == [Status.OK, Status.OK]
    assert verdicts(lambda call: None, batches) == [Status.WRONG_RESULT, Status.WRONG_RESULT]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CompileError("cpu", "v", "no"), Status.COMPILE_ERROR),
        (TimeoutError("60 s"), Status.TIMEOUT),
        (MemoryError(), Status.RESOURCE_LIMIT),
        (torch.OutOfMemoryError("HIP out of memory"), Status.RESOURCE_LIMIT),
        (type("OutOfResources", (Exception,), {})("shared memory"), Status.RESOURCE_LIMIT),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Status.RESOURCE_LIMIT),
        (RuntimeError("PassManager::run failed\nlong"), Status.RUNTIME_ERROR),
        (KeyError("odd"), Status.RUNTIME_ERROR),
    ],
)
def test_every_exception_is_a_failure_class_with_one_line(error, status):
    found, detail = classify(error)
    assert found is status
    assert detail.startswith(type(error).__name__) and "\n" not in detail


@pytest.mark.parametrize("error", [CannotBuild("cpu", "v", "a full disk"), OSError(errno.ENOSPC, "a full disk")])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_machine_is_at_fault_for_is_no_candidates_failure(error, wrapped):
    raised = CompileError("sm_90", "v", "no")
    raised.__cause__ = error
    with pytest.raises(MachineFault, match="nothing can be compiled here: .*a full disk"):
        classify(raised if wrapped else error)

    class Full:
        def check(self):
            raise error

    succeeded, answer = worker._answer(Full(), "check", ())
    assert not succeeded and str(pickle.loads(pickle.dumps(answer))) == str(answer) and type(answer) is MachineFault


def run(sample, *, variants=VARIANTS, rounds=7, more=lambda: True, seed=0):
    into = Rounds()
    interleave(variants, sample, into, rounds=rounds, rng=random.Random(seed), more=more)
    return into


def test_every_round_measures_every_variant_once_in_an_order_of_its_own():
    order = []
    run(lambda v: order.append(v) or 1.0)
    rounds = [tuple(order[i : i + 4]) for i in range(0, 28, 4)]
    assert all(set(r) == set(VARIANTS) for r in rounds)
    assert len(set(rounds)) > 3


def test_a_machine_that_slows_down_steadily_favours_no_variant():
    ratios = []
    for seed in range(40):
        calls = iter(range(1, 1000))
        found = run(lambda v, calls=calls: 100.0 + 5.0 * next(calls), seed=seed).samples  # 4.5 times slower at the end
        first, last = found[VARIANTS[0]], found[VARIANTS[-1]]
        ratios.append(sorted(a / b for a, b in zip(first, last, strict=True))[3])
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.02)


def test_a_variant_that_fails_leaves_the_rounds_and_keeps_no_samples():
    calls = []

    def sample(variant):
        calls.append(variant)
        if variant == VARIANTS[1] and calls.count(variant) == 3:
            raise RuntimeError("boom")
        return 1.0

    found = run(sample)
    assert found.failures == {VARIANTS[1]: (Status.RUNTIME_ERROR, "RuntimeError: boom")}
    assert found.samples[VARIANTS[1]] == [] and calls.count(VARIANTS[1]) == 3
    assert all(len(found.samples[v]) == 7 for v in VARIANTS if v != VARIANTS[1])


def test_the_first_round_is_finished_even_when_time_is_over():
    assert all(len(s) == 1 for s in run(lambda v: 1.0, more=lambda: False).samples.values())


def test_an_interrupt_keeps_what_was_measured():
    into, calls = Rounds(), []

    def sample(variant):
        calls.append(variant)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        interleave(VARIANTS, sample, into, rounds=7, rng=random.Random(0), more=lambda: True)
    assert sum(map(len, into.samples.values())) == 9


def profile(*workloads):
    return Profile(name="p", workloads=workloads, weights=(1.0,) * len(workloads))


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_calls_over_the_pool_read_disjoint_blocks_until_the_whole_pool_was_read(order):
    load = Workload(context_lens=(100, 33, 0, 16))
    layout = CacheLayout(block_size=16, order=order)
    pool = inputs.Pool(SPEC, profile(load), DEVICE, on="cpu", seed=0)
    calls = pool.calls(layout, load)
    per_call = [c.block_table[c.block_table != inputs.GARBAGE_BLOCK].tolist() for c in calls]
    num_blocks = calls[0].k_cache.shape[0]
    assert num_blocks * 16 * SPEC.kv_bytes_per_token > 3.9 * 2**20  # four times the last-level cache
    assert len({len(b) for b in per_call}) == 1 and len(per_call[0]) == 7 + 3 + 0 + 1
    walked = [b for blocks in per_call for b in blocks][:num_blocks]
    assert sorted(walked) == list(range(num_blocks))
    assert calls[0].k_cache.stride(-1) == 1 and calls[0].k_cache.shape[1:] == (16, 1, 32)
    exact(calls[-1])
    assert calls[-1].out.isfinite().all()


def test_a_workload_larger_than_the_pool_walks_round_it():
    load = Workload(context_lens=(5000,) * 8)
    pool = inputs.Pool(SPEC, profile(Workload(context_lens=(1,))), DEVICE, on="cpu", seed=0)
    (call,) = pool.calls(LAYOUT, load)
    used = call.block_table[call.block_table != inputs.GARBAGE_BLOCK]
    assert len(used) == 8 * 313 and int(used.max()) < call.k_cache.shape[0]


def test_the_pool_stays_below_its_limit_and_a_cache_too_large_to_overflow_is_not_called_cold(monkeypatch):
    monkeypatch.setattr(inputs, "POOL_LIMIT_BYTES", 1 << 20)
    load = Workload(context_lens=(50000,))
    small = inputs.Pool(
        SPEC, profile(load), Device(name="d", target=Target("cpu"), last_level_cache_mib=0.25), on="cpu", seed=0
    )
    large = inputs.Pool(
        SPEC, profile(load), Device(name="d", target=Target("cpu"), last_level_cache_mib=9), on="cpu", seed=0
    )
    assert small.bytes == large.bytes == 1 << 20
    assert (small.regime, large.regime) == ("cold", "warm")


def test_only_a_batch_of_single_queries_is_called_as_decode():
    pool = inputs.Pool(SPEC, profile(Workload(context_lens=(9,))), DEVICE, on="cpu", seed=0)
    decode = pool.calls(LAYOUT, Workload(context_lens=(9, 5)))[0]
    paused = pool.calls(LAYOUT, Workload(context_lens=(9, 5), query_lens=(1, 0)))[0]
    assert decode.query_start_loc is None
    assert paused.query_start_loc.tolist() == [0, 1, 1] and paused.max_query_len == 1
