"""Tuning for real: two compiled kernels, a tiny workload, this machine's CPU."""

from __future__ import annotations

import pytest
from pagegen_autotune import space, tune
from pagegen_autotune.measure import KernelBench

from pagegen import targets
from pagegen.db import open_db
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Profile, Status, Target, Workload
from pagegen.targets import cpu

CPU = Target("cpu")
SPEC = AttentionSpec(num_q_heads=3, num_kv_heads=1, head_dim=80)  # whose defaults for decode and for more differ
PROFILE = Profile(
    name="tiny",
    workloads=(Workload(context_lens=(90, 33, 0)), Workload(context_lens=(40, 17), query_lens=(1, 17))),
    weights=(0.7, 0.3),
)

pytestmark = pytest.mark.skipif(cpu.compiler() is None, reason="no C++ compiler works here")


@pytest.fixture(autouse=True)
def two_variants_each(monkeypatch):
    """The default and one neighbour, of decode and of longer queries."""
    decode, mixed = (targets.default_variant(SPEC, CacheLayout(block_size=16), CPU, decode=d) for d in (True, False))
    assert decode.streams == mixed.streams
    axes = {"streams": (decode.streams, 2 * decode.streams)}
    monkeypatch.setitem(space.AXES, "cpp", axes)
    monkeypatch.setitem(space.WAYS, "cpp", ())


def test_four_variants_are_compiled_checked_timed_and_remembered(tmp_path):
    with open_db(str(tmp_path / "tuning.db")) as db:
        report = tune(SPEC, PROFILE, block_sizes=(16,), target="cpu", db=db, progress=False)
        (row,) = report.rows
        trials = db.trials(spec=SPEC, target=CPU)
        assert {t.status for t in trials} == {Status.OK} and len({t.variant for t in trials}) == 4
        assert all(
            0 < t.max_error < 0.1 and t.regime == "cold" and t.code_hash == targets.code_hash(CPU) for t in trials
        )
        assert all(t.environment["compiler"] == cpu.compiler() for t in trials)
        assert {t.workload for t in trials} == set(PROFILE.workloads)
        assert row.rule == db.portfolio(SPEC, row.layout, CPU, targets.code_hash(CPU)) and row.step_us > 0
        again = tune(SPEC, PROFILE, block_sizes=(16,), target="cpu", db=db, progress=False)
        assert again.trials == {} and again.rows == report.rows


def test_a_real_kernel_that_computes_something_else_is_caught_before_it_is_timed(monkeypatch):
    layout, variant = CacheLayout(block_size=16), CppVariant()
    device = targets.current_device(CPU)
    bench = KernelBench(SPEC, CPU, device, PROFILE, seed=0)
    assert bench.check(layout, [variant])[variant].status is Status.OK
    slid = targets.load_attention(SPEC.replace(window=30), layout, variant, CPU)
    monkeypatch.setattr(targets, "load_attention", lambda *args: slid)
    verdict = bench.check(layout, [variant])[variant]
    assert verdict.status is Status.WRONG_RESULT and "off by" in verdict.detail


def test_a_variant_that_the_compiler_refuses_costs_only_itself(monkeypatch):
    layout, good, bad = CacheLayout(block_size=16), CppVariant(), CppVariant(streams=8)
    real = targets.load_attention

    def load(spec, layout, variant, target):
        if variant == bad:
            return cpu.load_attention(spec, layout, variant, machine=("-march=no-such-machine",))
        return real(spec, layout, variant, target)

    monkeypatch.setattr(targets, "load_attention", load)
    bench = KernelBench(SPEC, CPU, targets.current_device(CPU), PROFILE, seed=0)
    found = bench.check(layout, [good, bad])
    assert (found[good].status, found[bad].status) == (Status.OK, Status.COMPILE_ERROR)
    assert "no-such-machine" in found[bad].detail
