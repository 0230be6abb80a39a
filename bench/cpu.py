"""How near are the CPU kernels to the limits of this machine, and how far ahead of what else one can run on it?

    python bench/cpu.py [--quick] [--peers vllm,openvino] [--rounds 9] [--output bench/results/cpu.json]
    python bench/cpu.py --install .venv-bench          # the peers' packages, once (make bench-peers)
    python bench/cpu.py --figure bench/results/cpu.svg # the README's figure from the stored results

Every run takes turns with the others, each between two samples of what the machine gives just then (READ: reading
memory front to back; PEAK: multiply-adds in registers); the walk is loads alone over the same blocks. Block tables
rotate over a pool of 512 MiB or more of shuffled blocks in huge pages, so that nothing is found in a cache. Peers live
in processes of their own, are checked against float64 first, and run at their defaults on the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded: idle peers' threads must not spin

import torch
from cpu_bench import compiling, figure, machine, operations, own, report, sections
from cpu_bench.bench import Bench, Row
from cpu_peers.client import INSTALLED
from cpu_peers.install import install

from pagegen.targets import cpu

PEERS = ("sdpa", "gather", "flex", "vllm", "openvino", "onnxruntime", "ggml")
RESULTS = Path(__file__).parent / "results"
QUICK_SECONDS = 80.0  # no section begins after it
Section = Callable[[Bench], Iterable[Row]]
FULL: dict[str, Section] = {
    "decode": lambda bench: sections.decode(bench, sections.DECODE + sections.OTHERS),
    "prefill": lambda bench: sections.prefill(bench, sections.PREFILL),
    "formats": own.formats,
    "one_thread": own.one_thread,
    "head_dims": own.head_dims,
    "groups": own.groups,
    "block_sizes": own.block_sizes,
    "ragged": own.ragged,
    "operations": operations.operations,
    "overhead": operations.overhead,
    "compile": compiling.compiling,
}
QUICK: dict[str, Section] = {
    "decode": lambda bench: sections.decode(bench, sections.DECODE_QUICK[:1]),
    "prefill": lambda bench: sections.prefill(bench, sections.PREFILL[:1]),
    "overhead": operations.overhead,
    "one_thread": own.one_thread,
    "formats": lambda bench: own.formats(bench, ("HND",)),
    "ragged": own.ragged,
    "operations": operations.operations,
    "decode 2": lambda bench: sections.decode(bench, sections.DECODE_QUICK[1:2]),
    "decode 3": lambda bench: sections.decode(bench, sections.DECODE_QUICK[2:]),
}


def measure(options: argparse.Namespace, peers: list[str]) -> dict[str, Any]:
    """Runs the chosen sections beside the chosen peers, printing each row, and returns the document."""
    started, load = time.perf_counter(), os.getloadavg()[0]
    chosen = QUICK if options.quick else FULL
    if options.sections:
        chosen = {name: chosen[name] for name in options.sections.split(",")}
    bench = Bench(options.rounds or (3 if options.quick else 9), options.threads)
    rows: list[Row] = []
    left_out: list[str] = []
    try:
        bench.start_peers(peers, options.installed)
        for name, version in bench.versions.items():
            print(f"{name:12} {version}", flush=True)
        for name, section in chosen.items():
            if options.quick and time.perf_counter() - started > QUICK_SECONDS:
                left_out.append(name)
                continue
            for row in section(bench):
                print(report.line(row), flush=True)
                rows.append(row)
        environment = {**machine.environment(bench.versions), "load_average_before": round(load, 2)}
    finally:
        bench.close()
    return {
        "question": "the CPU kernels against this machine's limits and against other implementations",
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "environment": environment,
        "rounds": bench.rounds,
        "quick": options.quick,
        "left_out_for_time": left_out,
        "one_thread_read_gb_s": round(bench.read.one_thread, 1),
        "seconds": round(time.perf_counter() - started, 1),
        "summary": report.summary(rows),
        "rows": rows,
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    made.add_argument("--quick", action="store_true", help="three decode cells, one prefill and more, in two minutes")
    made.add_argument("--peers", default=",".join(PEERS), help="names with commas between, or none (default: all)")
    made.add_argument("--rounds", type=int, help="samples of every run (default: 9, quick: 3)")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: those of torch")
    made.add_argument("--sections", default="", help=f"of {', '.join(FULL)} (default: all)")
    made.add_argument("--output", type=Path, help="default: bench/results/cpu.json if all is measured")
    made.add_argument("--figure", type=Path, help="draw and sum up the stored results (--output), measure nothing")
    made.add_argument("--install", type=Path, nargs="?", const=INSTALLED, help="install the peers and measure nothing")
    made.add_argument("--installed", type=Path, default=INSTALLED, help="where they were installed (.venv-bench)")
    return made


def _names(option: str, given: str, known: Iterable[str]) -> list[str]:
    """The names between the commas; ends the program over one that is not known."""
    names = [name for name in given.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"{option} must be of {', '.join(known)}, got {', '.join(unknown)}")
    return names


def main() -> None:
    options = parser().parse_args()
    chosen = _names("--peers", options.peers, PEERS) if options.peers != "none" else []
    _names("--sections", options.sections, QUICK if options.quick else FULL)
    partial = options.quick or options.sections or set(chosen) != set(PEERS)
    output: Path | None = options.output or (None if partial else RESULTS / "cpu.json")
    if options.install:
        for name, outcome in install(options.install, chosen).items():
            print(f"{name:12} {outcome}", flush=True)
        return
    if options.figure:
        document = json.loads((options.output or RESULTS / "cpu.json").read_text(encoding="utf-8"))
        options.figure.write_text(figure.svg(document), encoding="utf-8")
        print(*report.lines(document["summary"]), sep="\n")
        return
    if cpu.compiler() is None:
        sys.exit("this bench needs a C++ compiler")
    torch.manual_seed(0)
    document = measure(options, chosen)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(as_text(document), encoding="utf-8")
    print(*report.lines(document["summary"]), sep="\n")
    print(f"{document['seconds']:.0f} s", file=sys.stderr)


def as_text(document: dict[str, Any]) -> str:
    """JSON with one row a line, so that two runs can be compared line by line."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in document["rows"])
    head = json.dumps({**document, "rows": []}, indent=1)
    return head[: head.rindex("[]")] + f"[\n{rows}\n ]\n}}\n"


if __name__ == "__main__":
    main()
