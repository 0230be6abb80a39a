"""Is paging worth it, and which block size?

    python bench/block_size.py [--quick] [--rounds 5] [--sections memory,kernel,served,sharing] [--data FOLDER]
    python bench/block_size.py --figure bench/results/block-size.svg  # the figure from the stored results (matplotlib)

Attention of Llama-3.2-1B in bfloat16 on this CPU, and public traces. `memory` (computed, exact): what blocks and
reservations in one piece hold over the requests' lives, b*ceil(n/b) - n slots wasted, tables included. `sharing`
(computed, and the first requests replayed by the allocator): prefix hits, and what rounding to full blocks loses.
`kernel` (measured): every block size beside one block for a whole context, gathering before SDPA, and SDPA on
contiguous tensors, in turns, each sample between two of reading bandwidth. `batch` (measured): the batches of a
profile in turns over the block sizes; `profile` is what the database's block-size query makes of those times.
`served` (simulated on them): the server's tokens a second and, apart from them, what requests wait for; a step reads
the model's weights once and multiplies them by each prompt token, at the rates measured here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

import torch
from block_size_bench import kernels, memory, served, sharing
from cache_bench.document import as_text
from cpu_bench import machine
from cpu_bench.bench import Bench
from pagegen_autotune import load_profile
from pagegen_autotune.drawn import drawn_trace
from pagegen_autotune.profiles import prefix_size
from pagegen_autotune.trace import Trace, read_trace

from pagegen.spec import AttentionSpec
from pagegen.targets import cpu

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
DATA = Path(__file__).parents[2] / "shared" / "data"
MODEL, LAYERS = "llama-3.2-1b", 16
WEIGHTS_BYTES = 2 * 1_235_814_400  # parameters in bfloat16
PROFILE = "azure-conversation"
MEMORY_BYTES = 1 << 30  # of cache, all layers: 32,768 tokens
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)  # measured and simulated; 1 is a table entry a token
COMPUTED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
QUICK_SIZES = (1, 16, 256)
# A trace's file, and the shipped profile that requests are drawn from where there is none.
TRACES = {
    "azure2023_conv.csv": "azure-conversation",
    "azure2023_code.csv": "azure-code",
    "servegen_deepseek_r1.csv": "reasoning",
    "mooncake_conversation.csv": "mooncake-shared",
    "sharegpt_v3_part_multiturn.csv": "mooncake-shared",
}
SERVED = ("azure2023_conv.csv", "sharegpt_v3_part_multiturn.csv")  # one without prefixes, one that lives on them
DRAWN = 5000
SECTIONS = ("memory", "kernel", "served", "sharing")


@dataclass(frozen=True)
class Named:
    """A trace, and where it is from."""

    name: str
    trace: Trace


def named(data: Path, file: str, most: int | None) -> Named:
    """The trace of that file, or one drawn from its profile's figures; its first `most` requests."""
    if (data / file).exists():
        trace = read_trace(data / file, keep_prefixes=True)
        name = file.removesuffix(".csv")
    else:
        trace, name = drawn_trace(load_profile(TRACES[file]), DRAWN), f"drawn from {TRACES[file]}"
    if most is not None and len(trace) > most:
        trace = trace.take(torch.arange(most).numpy(), None if trace.arrival_s is None else trace.arrival_s[:most])
    return Named(name, trace)


def measured(options: argparse.Namespace, spec: AttentionSpec, traces: dict[str, Named]) -> Iterator[Row]:
    """`kernel`, and `batch` with what follows from it, `profile` and `served`."""
    sizes = QUICK_SIZES if options.quick else BLOCK_SIZES
    bench = Bench(options.rounds or (3 if options.quick else 7), torch.get_num_threads())
    if "kernel" in options.sections:
        yield from kernels.decode(bench, spec, sizes, kernels.ORDERS[: 1 if options.quick else 2])
    if "served" not in options.sections:
        return
    profile = load_profile(PROFILE)
    rules = served.rules(spec, sizes)
    times, batches = kernels.on_profile(bench, spec, profile, rules)
    yield from batches
    rated = served.rated(spec, profile, rules, times, layers=LAYERS)
    within = served.rated(spec, profile, rules, times, layers=LAYERS, memory_bytes=MEMORY_BYTES)
    for row, cut in zip(rated, within, strict=True):
        # the rule's own reason names the folder of the empty database
        known = {"admitted_sequences": cut.admitted_sequences, "reason": "what a fresh installation chooses"}
        yield {"section": "profile", "cell": {"profile": PROFILE}, **row.to_dict(), **known}
    rates = served.rates(bench)
    rest = served.rest_of(WEIGHTS_BYTES, rates)
    yield {"section": "rest", "cell": {"model": MODEL}, **rates, **vars(rest)}
    for one in {traces[file].name: traces[file] for file in SERVED}.values():
        yield from served.rows(
            spec, LAYERS, rated, profile, one.trace, one.name, rest, memory_bytes=MEMORY_BYTES,
            requests=200 if options.quick else 1000,
        )  # fmt: skip


