"""Failures that users of other tuners reported, where measuring is to blame. docs/failures.md lists them all."""

from __future__ import annotations

import pytest
import torch
from pagegen_autotune import inputs, space, tune
from pagegen_autotune.measure import KernelBench, compare
from tuning_fakes import DEFAULT, DEVICE, PROFILE, SPEC, FakeBench, FakeStore, table

from pagegen import targets
from pagegen.reference import reference_attention
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Profile, Status, Target, Workload

LAYOUT = CacheLayout(block_size=16)
SMALL = AttentionSpec(num_q_heads=3, num_kv_heads=1, head_dim=32)
OPERANDS = ("q", "k_cache", "v_cache", "block_table", "seq_lens")


def exact(call):
    """A kernel by the definition."""
    out, lse = reference_attention(
        *(getattr(call, name) for name in OPERANDS), query_start_loc=call.query_start_loc, return_lse=True
    )
    call.out.copy_(out)
    if call.lse is not None:
        call.lse.copy_(lse)


@pytest.fixture(scope="module")
def batches():
    return [inputs.check_batch(SMALL, LAYOUT, w, "cpu", seed=3) for w in inputs.check_workloads(SMALL, LAYOUT)]


@pytest.mark.parametrize("name", OPERANDS)
def test_a_candidate_that_computes_in_place_is_refused_and_the_next_one_finds_its_operands_whole(batches, name):
    def in_place(call):
        exact(call)
        getattr(call, name).zero_()

    for batch in batches:
        verdict = compare(in_place, batch, torch.bfloat16)
        assert verdict.status is Status.WRONG_RESULT and f"{name} was written" in verdict.detail
        assert compare(exact, batch, torch.bfloat16).status is Status.OK


def test_a_candidate_that_writes_its_operands_and_then_raises_leaves_them_whole(batches):
    def half_way(call):
        call.k_cache.zero_()
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        compare(half_way, batches[0], torch.bfloat16)
    assert compare(exact, batches[0], torch.bfloat16).status is Status.OK


def test_no_candidate_and_no_call_has_a_clone_of_the_kv_cache():
    """Restoring a mutated argument doubled the peak memory of a cache of 12 GB, and the clone was timed as well."""
    pool = inputs.Pool(SMALL, Profile(name="p", workloads=(Workload(context_lens=(64,)),), weights=(1,)), DEVICE,
                       on="cpu", seed=0)  # fmt: skip
    calls = [*pool.calls(LAYOUT, Workload(context_lens=(64, 9))), *pool.calls(CacheLayout(block_size=64),
             Workload(context_lens=(100,)))]  # fmt: skip
    assert len(calls) > 2
    assert len({call.k_cache.untyped_storage().data_ptr() for call in calls}) == 1
    assert len({call.v_cache.untyped_storage().data_ptr() for call in calls}) == 1


def test_what_the_tuner_measured_for_a_batch_is_what_serves_that_batch(no_kernels):
    """Tuner and runtime had two functions from sizes to buckets, which disagreed at the borders."""

    def times(layout, variant, workload):
        return 800.0 if variant.streams == (8 if workload.is_decode else 2) else 1000.0

    borders = (Workload(context_lens=(1,)), Workload(context_lens=(64,) * 64), Workload(context_lens=(9, 9)),
               Workload(context_lens=(2, 2), query_lens=(1, 2)), Workload(context_lens=(9000,), query_lens=(9000,)),
               Workload(context_lens=(5, 5), query_lens=(0, 1)))  # fmt: skip
    profile = Profile(name="borders", workloads=borders, weights=(1,) * len(borders))
    report = tune(SPEC, profile, block_sizes=(16,), target="cpu", db=FakeStore(), bench=FakeBench(times),
                  progress=False)  # fmt: skip
    (row,) = report.rows
    best = {"decode": 8, "mixed": 2}
    for workload in borders:
        served = row.rule.choose(workload.num_seqs, workload.max_query_len, workload.max_context_len)
        assert served.streams == best["decode" if workload.is_decode else "mixed"]


def test_one_candidate_more_does_not_time_the_others_again(no_kernels, monkeypatch):
    """A list of candidates in the key made every edit of the list tune all of them again."""
    store = FakeStore()

    def run(streams):
        axes = {**space.AXES, "cpp": {**space.AXES["cpp"], "streams": streams}}
        monkeypatch.setattr(space, "AXES", axes)
        bench = FakeBench(table())
        tune(SPEC, PROFILE, block_sizes=(16,), target="cpu", db=store, bench=bench, progress=False)
        return [variant for _, variant, _ in bench.sampled]

    first = run((2, 4))
    added = run((2, 4, 8))
    assert any(variant.streams == 8 for variant in added)
    again = {variant for variant in added if variant in first} - {DEFAULT}  # the default stands beside each
    assert len(again) <= 0.1 * len(set(first))  # the best of them, to compare with what is new


def test_the_artefact_that_was_checked_is_the_one_that_is_timed(monkeypatch):
    """Candidates were compiled twice, since the key of the first compilation was not that of the run."""
    asked = []

    def load(spec, layout, variant, target):
        asked.append((spec, layout, variant, target))
        return exact

    monkeypatch.setattr(targets, "load_attention", load)
    load_ = Workload(context_lens=(20,))
    bench = KernelBench(SMALL, Target("cpu"), DEVICE, Profile(name="p", workloads=(load_,), weights=(1,)), seed=0)
    variant = CppVariant(streams=2)
    assert bench.check(LAYOUT, [variant])[variant].status is Status.OK
    assert bench.sample(LAYOUT, variant, load_) > 0
    assert len(asked) == 2 and asked[0] == asked[1]  # equal questions: the builder finds the library that it made


@pytest.fixture
def no_kernels(monkeypatch):
    """The CPU target as facts alone."""
    monkeypatch.setattr(targets, "current_device", lambda target: DEVICE)
    monkeypatch.setattr(targets, "code_hash", lambda target: "hash-1")
    monkeypatch.setattr(targets, "unsupported", lambda spec, target: None)
    monkeypatch.setattr(targets, "default_variant", lambda spec, layout, target, *, decode: DEFAULT)
