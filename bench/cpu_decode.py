"""How near is decode attention on this CPU to the memory's limit, and to gather + SDPA?

    python bench/cpu_decode.py [--rounds 9] [--output bench/results/cpu_decode.json]

Batch 8, 4096 tokens each, bf16, 32 query and 8 KV heads, head dim 128, for block sizes 16, 32 and 64 in both cache
orders. Every sample of the kernel or of gather + SDPA stands between two samples of plain sequential reading, since
a shared machine's bandwidth changes from second to second; the ratio to reading is taken sample by sample. A sample
is undisturbed when this process had its threads' whole share of the CPU meanwhile; medians are over those where there
are three or more, and the file says how many there were. On one thread the CPU's own clock is taken as well
(`cpu_gb_s`), which other processes disturb less. Block tables rotate over a pool of 256 MiB of shuffled
blocks, so nothing is found in a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagegen.spec import AttentionSpec, CacheLayout
from pagegen.targets import cpu, cpu_device
from pagegen.targets.call import AttentionCall

BATCH, CONTEXT, SETS = 8, 4096, 2
SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, q_dtype="bfloat16")
KV_BYTES = BATCH * CONTEXT * SPEC.kv_bytes_per_token
Run = Callable[[int], None]


@dataclass(frozen=True)
class Sample:
    """One timed run between two of plain reading: seconds passed, seconds of CPU time (of all threads, waiting for
    one another included), the same of reading as rates, and whether the process had the CPU to itself."""

    seconds: float
    cpu_seconds: float
    read_gb_s: float
    read_cpu_gb_s: float
    undisturbed: bool


def pool(layout: CacheLayout) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """K and V caches of `SETS` batches, and one shuffled block table for each."""
    per_batch = BATCH * CONTEXT // layout.block_size
    inner = (layout.block_size, SPEC.num_kv_heads) if layout.order == "NHD" else (SPEC.num_kv_heads, layout.block_size)
    shape = (SETS * per_batch, *inner, SPEC.head_dim)
    caches = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(2)]
    if layout.order == "HND":
        caches = [c.transpose(1, 2) for c in caches]
    ids = torch.randperm(SETS * per_batch, dtype=torch.int32)
    return caches[0], caches[1], list(ids.view(SETS, BATCH, -1))


def kernel(layout: CacheLayout, k: torch.Tensor, v: torch.Tensor, tables: list[torch.Tensor]) -> Run:
    variant = cpu.default_variant(SPEC, layout, decode=True)
    attend = cpu.load_attention(SPEC, layout, variant)
    q = torch.randn(BATCH, SPEC.num_q_heads, SPEC.head_dim, dtype=torch.bfloat16)
    lens = torch.full((BATCH,), CONTEXT, dtype=torch.int32)
    calls = [
        AttentionCall(
            q=q, k_cache=k, v_cache=v, block_table=t, seq_lens=lens, query_start_loc=None, max_query_len=1,
            max_seq_len=CONTEXT, scale=SPEC.scale, alibi_slopes=None, sinks=None, out=torch.empty_like(q), lse=None,
        )
        for t in tables
    ]  # fmt: skip
    return lambda i: attend(calls[i % SETS])


def gather_sdpa(k: torch.Tensor, v: torch.Tensor, tables: list[torch.Tensor]) -> Run:
    """What one writes without a paged kernel: collect each sequence's blocks, then dense attention. The query heads
    of a group are rows of one matrix, which is 8 times faster here than `enable_gqa`."""
    q = torch.randn(BATCH, SPEC.num_kv_heads, SPEC.group, SPEC.head_dim, dtype=torch.bfloat16)

    def run(i: int) -> None:
        table = tables[i % SETS].flatten().long()
        dense = [c[table].view(BATCH, CONTEXT, SPEC.num_kv_heads, -1).transpose(1, 2) for c in (k, v)]
        torch.nn.functional.scaled_dot_product_attention(q, *dense)

    return run


def sample(runs: dict[str, Run], rounds: int) -> dict[str, list[Sample]]:
    """Samples of every run in every round, rounds outermost; a first round is thrown away."""
    if cpu.compiler() is None:
        raise SystemExit("this bench needs a C++ compiler")
    library = cpu.library()
    memory = torch.ones(256 << 17, dtype=torch.int64)
    threads = torch.get_num_threads()

    def read() -> None:
        library.pagegen_read(memory.data_ptr(), memory.nbytes, threads)

    taken: dict[str, list[Sample]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            before, own, after = timed(read), timed(lambda run=run, i=i: run(i)), timed(read)
            wall, spent = (sum(pair) for pair in zip(before, own, after, strict=True))
            rates = [2 * memory.nbytes / (a + b) / 1e9 for a, b in zip(before, after, strict=True)]
            if i > 0:
                taken[name].append(Sample(*own, *rates, undisturbed=spent >= 0.95 * threads * wall))
    return taken


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """(seconds, seconds of this process's CPU time)."""
    start, cpu_start = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu_start


def summary(taken: list[Sample]) -> dict[str, float | list[float]]:
    undisturbed = [s for s in taken if s.undisturbed]
    kept = undisturbed if len(undisturbed) >= 3 else taken
    rates = [KV_BYTES / s.seconds / 1e9 for s in kept]
    return {
        "median_ms": round(statistics.median(s.seconds for s in kept) * 1e3, 3),
        "gb_s": round(statistics.median(rates), 1),
        "read_gb_s": round(statistics.median(s.read_gb_s for s in kept), 1),
        "share_of_read": round(statistics.median(r / s.read_gb_s for r, s in zip(rates, kept, strict=True)), 3),
        "cpu_gb_s": round(statistics.median(KV_BYTES / s.cpu_seconds / 1e9 for s in taken), 1),
        "read_cpu_gb_s": round(statistics.median(s.read_cpu_gb_s for s in taken), 1),
        "undisturbed": len(undisturbed),
        "samples_ms": [round(s.seconds * 1e3, 3) for s in taken],
    }


def line(row: dict[str, Any], rounds: int) -> str:
    text = (
        f"{row['what']:14} {row['order']} block {row['block_size']:3}, threads {row['threads']}: "
        f"{row['gb_s']:5.1f} GB/s, {row['share_of_read']:.0%} of reading at {row['read_gb_s']} GB/s"
    )
    if row["threads"] == 1:
        text += f"; by CPU time {row['cpu_gb_s']} and {row['read_cpu_gb_s']}"
    return f"{text} ({row['undisturbed']} of {rounds} samples undisturbed)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu_decode.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    all_threads = torch.get_num_threads()
    for order in ("HND", "NHD"):
        for block_size in (16, 32, 64):
            layout = CacheLayout(block_size=block_size, order=order)
            k, v, tables = pool(layout)
            runs = {"kernel": kernel(layout, k, v, tables)}
            if order == "NHD":
                runs["gather + SDPA"] = gather_sdpa(k, v, tables)
            for threads in sorted({1, all_threads}):
                torch.set_num_threads(threads)
                for name, taken in sample(runs, options.rounds).items():
                    variant = cpu.default_variant(SPEC, layout, decode=True).name if name == "kernel" else ""
                    what = {"what": name, **layout.to_dict(), "threads": threads, "variant": variant}
                    rows.append({**what, **summary(taken)})
                    print(line(rows[-1], options.rounds), flush=True)
    device = cpu_device.current_device()
    document = {
        "question": "decode attention against read bandwidth and gather + SDPA",
        "workload": {"batch": BATCH, "context": CONTEXT, "kv_bytes": KV_BYTES, "spec": SPEC.to_dict()},
        "environment": {
            "cpu": device.name, "features": list(device.features), "compiler": cpu.compiler(),
            "last_level_cache_mib": device.last_level_cache_mib, "load_average": os.getloadavg()[0],
            "torch": torch.__version__, "python": platform.python_version(), "rounds": options.rounds,
        },
        "rows": rows,
    }  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
