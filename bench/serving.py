"""What does the block size change for a server with a real model: its speed, and what requests wait?

    python bench/serving.py [--quick] [--rounds 3] [--requests 24] [--minutes 6] [--block-sizes 16,64] [--data FOLDER]
    python bench/serving.py --figure bench/results/serving.svg  # the figure from the stored results

SmolLM2-135M on this CPU in bfloat16, behind a cache of as many bytes for every block size, with the kernels that a
fresh installation chooses, served by pagegen.serving's scheduler. Two workloads, scaled down from traces: dialogues of
several turns, whose prompts repeat what was said and answered (the model's own answers), and single requests. Each is
served all at once ("rush": tokens a second of the whole server), and at its own times by the clock ("paced": time to
first token and between tokens). The pace is one for all block sizes: arrivals over the median rush's time divided by
the load. Answers have the trace's lengths, whatever tokens come. Block sizes take turns, in an order that rotates every
round. Each run starts with an empty cache. Percentiles are a run's; medians and ranges are over rounds. Of each section
no round begins that would probably end after its share of the minutes; one is always made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

import torch
from cache_bench.document import as_text
from cache_bench.samples import spread
from cpu_bench import machine
from serving_bench import figure
from serving_bench.serve import CpuClock
from serving_bench.server import Limits, Server, servers
from serving_bench.workloads import Workload, workloads

from pagegen.serving import Clock, WallClock

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
DATA = Path(__file__).parents[2] / "shared" / "data"
BLOCK_SIZES = (16, 32, 64, 128, 256)
KEPT_SAMPLES = 3  # decimal places
# Of the time: a paced run takes 1 / load of a rush, 1.4 times as long, and as much again to its last answer.
RUSH_SHARE = 0.4


def rounds_of(
    group: Sequence[Server], workload: Workload, span_s: float, rounds: int, clock: Callable[[], Clock], seconds: float
) -> dict[int, list[Row]]:
    """block size -> one row of figures a round: as many rounds as asked for, or as `seconds` hold, but one."""
    taken: dict[int, list[Row]] = {server.block_size: [] for server in group}
    started = time.perf_counter()
    for i in range(rounds):
        if i and (time.perf_counter() - started) * (i + 1) / i > seconds:
            break
        shift = i % len(group)
        for server in (*group[shift:], *group[:shift]):
            cpu_start = time.process_time()
            row = server.serve(workload, span_s, clock()).to_row()
            taken[server.block_size].append({**row, "cpu_s": time.process_time() - cpu_start})
    return taken


def rows_of(section: str, workload: Workload, taken: dict[int, list[Row]], arrivals_s: float) -> Iterator[Row]:
    """One row a block size."""
    for size, runs in taken.items():
        yield {
            "section": section,
            "cell": {"trace": workload.name, "block_size": size},
            "arrivals_s": round(arrivals_s, 2),
            **{name: spread([run[name] for run in runs], KEPT_SAMPLES) for name in runs[0]},
        }


def measure(options: argparse.Namespace, model: Any, name: str, vocabulary: int) -> dict[str, Any]:
    started, load = time.perf_counter(), os.getloadavg()[0]
    sizes = [int(size) for size in options.block_sizes.split(",")]
    limits = Limits(
        kv_tokens=options.kv_tokens, max_num_seqs=options.max_num_seqs, max_batch_tokens=options.max_batch_tokens
    )
    group = servers(model, sizes, limits, compiled=options.compiled)
    print(f"{len(group)} servers after {time.perf_counter() - started:.0f} s", file=sys.stderr)
    clock: Callable[[], Clock] = CpuClock if options.cpu_time else WallClock
    served = list(workloads(options.data, options.requests, vocabulary))
    warm = next(workloads(Path(), 4, vocabulary))
    for server in group:
        server.serve(warm, 0.0, clock())
    rows: list[Row] = []
    for i, workload in enumerate(served):
        left = (60 * options.minutes - (time.perf_counter() - started)) / (len(served) - i)
        rush = rounds_of(group, workload, 0.0, options.rounds, clock, RUSH_SHARE * left)
        span = statistics.median(run["span_s"] for runs in rush.values() for run in runs)
        paced = rounds_of(group, workload, span / options.load, options.rounds, clock, (1 - RUSH_SHARE) * left)
        for row in (*rows_of("rush", workload, rush, 0.0), *rows_of("paced", workload, paced, span / options.load)):
            print(line(row), flush=True)
            rows.append(row)
    return {
        "question": "what the block size changes for a server with a real model",
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "model": name,
        "environment": {**machine.environment({}), "load_average_before": round(load, 2)},
        "limits": {"kv_tokens": limits.kv_tokens, "max_num_seqs": limits.max_num_seqs,
                   "max_batch_tokens": limits.max_batch_tokens},
        "kernels": {str(server.block_size): server.kernel for server in group},
        "workloads": {w.name: {"source": w.source, **w.facts()} for w in served},
        "load": options.load,
        "rounds": options.rounds,
        "quick": options.quick,
        "clock": "CPU time of one thread" if options.cpu_time else "wall",
        "compiled": options.compiled,
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }  # fmt: skip


def line(row: Row) -> str:
    """One row as text."""
    cell = row["cell"]
    head = f"{row['section']:5} {cell['trace']:16} blocks of {cell['block_size']:3}"
    if row["section"] == "rush":
        speed, whole = (row[name]["median"] for name in ("output_tokens_per_s", "total_tokens_per_s"))
        hits, preempted = row["hit_rate"]["median"], row["preemptions"]["median"]
        return (
            f"{head} {speed:6.1f} tokens/s out, {whole:7.1f} in and out; hits {hits:.1%}, {preempted:.0f} preemptions"
        )
    first, between = (
        "/".join(f"{row[f'{name}_{p}_ms']['median']:.0f}" for p in ("p50", "p99")) for name in ("ttft", "itl")
    )
    return f"{head} first token {first} ms (p50/p99), between tokens {between} ms"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    made.add_argument("--quick", action="store_true", help="two block sizes, few requests, one round: two minutes")
    made.add_argument("--block-sizes", help="default: 16,32,64,128,256; quick: 16,128")
    made.add_argument("--requests", type=int, help="of each workload, about (default: 24, quick: 8)")
    made.add_argument("--rounds", type=int, help="at most (default: 3, quick: 1)")
    made.add_argument("--minutes", type=float, default=6.0, help="begin no further round after them (default: 6)")
    made.add_argument("--load", type=float, default=0.7, help="of a paced run, against the rush's speed")
    made.add_argument("--kv-tokens", type=int, default=2048, help="that the cache holds, whatever the block size")
    made.add_argument("--max-num-seqs", type=int, default=16, help="in a step")
    made.add_argument("--max-batch-tokens", type=int, default=64, help="query tokens in a step")
    made.add_argument("--compiled", action="store_true", help="the model by torch.compile, a minute a block size")
    made.add_argument(
        "--cpu-time", action="store_true", help="one thread, its CPU time as the clock: on a machine that others use"
    )
    made.add_argument("--tiny", action="store_true", help="a small random Llama in place of the real weights")
    made.add_argument("--data", type=Path, default=DATA, help="the traces' folder; without it, made workloads")
    made.add_argument("--output", type=Path, help="default: bench/results/serving.json if all is measured")
    made.add_argument("--figure", type=Path, help="draw the stored results (--output), measure nothing")
    return made


def main() -> None:
    options = parser().parse_args()
    if options.figure:
        document = json.loads((options.output or RESULTS / "serving.json").read_text(encoding="utf-8"))
        options.figure.write_text(figure.svg(document), encoding="utf-8")
        return
    partial = options.quick or options.tiny or options.block_sizes or options.requests
    options.block_sizes = options.block_sizes or ("16,128" if options.quick else ",".join(map(str, BLOCK_SIZES)))
    options.requests = options.requests or (8 if options.quick else 24)
    options.rounds = options.rounds or (1 if options.quick else 3)
    torch.manual_seed(0)
    if options.cpu_time:
        torch.set_num_threads(1)
    model, name = load(options.tiny)
    document = measure(options, model, name, int(model.config.vocab_size))
    output: Path | None = options.output or (None if partial else RESULTS / "serving.json")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(as_text(document), encoding="utf-8")
    print(f"{document['seconds']:.0f} s", file=sys.stderr)


def load(tiny: bool) -> tuple[Any, str]:
    """(model, what it is)."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if tiny:
        from pagegen.integrations.tiny_llama import tiny_llama

        return tiny_llama(), "a random Llama of 4 layers"
    from pagegen.integrations import smollm2

    try:
        return smollm2.load(torch.bfloat16)[0], "SmolLM2-135M-Instruct, bfloat16"
    except smollm2.WeightsMissing as error:
        sys.exit(f"{error}\nor take the small model: --tiny")


if __name__ == "__main__":
    main()
