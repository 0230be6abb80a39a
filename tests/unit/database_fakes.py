"""Values that the database, selection and command line tests share."""

from __future__ import annotations

from dataclasses import replace

from pagegen import costs
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    Clause,
    CppVariant,
    Device,
    DispatchRule,
    Measurement,
    Profile,
    Status,
    Target,
    TritonVariant,
    Workload,
)

SM_90 = Target("cuda", "sm_90")
H100 = costs.shipped_device(SM_90)
CPU = Device(
    name="fake CPU", target=Target("cpu"), units=4, memory_gib=15.6, bandwidth_gb_s=40.0, last_level_cache_mib=32,
    features=("avx2", "fma"),
)  # fmt: skip
SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
LAYOUT = CacheLayout(block_size=16)
DECODE = Workload(context_lens=(1000, 3000, 17))
MIXED = Workload(context_lens=(500, 64), query_lens=(1, 64))
TUNED = TritonVariant(tile_kv=32, page_walk="pages_in_tile", num_splits=4)
PROFILE = Profile(name="fake traffic", workloads=(DECODE, MIXED), weights=(3, 1), figures={"p50": 7}, source="made up")


def trial(**changes) -> Measurement:
    """A plain ok trial with some fields changed."""
    plain = Measurement(
        spec=SPEC,
        layout=LAYOUT,
        target=SM_90,
        device=H100,
        variant=TUNED,
        workload=DECODE,
        status=Status.OK,
        samples_us=(101.5, 99.25, 100.125),
        max_error=0.0009765625,
        code_hash="c0de",
        environment={"torch": "2.13.0", "driver": "570"},
        created_at="2026-01-02T03:04:05.678+00:00",
    )
    return replace(plain, **changes)


def cpu_trial(**changes) -> Measurement:
    """The same on a CPU."""
    return trial(**{"target": CPU.target, "device": CPU, "variant": CppVariant(), "code_hash": "cpp", **changes})


def rule(variant=TUNED, *, kind="measured", reason="tuned on fake traffic") -> DispatchRule:
    """A rule of one variant for every batch."""
    return DispatchRule(clauses=(Clause(variant=variant),), reason=reason, evidence={"kind": kind, "trials": 3})
