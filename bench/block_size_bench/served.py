"""What a whole server would do with each block size, and apart from it what requests would wait for: simulated.

Attention takes what was measured here; the rest of a step is the model's weights at the rates measured here. Memory
reserved in one piece for the longest request (of those that the memory holds) is paging with blocks of that size, one a
request: it is simulated as such, at the attention times of the largest block size.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpu_bench.bench import Bench
from cpu_bench.ours import peak_gauge, peak_kind
from cpu_bench.samples import UNDISTURBED, Gauge
from pagegen_autotune.profiles import prefix_size
from pagegen_autotune.served import Rest, ServedBlockSize, serve_rows
from pagegen_autotune.simulation import cache_tokens
from pagegen_autotune.step_model import AttentionCost, fit
from pagegen_autotune.trace import Trace

from block_size_bench.kernels import Times
from pagegen.db import block_size as sizes
from pagegen.db import open_db
from pagegen.db.block_size import BlockSizeRow
from pagegen.selection.ladder import rule_for
from pagegen.spec import AttentionSpec, CacheLayout, DispatchRule, Profile
from pagegen.targets.cpu_device import current_device

Row = dict[str, Any]
# 64 sequences and 128 tokens a step: a step with 128 prefill tokens of a 1 B model takes this CPU most of a second
MAX_NUM_SEQS, MAX_BATCH_TOKENS = 64, 128


def rules(spec: AttentionSpec, block_sizes: tuple[int, ...]) -> dict[int, DispatchRule]:
    """The kernels that a fresh installation chooses, a rule a block size (NHD)."""
    with tempfile.TemporaryDirectory() as folder, open_db(Path(folder) / "empty.db") as db:
        return {size: rule_for(spec, CacheLayout(block_size=size), "cpu", db) for size in block_sizes}


def rated(
    spec: AttentionSpec, profile: Profile, found: dict[int, DispatchRule], times: Times, *, layers: int,
    memory_bytes: int | None = None,
) -> list[BlockSizeRow]:  # fmt: skip
    """The rows of `pagegen.db.block_size`, as the database would answer had these times been recorded. Where memory
    cuts the profile's batches, their times are scaled by the cost model, and the rows say so."""
    return [
        sizes.row(
            spec, CacheLayout(block_size=size), current_device(), profile, rule, times[size],
            memory_bytes=memory_bytes, num_layers=layers,
        )
        for size, rule in found.items()
    ]  # fmt: skip


def rates(bench: Bench, dtype: str = "bfloat16") -> dict[str, float]:
    """What this machine gives: GB/s of reading and TFLOP/s of multiply-adds, each the best of some."""
    peak = peak_gauge(peak_kind(dtype))
    read_s, peak_s = (max(_rate(gauge, bench.threads) for _ in range(9)) for gauge in (bench.read, peak))
    return {"read_gb_s": read_s / 1e9, "peak_tflops": peak_s / 1e12}


def _rate(gauge: Gauge, threads: int) -> float:
    """Work a second; of CPU time, where others had part of the threads' share meanwhile."""
    seconds, cpu_seconds = gauge.run()
    return gauge.work / (seconds if cpu_seconds >= UNDISTURBED * threads * seconds else cpu_seconds / threads)


def rest_of(weights_bytes: int, measured: dict[str, float]) -> Rest:
    """What a step takes beside attention."""
    here = dataclasses.replace(
        current_device(), bandwidth_gb_s=measured["read_gb_s"], matrix_tflops=measured["peak_tflops"]
    )
    return Rest.of_weights(weights_bytes, here)


def rows(
    spec: AttentionSpec, layers: int, found: list[BlockSizeRow], profile: Profile, trace: Trace, name: str, rest: Rest,
    *, memory_bytes: int, requests: int,
) -> Iterator[Row]:  # fmt: skip
    """One row a block size, smallest first, and one for memory in one piece. "server" and "requests" are different
    questions with different answers: never one number."""
    rated_costs = sorted(((row, fit(profile, row.workload_us)) for row in found), key=lambda one: one[0].block_size)
    longest = int(cache_tokens(trace.prompt_tokens, trace.output_tokens).max())
    longest = min(longest, memory_bytes // (spec.kv_bytes_per_token * layers))  # larger ones are refused either way
    pairs = [*rated_costs, _in_one_piece(*rated_costs[-1], longest)]
    served = serve_rows(
        spec, pairs, memory_bytes=memory_bytes, trace=trace, prefix_block_tokens=prefix_size(trace), num_layers=layers,
        rest=rest, max_num_seqs=MAX_NUM_SEQS, max_batch_tokens=MAX_BATCH_TOKENS, requests=requests,
    )  # fmt: skip
    for one in sorted(served, key=lambda s: s.block_size):
        way = {"reservation": "longest request"} if one.block_size == longest else {"block_size": one.block_size}
        yield {
            "section": "served",
            "cell": {"trace": name, **way},
            "kind": f"simulated, attention {one.attention.kind}",
            **_figures(one),
        }


def _in_one_piece(row: BlockSizeRow, cost: AttentionCost, longest: int) -> tuple[BlockSizeRow, AttentionCost]:
    return dataclasses.replace(row, block_size=longest), cost


def _figures(one: ServedBlockSize) -> Row:
    first, between = one.latencies.time_to_first_token_s, one.latencies.inter_token_s
    assert first is not None and between is not None  # requests were served
    return {
        "server": {
            "output_tokens_per_s": round(one.speed.output_tokens_per_s, 3),
            "sequences": round(one.sequences, 2),
            "waste_share": round(one.waste_share, 4),
            "hit_share": round(one.hit_share, 4),
            "attention_share": round(one.attention_share, 4),
            "preemptions": one.speed.preemptions,
        },
        "requests": {
            "ttft_p50_s": round(first.p50, 3), "ttft_p99_s": round(first.p99, 3),
            "itl_p50_s": round(between.p50, 4), "itl_p99_s": round(between.p99, 4),
            "preemptions": one.load_figures.preemptions,
            "rejected": one.rejected,
        },
    }  # fmt: skip
