"""What does it take to make a profile of a million requests, and to simulate a trace whose prompts share prefixes?

    python bench/traces.py [--rows 1000000] [--requests N] [--data FOLDER]

Import: a made trace (CSV, CSV with block ids of conversations, JSONL with the same) through `pagegen profile import`, a
process each: seconds of the wall and of the CPU, and the most memory it had. Replay: a trace with block ids, simulated
over the real bookkeeping (`BlockAllocator`, 16 tokens a block) and over counts (`SharedCounts`): seconds of the CPU,
and whether every step, hit, preemption and moment is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from cache_bench.document import as_text
from cpu_bench import machine
from pagegen_autotune import simulation as simulating
from pagegen_autotune.shared_counts import SharedCounts
from pagegen_autotune.simulation import Server, Simulation
from pagegen_autotune.trace import Trace, read_trace

from pagegen.cache import BlockAllocator

RESULTS = Path(__file__).parent / "results"
DATA = Path(__file__).parents[2] / "shared" / "data"
TRACE, ID_TOKENS = "mooncake_conversation.csv", 512
HEADER = ("arrival_s", "prompt_tokens", "output_tokens", "prefix_hash_ids")


class RealBookkeeping(BlockAllocator):
    """The allocator in place of the counts; what is shared is not asked for here."""

    shared_blocks = 0


def made_trace(folder: Path, kind: str, rows: int, seed: int = 0) -> Path:
    """`rows` requests of 20 a second in 200,000 conversations, prompts and outputs lognormal."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.05, rows)).tolist()
    prompts = np.clip(rng.lognormal(6.5, 1.2, rows), 1, 60_000).astype(int).tolist()
    outputs = np.clip(rng.lognormal(5, 1, rows), 0, 4_000).astype(int).tolist()
    talks = (200 * rng.integers(0, 200_000, rows)).tolist()
    path = folder / ("trace.jsonl" if kind == "jsonl" else "trace.csv")
    with path.open("w", encoding="utf-8") as file:
        if kind != "jsonl":
            file.write(",".join(HEADER[: 3 + (kind == "csv with ids")]) + "\n")
        for arrival, prompt, output, talk in zip(arrivals, prompts, outputs, talks, strict=True):
            ids = f"{talk}-{talk - (-prompt // ID_TOKENS) - 1}"
            if kind == "jsonl":
                file.write(json.dumps(dict(zip(HEADER, (round(arrival, 6), prompt, output, ids), strict=True))) + "\n")
            else:
                more = f",{ids}" if kind == "csv with ids" else ""
                file.write(f"{arrival:.6f},{prompt},{output}{more}\n")
    return path


def imported(kind: str, rows: int) -> dict[str, Any]:
    """One import in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path, profile = made_trace(Path(folder), kind, rows), Path(folder) / "profile.json"
        command = ["profile", "import", str(path), "-o", str(profile), "--json"]
        code = (
            "import resource, sys\n"
            "from pagegen.cli.main import main\n"
            "main(sys.argv[1:], standalone_mode=False)\n"
            "used = resource.getrusage(resource.RUSAGE_SELF)\n"
            "print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)\n"
        )
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
        wall_s = time.perf_counter() - start
        cpu_s, peak_kib = done.stderr.split()[-2:]
        figures = json.loads(done.stdout)["figures"]
        return {
            "section": "import",
            "cell": {"file": kind, "rows": rows},
            "wall_s": round(wall_s, 1),
            "cpu_s": round(float(cpu_s), 1),
            "peak_mib": round(int(peak_kib) / 1024),
            "file_mib": round(path.stat().st_size / 2**20, 1),
            "simulated_requests": figures["simulation"]["requests"],
            "simulated_steps": figures["simulation"]["steps"],
            "prefix_reuse": figures["simulation"]["prefix_reuse"],
        }


def replayed(trace: Trace, cache: type, name: str) -> dict[str, Any]:
    """One simulation over a kind of bookkeeping, with a digest of all that came of it."""
    vars(simulating)["SharedCounts"] = cache
    seen, steps = hashlib.sha256(), 0
    try:
        start = time.process_time()
        simulation = Simulation(
            trace, Server(), prefix_block_tokens=ID_TOKENS,
            on_end=lambda end: seen.update(repr((end.request.id, end.hit_tokens, end.preemptions, end.times)).encode()),
        )  # fmt: skip
        for step in simulation.steps():
            steps += 1
            seen.update(repr((step.context_lens, step.query_lens, step.count)).encode())
        cpu_s = time.process_time() - start
    finally:
        vars(simulating)["SharedCounts"] = SharedCounts
    counters = simulation.scheduler.counters
    return {
        "section": "replay",
        "cell": {"trace": TRACE, "requests": len(trace), "bookkeeping": name},
        "cpu_s": round(cpu_s, 1),
        "steps": counters.steps,
        "hit_tokens": counters.hit_tokens,
        "preemptions": counters.preemptions,
        "digest": seen.hexdigest()[:16],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the made traces")
    parser.add_argument("--requests", type=int, help="of the trace that is replayed (default: all)")
    parser.add_argument("--data", type=Path, default=DATA, help="the traces' folder; without it nothing is replayed")
    parser.add_argument("--output", type=Path, help="default: bench/results/traces.json if all is measured")
    options = parser.parse_args()
    started, load = time.perf_counter(), os.getloadavg()[0]
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        rows.append(row)

    for kind in ("csv", "csv with ids", "jsonl"):
        tell(imported(kind, options.rows))
    if (options.data / TRACE).exists():
        whole = read_trace(options.data / TRACE, keep_prefixes=True)
        count = len(whole) if options.requests is None else min(options.requests, len(whole))
        assert whole.arrival_s is not None
        trace = whole.take(np.arange(count), whole.arrival_s[:count])
        for cache, name in ((SharedCounts, "counts"), (RealBookkeeping, "allocator")):
            tell(replayed(trace, cache, name))
        if rows[-1]["digest"] != rows[-2]["digest"]:
            sys.exit("counts and allocator do not take the same steps")
    document = {
        "question": "what a profile of a million requests takes, and the simulation of a trace with shared prefixes",
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "environment": {**machine.environment({}), "load_average_before": round(load, 2)},
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }
    default = RESULTS / "traces.json" if options.rows == 1_000_000 and options.requests is None else None
    output = options.output or default
    if output is not None:
        output.write_text(as_text(document), encoding="utf-8")


if __name__ == "__main__":
    main()
