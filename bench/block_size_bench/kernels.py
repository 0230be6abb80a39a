"""Attention's time in each block size on this CPU: beside gathering, beside contiguous tensors, and on real batches."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from cpu_bench import ours
from cpu_bench.bench import Bench, Row
from cpu_bench.samples import ENOUGH, Runner, here, interleave, kept, ratio
from cpu_peers import gather, sdpa
from cpu_peers.cell import Cell
from pagegen_autotune.inputs import Pool

from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, DispatchRule, Profile, Variant, Workload
from pagegen.targets import cpu
from pagegen.targets.cpu_device import current_device

ORDERS = ("NHD", "HND")
CONTIGUOUS = "in one piece"
GATHERED = (16, 256)  # block sizes that gathering is shown for: what it copies are the same bytes
BASE = 16  # block size that the others' times are held against
WALL, CPU_TIME = "wall", "CPU time"
Times = dict[int, dict[tuple[Variant, Workload], float]]


def cells(spec: AttentionSpec) -> tuple[Cell, ...]:
    """Decode batches of equal contexts: what SDPA takes without a mask."""
    heads = Cell(
        batch=8, context=4096, num_q_heads=spec.num_q_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
    )
    return heads, dataclasses.replace(heads, batch=32, context=512)


def decode(bench: Bench, spec: AttentionSpec, block_sizes: Iterable[int], orders: Iterable[str]) -> Iterator[Row]:
    """Rows of `Bench.compare`, a cell and order at a time: the paged kernel at every block size and with a context as
    one block; gather (into memory kept for it) and SDPA; SDPA on tensors that are contiguous already. `time_over` holds
    each against the paged kernel at BASE and in one piece, round by round."""
    for cell in cells(spec):
        for order in orders:
            runners = [_paged(bench, spec, cell, CacheLayout(block_size=size, order=order)) for size in block_sizes]
            runners.append(_paged(bench, spec, cell, CacheLayout(block_size=cell.context, order=order), CONTIGUOUS))
            if order == ORDERS[0]:  # others have an order of their own
                runners += [_gathered(cell, size) for size in GATHERED]
                runners.append(_peer("SDPA, contiguous", sdpa, cell))
            label = {"batch": cell.batch, "context": cell.context, "order": order}
            for row in bench.compare("kernel", label, runners, over=[f"paged {BASE}", f"paged {CONTIGUOUS}"]):
                yield {**row, "clock": WALL if row.get("undisturbed", 0) >= ENOUGH else CPU_TIME}
            bench.pool.shrink()


def over(row: Row, name: str) -> float:
    """How many times the time of `name` a row of `decode` took, by the clock that its rounds allow."""
    return float(row["time_over"][name]["median" if row["clock"] == WALL else "cpu"])


def _paged(bench: Bench, spec: AttentionSpec, cell: Cell, layout: CacheLayout, name: str = "") -> Runner:
    found = ours.batches(bench.pool, spec, layout, [cell.context] * cell.batch)
    return ours.kernel(found, name=f"paged {name or layout.block_size}")


def _gathered(cell: Cell, block_size: int) -> Runner:
    return _peer(f"gather {block_size} + SDPA", gather, dataclasses.replace(cell, block_size=block_size))


def _peer(name: str, module: Any, cell: Cell) -> Runner:
    """A peer of cpu_peers in this process: both are torch alone."""
    prepared = module.prepare(cell, cell.sets, None)
    return here(name, prepared.run, ours.work_of(cell))


def on_profile(
    bench: Bench, spec: AttentionSpec, profile: Profile, rules: dict[int, DispatchRule]
) -> tuple[Times, list[Row]]:
    """Microseconds of every batch of the profile at every block size (NHD), with the variant that the size's rule
    takes; and a row a batch. A size's time is BASE's median times the median of their ratios within rounds, since what
    the machine gives changes from round to round; by CPU time where others took too much of the machine."""
    pool = Pool(spec, profile, current_device(), on="cpu", seed=0)
    times: Times = {size: {} for size in rules}
    rows = []
    for workload, weight in profile:
        chosen = {
            size: rule.choose(workload.num_seqs, workload.max_query_len, workload.max_context_len)
            for size, rule in rules.items()
        }
        runners = {size: _batch(pool, spec, size, variant, workload) for size, variant in chosen.items()}
        taken = interleave(runners.values(), bench.read, bench.rounds, bench.threads)
        base = taken.of(runners[BASE].name)
        settled = all(sum(sample.undisturbed for sample in taken.of(r.name)) >= ENOUGH for r in runners.values())
        times_s = [s.seconds if settled else s.cpu_seconds / bench.threads for s in (kept(base) if settled else base)]
        middle_us = 1e6 * statistics.median(times_s)
        over = {}
        for size, runner in runners.items():
            found = {"median": 1.0, "cpu": 1.0} if size == BASE else ratio(taken, runner.name, runners[BASE].name)
            if found is None:
                raise RuntimeError(f"no sample of block size {size}: {runner.failure}")
            over[size] = found["median" if settled else "cpu"]
            times[size][chosen[size], workload] = middle_us * over[size]
        rows.append({
            "section": "batch",
            "cell": {"profile": profile.name, "num_seqs": workload.num_seqs, "tokens": workload.total_context,
                     "queries": workload.total_q, "weight": round(weight, 4)},
            "clock": WALL if settled else CPU_TIME,
            "us": round(middle_us, 1),
            "time_over": {str(size): round(found, 3) for size, found in over.items()},
        })  # fmt: skip
    return times, rows


def _batch(pool: Pool, spec: AttentionSpec, block_size: int, variant: Variant, workload: Workload) -> Runner:
    if not isinstance(variant, CppVariant):
        raise TypeError(f"variant must be one of a CPU kernel, got {variant.name}")
    layout = CacheLayout(block_size=block_size)
    attend = cpu.load_attention(spec, layout, variant)
    calls = pool.calls(layout, workload)
    return here(
        f"{block_size}", functools.partial(_call, attend, calls), workload.total_context * spec.kv_bytes_per_token
    )


def _call(attend: Any, calls: list[Any], i: int) -> None:
    attend(calls[i % len(calls)])
