"""Devices whose times are arithmetic: what is left of a run is what the tuner itself takes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

from pagegen_autotune.fleet.libraries import Library
from pagegen_autotune.fleet.station import Kit
from pagegen_autotune.measure import Verdict

from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CompileFacts,
    CppVariant,
    Device,
    Profile,
    Status,
    Target,
    Variant,
    Workload,
)

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
LAYOUT = CacheLayout(block_size=16)
PROFILE = Profile(
    name="made up",
    workloads=tuple(Workload(context_lens=(256 * 2**i,) * 4) for i in range(8)),
    weights=(1.0,) * 8,
)
DEVICE = Device(name="a device of arithmetic", target=Target("cpu"), units=2, bandwidth_gb_s=30.0)
# What a sample takes in truth, asleep: set for the processes of a cluster when it is started.
SAMPLE_S = "FLEET_BENCH_SAMPLE_S"


class FakeBench:
    """A clock that is told: a variant's microseconds are a hash of its name and the batch."""

    regime = "cold"
    workers = 8

    def __init__(self, spec: Any, target: Any, device: Any, profile: Any, *, seed: int) -> None:
        self.environment = {"threads": "2", "compiler": "none"}
        self.seconds = float(os.environ.get(SAMPLE_S, "0"))

    def check(self, layout: CacheLayout, variants: Sequence[Variant]) -> dict[Variant, Verdict]:
        return {variant: Verdict(status=Status.OK, max_error=0.0) for variant in variants}

    def sample(self, layout: CacheLayout, variant: Variant, workload: Workload) -> float:
        if self.seconds:
            time.sleep(self.seconds)
        digest = hashlib.blake2b(f"{variant.name} {workload.total_context}".encode(), digest_size=4).digest()
        return 1000.0 + int.from_bytes(digest, "big") % 300

    def gauge(self) -> float | None:
        return None

    def facts(self, layout: CacheLayout, variant: Variant, *, decode: bool) -> CompileFacts | None:
        return None


def look(gpu: bool) -> Device:
    return DEVICE


def nothing(spec: AttentionSpec, layout: CacheLayout, variants: Sequence[Variant]) -> dict[Variant, Library]:
    return {}


KIT = Kit(look=look, make=FakeBench, share=nothing)


def variants(count: int) -> list[CppVariant]:
    """So many different ones."""
    made = [
        CppVariant(tile_kv=tile, streams=streams, heads_together=heads, split_tokens=split)
        for split in (512, 1024, 2048, 4096)
        for tile in (32, 64, 128, 256)
        for streams in (2, 4, 8)
        for heads in (1, 2, 4, 8)
    ]
    return made[:count]
