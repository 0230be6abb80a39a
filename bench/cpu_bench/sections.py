"""The questions that need peers: decode and prefill, cell by cell."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from cpu_peers.cell import Cell

from cpu_bench import ours
from cpu_bench.bench import Bench, Row
from cpu_bench.samples import Gauge, Runner
from pagegen.spec import CacheLayout

ORDERS = ("HND", "NHD")
WALKS = ["walk HND", "walk NHD", "walk NHD tokens"]
READ = "read"
DECODE = tuple(Cell(batch=b, context=c) for b in (1, 8, 32) for c in (512, 4096, 16384))
DECODE_QUICK = tuple(Cell(batch=b, context=c) for b, c in ((8, 4096), (1, 4096), (32, 512)))
OTHERS = (
    Cell(batch=8, context=4096, dtype="float32"),
    Cell(batch=8, context=4096, dtype="float16"),
    Cell(batch=8, context=4096, num_q_heads=8),
)
PREFILL = tuple(
    Cell(batch=1, context=context, new=new, dtype=dtype)
    for dtype in ("bfloat16", "float32")
    for context, new in ((2048, 2048), (2560, 512))
)


def decode(bench: Bench, cells: Iterable[Cell]) -> Iterable[Row]:
    """Both cache orders, the walks of the same blocks, reading as many bytes and every peer, against read bandwidth."""
    for cell in cells:
        yield from _compared(bench, "decode", cell, functools.partial(_decoders, bench, cell))
        bench.pool.shrink()


def _decoders(bench: Bench, cell: Cell) -> list[Runner]:
    found = [_batches(bench, cell, order) for order in ORDERS]
    return [*(runner for each in found for runner in ours.with_walks(each)), *ours.read_alike(bench.pool, found[0])]


def prefill(bench: Bench, cells: Iterable[Cell]) -> Iterable[Row]:
    """Both cache orders and every peer, against the peak of multiply-adds."""
    for cell in cells:
        kind = ours.peak_kind(cell.dtype)
        runners = functools.partial(_prefillers, bench, cell)
        for row in _compared(bench, "prefill", cell, runners, ours.peak_gauge(kind), "GFLOP/s"):
            yield {**row, "peak": kind}


def _prefillers(bench: Bench, cell: Cell) -> list[Runner]:
    return [ours.kernel(_batches(bench, cell, order), cell.new) for order in ORDERS]


def _batches(bench: Bench, cell: Cell, order: str) -> ours.Batches:
    layout = CacheLayout(block_size=cell.block_size, order=order)
    return ours.batches(bench.pool, ours.spec_of(cell), layout, [cell.context] * cell.batch)


def _compared(
    bench: Bench,
    section: str,
    cell: Cell,
    make: Callable[[], list[Runner]],
    gauge: Gauge | None = None,
    unit: str = "GB/s",
) -> Iterable[Row]:
    """Our runners beside the peers; where memory divides the peers into parts, ours are measured with each part and the
    first one's rows are kept."""
    over = [f"pagegen {order}" for order in ORDERS]
    over += [*WALKS, READ] if section == "decode" else []
    # the pool's memory is taken before it is seen how many peers have room beside it
    mine = make()
    for part, (ready, failed) in enumerate(bench.with_peers(cell)):
        rows = bench.compare(section, cell.to_dict(), [*mine, *ready, *failed], gauge, over=over, unit=unit)
        yield from rows if part == 0 else rows[len(mine) :]
