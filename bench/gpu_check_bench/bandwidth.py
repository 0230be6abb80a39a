"""What a copy within the device's memory gives: the ceiling that decode is held against."""

from __future__ import annotations

import functools

import torch

from gpu_check_bench.context import Context
from gpu_check_bench.timing import interleave, summary
from gpu_check_bench.worker import Cases, Row

GIB = 1 << 30
ROUNDS = 15


def add_cases(context: Context, cases: Cases) -> None:
    cases.add("device copy", functools.partial(copy, context))


def copy(context: Context) -> Row:
    """One large copy by torch; bytes read and bytes written both count."""
    size = 1 << 22 if context.dry_run else 4 * GIB
    if context.on == "cuda":
        free, _ = torch.cuda.mem_get_info()
        size = min(size, free // 4)
    source = torch.ones(size // 4, dtype=torch.int32, device=context.on)
    target = torch.empty_like(source)
    samples = interleave(
        {"copy": context.clock.runner([lambda: target.copy_(source)], cold=False)}, ROUNDS, context.left_s
    )["copy"]
    found = summary(samples)
    return {**found, "bytes": 2 * source.nbytes, "gb_s": round(2 * source.nbytes / found["us"] / 1e3, 1)}
