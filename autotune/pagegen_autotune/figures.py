"""The figures a profile keeps of its trace and of the simulation: plain numbers, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from pagegen_autotune.load import Load
from pagegen_autotune.representatives import Representatives
from pagegen_autotune.simulation import Server, Simulation
from pagegen_autotune.snapshots import Snapshots
from pagegen_autotune.trace import Trace

PERCENTILES = (5, 25, 50, 75, 95, 99)


def percentiles(values: Sequence[float] | npt.NDArray[Any], weights: Sequence[float] | None = None) -> dict[str, float]:
    """p5 ... p99 (the smallest value that the share of the weight reaches, so always one that occurs) and the mean."""
    numbers = np.asarray(values, dtype=np.float64)
    shares = np.ones(len(numbers)) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.argsort(numbers, kind="stable")
    reached = np.cumsum(shares[order])
    # a rounding error of the sum must not push a percentile to the next value
    wanted = np.array(PERCENTILES) / 100 * reached[-1] * (1 - 1e-12)
    found = numbers[order][np.searchsorted(reached, wanted)]
    mean = float((numbers * shares).sum() / reached[-1])
    return {**{f"p{p}": _plain(v) for p, v in zip(PERCENTILES, found, strict=True)}, "mean": round(mean, 2)}


def figures(
    trace: Trace,
    server: Server,
    load: Load,
    simulation: Simulation,
    snapshots: Snapshots,
    chosen: Representatives,
    settings: Mapping[str, Any],
    prefix_block_tokens: int | None,
) -> dict[str, Any]:
    """Everything a profile says of where it came from; `settings` are the choices the caller made."""
    steps = snapshots.weighted()
    decode_contexts = [
        (context, share)
        for (batch, _), share in steps
        for context, query in zip(batch.context_lens, batch.query_lens, strict=True)
        if query == 1
    ]
    sizes = [(batch.num_seqs, share) for (batch, _), share in steps]
    return {
        "requests": len(trace),
        "bad_rows": trace.bad_rows,
        "prompt_tokens": percentiles(trace.prompt_tokens),
        "output_tokens": percentiles(trace.output_tokens),
        "decode_context_tokens": percentiles(*zip(*decode_contexts, strict=True)) if decode_contexts else None,
        "sequences_a_step": percentiles(*zip(*sizes, strict=True)),
        "arrivals": arrivals(trace),
        "prefix_reuse_share": _round(trace.reuse_share),
        "sharing": None if prefix_block_tokens is None else sharing(snapshots, chosen, simulation, prefix_block_tokens),
        "server": asdict(server),
        "simulation": {
            **settings,
            "rate_scale": _round(load.rate_scale),
            "kept_share": _round(load.kept_share),
            "capacity_requests_per_s": _round(load.capacity_per_s),
            "requests": len(load.trace),
            "rejected_requests": load.rejected,
            "preemptions": simulation.scheduler.counters.preemptions,
            "simulated_s": _round(simulation.now_s),
            "steps": snapshots.steps,
            "decode_step_share": _round(snapshots.decode_share),
            "prefix_reuse": prefix_block_tokens is not None,
        },
        "coverage": {
            "snapshots": len(snapshots.decode) + len(snapshots.mixed),
            "batches": len(chosen.workloads),
            "mean_distance_doublings": _round(chosen.mean_distance),
            "p95_distance_doublings": _round(chosen.p95_distance),
            "mean_context_error": _round(chosen.mean_context_error),
            "context_bias": _round(chosen.context_bias),
        },
    }


def sharing(
    snapshots: Snapshots, chosen: Representatives, simulation: Simulation, prefix_block_tokens: int
) -> dict[str, Any]:
    """What the prefix cache did: the share of prompt tokens that it had, the share of a step's context tokens that
    another sequence has too (mean over steps), and how many those are in each of the profile's batches."""
    counters = simulation.scheduler.counters
    shares = [share * min(1.0, one.shared_tokens / one.load.total_context) for one, share in snapshots.weighted()]
    return {
        "prefix_block_tokens": prefix_block_tokens,
        "hit_share": _round(counters.hit_tokens / max(1, counters.prompt_tokens)),
        "shared_context_share": _round(sum(shares)),
        "batches_shared_tokens": list(chosen.shared_tokens),
    }


def arrivals(trace: Trace) -> dict[str, float] | None:
    """Duration, rate and coefficient of variation of the gaps (1 for a Poisson process); None without times."""
    if trace.arrival_s is None or trace.duration_s == 0:
        return None
    gaps = np.diff(trace.arrival_s)
    return {
        "duration_s": round(trace.duration_s, 3),
        "rate_per_s": float(f"{len(gaps) / trace.duration_s:.4g}"),
        "gap_cv": float(f"{gaps.std() / gaps.mean():.4g}"),
    }


def _plain(value: float) -> float:
    return int(value) if float(value).is_integer() else float(value)


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
