"""What a candidate may do to the process that it runs in costs that candidate, and no other."""

from __future__ import annotations

import os
import signal
import time

import pytest
from faulty_bench import BY_VARIANT, RAISES, FaultyBench
from pagegen_autotune import isolated
from pagegen_autotune.interrupt import SIGNALS
from pagegen_autotune.isolated import IsolatedBench
from pagegen_autotune.measure import CandidateFailed

from pagegen import targets
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Profile, Status, Target, Workload
from pagegen.targets import cpu

CPU = Target("cpu")
LAYOUT = CacheLayout(block_size=16)
SPEC = AttentionSpec(num_q_heads=3, num_kv_heads=1, head_dim=32)
LOAD = Workload(context_lens=(90, 33, 0))
PROFILE = Profile(name="tiny", workloads=(LOAD,), weights=(1.0,))
GOOD = CppVariant(tile_kv=32, streams=4, split_tokens=512)
FAULTY = {fault: variant for variant, fault in BY_VARIANT.items()}

pytestmark = pytest.mark.skipif(cpu.compiler() is None, reason="no C++ compiler works here")


@pytest.fixture(scope="module")
def bench():
    device = targets.current_device(CPU)
    with IsolatedBench(
        SPEC, CPU, device, PROFILE, seed=0, make=FaultyBench, check_limit_s=10.0, sample_limit_s=4.0
    ) as b:
        yield b


def test_a_good_variant_among_others_that_hang_abort_and_write_outside_is_still_found_good(bench):
    found = bench.check(LAYOUT, [GOOD, FAULTY["aborts"], RAISES])
    assert {v: verdict.status for v, verdict in found.items()} == {
        GOOD: Status.OK, FAULTY["aborts"]: Status.RUNTIME_ERROR, RAISES: Status.RUNTIME_ERROR,
    }  # fmt: skip
    assert found[FAULTY["aborts"]].detail == "the process ended by SIGABRT"
    assert found[RAISES].detail == "RuntimeError: this one always raises"


@pytest.mark.parametrize(
    ("fault", "status", "detail"),
    [
        ("hangs", Status.TIMEOUT, "no answer within 10 s"),
        ("writes far outside", Status.RUNTIME_ERROR, "the process ended by SIGSEGV"),
        ("writes past its end", Status.WRONG_RESULT, "decode batch: memory outside of the results was written"),
        pytest.param(
            "writes before its beginning",
            Status.WRONG_RESULT,
            "decode batch: memory outside of the results was written",
            marks=pytest.mark.nightly,
        ),
        ("exits", Status.RUNTIME_ERROR, "the process ended with exit status 3"),
    ],
)
def test_a_fault_is_named_and_the_next_candidate_is_measured(bench, fault, status, detail):
    (verdict,) = bench.check(LAYOUT, [FAULTY[fault]]).values()
    assert (verdict.status, verdict.detail) == (status, detail)
    assert bench.sample(LAYOUT, GOOD, LOAD) > 0


def test_a_candidate_that_only_hangs_when_it_is_timed_costs_its_limit(bench):
    start = time.monotonic()
    with pytest.raises(CandidateFailed, match="no answer within 4 s") as failed:
        bench.sample(LAYOUT, FAULTY["hangs"], LOAD)
    assert failed.value.status is Status.TIMEOUT and time.monotonic() - start < 10
    assert bench.sample(LAYOUT, GOOD, LOAD) > 0


def test_a_stop_waits_for_no_hang_and_is_no_fault_of_the_candidate(bench, monkeypatch):
    monkeypatch.setattr(isolated, "_GRACE_S", 0.1)
    start = time.monotonic()
    bench._stop.requested = True
    try:
        with pytest.raises(KeyboardInterrupt):
            bench.sample(LAYOUT, FAULTY["hangs"], LOAD)
    finally:
        bench._stop.requested = False
    assert time.monotonic() - start < 3.5 and bench._process is None  # the sample's limit is 4 s


def test_a_worker_that_a_service_manager_signals_goes_on_and_one_that_is_killed_is_taken_for_out_of_memory(
    bench,
):
    assert bench.sample(LAYOUT, GOOD, LOAD) > 0
    for asked in SIGNALS:  # the tuner's to answer
        os.kill(bench._process.pid, asked)
    assert bench.sample(LAYOUT, GOOD, LOAD) > 0
    os.kill(bench._process.pid, signal.SIGKILL)
    with pytest.raises(CandidateFailed) as failed:
        bench.sample(LAYOUT, GOOD, LOAD)
    assert failed.value.status is Status.RESOURCE_LIMIT
    assert bench.sample(LAYOUT, GOOD, LOAD) > 0