def rows(options: argparse.Namespace) -> Iterator[Row]:
    spec = AttentionSpec.from_model(MODEL)
    most = 5000 if options.quick else None
    traces = {file: named(options.data, file, most) for file in TRACES}
    distinct = {one.name: one for one in traces.values()}.values()  # two may be drawn from one profile
    if "memory" in options.sections:
        for one in distinct:
            yield from memory.rows(one.trace, one.name, COMPUTED, spec, LAYERS, MEMORY_BYTES)
    if {"kernel", "served"} & set(options.sections):
        yield from measured(options, spec, traces)
    if "sharing" in options.sections:
        for one in distinct:
            id_tokens = prefix_size(one.trace)
            if id_tokens is not None:
                yield from sharing.rows(one.trace, one.name, id_tokens, COMPUTED)


def document(options: argparse.Namespace) -> dict[str, Any]:
    started, load = time.perf_counter(), os.getloadavg()[0]
    found = []
    for row in rows(options):
        print(line(row), flush=True)
        found.append(row)
    return {
        "question": (__doc__ or "").partition("\n")[0],
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "environment": {**machine.environment({}), "load_average_before": round(load, 2)},
        "model": MODEL,
        "memory_bytes": MEMORY_BYTES,
        "limits": {"max_num_seqs": served.MAX_NUM_SEQS, "max_batch_tokens": served.MAX_BATCH_TOKENS},
        "quick": options.quick,
        "seconds": round(time.perf_counter() - started, 1),
        "rows": found,
    }


def line(row: Row) -> str:
    """One row as text."""
    cell = row["cell"]
    head = f"{row['section']:8} {cell.get('trace', cell.get('profile', '')):28} "
    way = f"blocks of {cell['block_size']:4}" if "block_size" in cell else cell.get("reservation", "")
    if row["section"] == "memory":
        return f"{head}{way:22} {row['used_share']:6.1%} used, {row['sequences']:6.1f} sequences"
    if row["section"] == "sharing":
        return f"{head}{way:22} {row['hit_share']:6.1%} hits, {row['lost_share']:6.2%} of what is shared lost"
    if row["section"] == "kernel":
        what = f"{cell['batch']} x {cell['context']} {cell['order']} {row['what']}"
        return f"kernel   {what:40} {_said(row)}"
    if row["section"] == "batch":
        return f"{head}{cell['num_seqs']} sequences, {cell['tokens']} tokens: {row['us']} us, {row['time_over']}"
    if row["section"] == "profile":
        return f"{head}blocks of {row['block_size']:4} {row['step_us']:.0f} us a step, {row['kind']}"
    if row["section"] == "served":
        speed, waits = row["server"], row["requests"]
        return (
            f"{head}{way:22} {speed['output_tokens_per_s']:.1f} tokens/s, {speed['sequences']} sequences; first token "
            f"p50 {waits['ttft_p50_s']} s p99 {waits['ttft_p99_s']} s, between p50 {waits['itl_p50_s']} s "
            f"p99 {waits['itl_p99_s']} s"
        )
    return f"{head}{ {k: v for k, v in row.items() if k not in ('section', 'cell')} }"


def _said(row: Row) -> str:
    return f"{row['ms']} ms, {row['rate']} GB/s" if row["status"] == "ok" else str(row["status"])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="three block sizes, part of the traces: within two minutes")
    made.add_argument("--rounds", type=int, help="samples of what is timed (default: 7, quick: 3)")
    made.add_argument("--sections", default=",".join(SECTIONS), help="default: all")
    made.add_argument("--data", type=Path, default=DATA, help="the traces' folder; without it, drawn from profiles")
    made.add_argument("--output", type=Path, help="default: bench/results/block-size.json if all is measured")
    made.add_argument("--figure", type=Path, help="draw the stored results (--output), measure nothing")
    return made


def draw(stored: Path, figure: Path) -> None:
    """Draws a stored document; ends the program with a line where that cannot be."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("drawing needs matplotlib: pip install 'pagegen-attention[report]'")
    from block_size_bench.figure import svg

    try:
        figure.write_text(svg(json.loads(stored.read_text(encoding="utf-8"))), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"{stored} cannot be drawn: {error}")


def main() -> None:
    options = parser().parse_args()
    partial = options.quick or options.sections != ",".join(SECTIONS)
    stored = options.output or RESULTS / "block-size.json"
    if options.figure:
        draw(stored, options.figure)
        return
    options.sections = options.sections.split(",")
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        sys.exit(f"--sections must be of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if options.rounds is not None and options.rounds < 1:
        sys.exit(f"--rounds must be at least 1, got {options.rounds}")
    if cpu.compiler() is None:
        sys.exit("this bench needs a C++ compiler")
    torch.manual_seed(0)
    made = document(options)
    if options.output or not partial:
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(as_text(made), encoding="utf-8")
    print(f"{made['seconds']:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
