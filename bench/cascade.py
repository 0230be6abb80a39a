"""Is a shared prefix attended faster once than by every sequence for itself?

    python bench/cascade.py [--quick] [--rounds 9] [--output bench/results/cascade.json]

Decode on this CPU, bf16, 32 query and 8 KV heads, head dim 128, block size 16: batches whose sequences share a prefix
and have 128 tokens of their own. Flat and cascade attention take turns within a round, and the speed-up is taken
round by round, since a shared machine's speed changes from second to second. A sample is undisturbed when this process
had its threads' whole share of the CPU meanwhile; the file says how many rounds were, and the ratio of CPU time, which
other processes disturb less. Batches rotate over a pool of shuffled blocks of 256 MiB or more, so that nothing is found
in a cache that the step itself did not put there. The division is planned once a batch, as a model does for all its
layers, and timed apart.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

import torch
from cache_bench.document import as_text
from cache_bench.samples import spread
from cpu_bench import machine

import pagegen
from pagegen.spec import AttentionSpec, CacheLayout, Target, Workload

OWN, BLOCK_SIZE = 128, 16
CASES = ((16, 4096), (16, 16384), (4, 16384), (4, 4096), (16, 512), (4, 512))  # sequences, shared tokens
SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, q_dtype=torch.bfloat16)
POOL_BYTES = 256 << 20
RESULTS = Path(__file__).parent / "results"


def batches(num_seqs: int, shared: int) -> list[dict[str, Any]]:
    """The operands of as many batches as fill the pool, each in blocks of its own."""
    shared_blocks, own_blocks = shared // BLOCK_SIZE, OWN // BLOCK_SIZE
    blocks = shared_blocks + num_seqs * own_blocks
    sets = max(2, -(-POOL_BYTES // (blocks * BLOCK_SIZE * SPEC.kv_bytes_per_token)))
    shape = (sets * blocks, BLOCK_SIZE, SPEC.num_kv_heads, SPEC.head_dim)
    k_cache, v_cache = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(num_seqs, SPEC.num_q_heads, SPEC.head_dim, dtype=torch.bfloat16)
    lens = torch.full((num_seqs,), shared + OWN, dtype=torch.int32)
    found = []
    for ids in torch.randperm(sets * blocks, dtype=torch.int32).view(sets, blocks):
        prefix = ids[:shared_blocks].expand(num_seqs, -1)
        table = torch.cat([prefix, ids[shared_blocks:].view(num_seqs, own_blocks)], dim=1)
        found.append({"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": table, "seq_lens": lens})
    return found


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """(milliseconds, milliseconds of this process's CPU time)."""
    start, cpu_start = time.perf_counter(), time.process_time()
    run()
    return (time.perf_counter() - start) * 1e3, (time.process_time() - cpu_start) * 1e3


def measure(num_seqs: int, shared: int, rounds: int) -> dict[str, Any]:
    groups = ((shared // BLOCK_SIZE, tuple(range(num_seqs))),)
    operands = batches(num_seqs, shared)

    def plan(given: dict[str, Any]) -> Any:
        return pagegen.plan_cascade(groups, given["block_table"], given["seq_lens"], block_size=BLOCK_SIZE)

    plans = [plan(given) for given in operands]
    taken: dict[str, list[float]] = {"flat": [], "cascade": [], "plan": []}
    ratios: dict[bool, list[float]] = {True: [], False: []}  # by whether the round was undisturbed
    cpu_ratios: list[float] = []
    for i in range(rounds + 1):
        j, k = 2 * i % len(operands), (2 * i + 1) % len(operands)
        flat = timed(partial(pagegen.paged_attention, **operands[j]))
        divided = timed(partial(pagegen.cascade_attention, **operands[k], cascade=plans[k]))
        planning = timed(partial(plan, operands[k]))
        if not i:  # a first round is thrown away
            continue
        for name, (ms, _) in (("flat", flat), ("cascade", divided), ("plan", planning)):
            taken[name].append(ms)
        # merging runs on one thread, so that no cascade can have the whole share
        undisturbed = all(cpu >= 0.9 * torch.get_num_threads() * ms for ms, cpu in (flat, divided))
        ratios[undisturbed].append(flat[0] / divided[0])
        cpu_ratios.append(flat[1] / divided[1])
    kept = ratios[True] if len(ratios[True]) >= 3 else ratios[True] + ratios[False]
    return {
        "section": "cascade",
        "cell": {"num_seqs": num_seqs, "shared_tokens": shared, "own_tokens": OWN},
        **{f"{name}_ms": spread(samples, 3) for name, samples in taken.items()},
        "speedup": spread(kept, 3),
        "undisturbed": len(ratios[True]),
        "cpu_speedup": spread(cpu_ratios, 3),
        "predicted_speedup": round(predicted(num_seqs, shared, groups), 2),
    }


def predicted(num_seqs: int, shared: int, groups: Any) -> float:
    """What the step graph expects of the same case."""
    from pagegen import lowering, selection

    target, layout = Target("cpu"), CacheLayout(block_size=BLOCK_SIZE)
    workload = Workload(context_lens=(shared + OWN,) * num_seqs)
    variant = selection.select(SPEC, layout, target, workload).variant
    graph = lowering.step_graph(
        SPEC, layout, variant, selection.device_for(target), workload, prefix_groups=groups
    )  # fmt: skip
    us = {path.name: path.us for path in lowering.paths(graph, "written")}
    return us["attend"] / us["attend prefix + attend own + merge"]


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    cell, speedup = row["cell"], row["speedup"]
    return (
        f"{cell['num_seqs']:3} sequences sharing {cell['shared_tokens']:5} tokens: flat {row['flat_ms']['median']} ms, "
        f"cascade {row['cascade_ms']['median']} ms (planned in {row['plan_ms']['median']} ms): {speedup['median']} x "
        f"{speedup['range']}, by CPU time {row['cpu_speedup']['median']} x, predicted {row['predicted_speedup']} x "
        f"({row['undisturbed']} rounds undisturbed)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three rounds; writes nothing by default")
    parser.add_argument("--rounds", type=int, help="default: 9, quick: 3")
    parser.add_argument("--output", type=Path, help="default: bench/results/cascade.json, where not --quick")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        sys.exit(f"--rounds must be at least 1, got {options.rounds}")
    rounds = options.rounds or (3 if options.quick else 9)
    torch.manual_seed(0)
    started, load = time.perf_counter(), os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PAGEGEN_DB"] = str(Path(folder) / "empty.db")  # the kernels that a fresh installation chooses
        for num_seqs, shared in CASES:
            rows.append(measure(num_seqs, shared, rounds))
            print(line(rows[-1]), flush=True)
    document = {
        "question": (__doc__ or "").partition("\n")[0],
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "environment": {**machine.environment({}), "load_average_before": round(load, 2)},
        "workload": {"block_size": BLOCK_SIZE, "spec": SPEC.to_dict()},
        "rounds": rounds,
        "quick": options.quick,
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }
    output = options.output or (None if options.quick else RESULTS / "cascade.json")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(as_text(document), encoding="utf-8")
    print(f"{document['seconds']:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
