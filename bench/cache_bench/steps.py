"""The two calls that a server waits for: a decode step's bookkeeping, and the add of a long prompt that is cached."""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from cache_bench.samples import interleaved, percentile, spread
from cache_bench.traces import VOCABULARY
from pagegen.cache import BatchBuffers, BlockAllocator, PagedKVCache
from pagegen.spec import CacheLayout

Row = dict[str, Any]
STEPS = 64  # of a round
STEP_TARGET_US = 100.0
ADD_TARGET_MS = 2.0
PROMPT = 32_768
ADDS = 10  # of a round


@dataclass(frozen=True)
class Cell:
    """A decode step of `num_seqs` sequences of `context` tokens on average (half to one and a half times as many), the
    first `shared` of them the same in each of 16 groups; `reused`: the tensors are those of the step before, rewritten
    in place, else new ones."""

    num_seqs: int
    context: int
    block_size: int
    shared: int = 0
    reused: bool = True


CELLS = (
    Cell(256, 1000, 16),
    Cell(256, 1000, 64),
    Cell(256, 4000, 16),
    Cell(256, 4000, 64),
    Cell(256, 1000, 16, shared=480),
    Cell(256, 1000, 16, reused=False),
)
QUICK_CELLS = CELLS[:2]


def decode_steps(cells: tuple[Cell, ...], rounds: int) -> Iterator[Row]:
    """One row a cell, in microseconds: `step_us` of append_each and batch, the median of each round; over all steps the
    medians of both apart and of CPU time, which others' turns on the CPU do not lengthen, and the 99th percentile."""
    taken = interleaved({cell: _stepper(cell) for cell in cells}, rounds)
    for cell, found in taken.items():
        steps = [step for one_round in found for step in one_round]
        yield {
            "section": "decode_step",
            "cell": asdict(cell),
            "step_us": spread([statistics.median(step.whole for step in one_round) for one_round in found], 1),
            "append_us": round(statistics.median(step.append for step in steps), 1),
            "batch_us": round(statistics.median(step.batch for step in steps), 1),
            "cpu_us": round(statistics.median(step.cpu for step in steps), 1),
            "p99_us": round(percentile((step.whole for step in steps), 99), 1),
            "steps": len(steps),
            "target_us": STEP_TARGET_US,
        }


class Step(NamedTuple):
    """One step's microseconds: of append_each, of batch, and of this thread's CPU time in both."""

    append: float
    batch: float
    cpu: float

    @property
    def whole(self) -> float:
        return self.append + self.batch


def _stepper(cell: Cell) -> Callable[[], list[Step]]:
    """A round: every step's times. The sequences are cut back to their first length behind it."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(cell.context // 2, cell.context * 3 // 2, cell.num_seqs).tolist()
    blocks = sum(-(-(length + STEPS) // cell.block_size) for length in lengths)
    cache = PagedKVCache(1, blocks, CacheLayout(block_size=cell.block_size), 1, 8)
    starts = [draw.integers(0, VOCABULARY, cell.shared, dtype=np.uint32) for _ in range(16)]
    ids = [f"request-{i}" for i in range(cell.num_seqs)]
    for i, (name, length) in enumerate(zip(ids, lengths, strict=True)):
        own = draw.integers(0, VOCABULARY, max(1, length - cell.shared), dtype=np.uint32)
        cache.add(name, np.concatenate([starts[i % 16], own]))
        cache.batch([name])
    held = [cache.length(name) for name in ids]
    most = -(-(max(held) + STEPS) // cell.block_size)
    buffers = BatchBuffers(cell.num_seqs, cell.num_seqs, most) if cell.reused else None
    tokens = draw.integers(0, VOCABULARY, (STEPS, cell.num_seqs)).tolist()

    def run() -> list[Step]:
        clock, cpu_clock = time.perf_counter, time.thread_time
        taken = []
        gc.collect()
        gc.freeze()  # as engines do once they have started: what exists before is not looked through again
        for step in tokens:
            cpu_start, start = cpu_clock(), clock()
            cache.append_each(ids, step)
            middle = clock()
            cache.batch(ids, buffers=buffers)
            end, cpu_end = clock(), cpu_clock()
            taken.append(Step((middle - start) * 1e6, (end - middle) * 1e6, (cpu_end - cpu_start) * 1e6))
        for name, length in zip(ids, held, strict=True):
            cache.truncate(name, length)
        return taken

    return run


def long_adds(block_sizes: tuple[int, ...], rounds: int) -> Iterator[Row]:
    """One row a block size and kind of argument: milliseconds of an add of 32,768 tokens that all are cached."""
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, PROMPT).tolist()
    given: dict[str, Any] = {"list": prompt, "array": array("I", prompt)}
    runs = {(size, kind): _adder(size, tokens) for size in block_sizes for kind, tokens in given.items()}
    for (size, kind), found in interleaved(runs, rounds).items():
        yield {
            "section": "add",
            "cell": {"tokens": PROMPT, "block_size": size, "given_as": kind},
            "cached_tokens": found[0][1],
            "ms": spread([ms for ms, _ in found]),
            "target_ms": ADD_TARGET_MS,
        }


def _adder(block_size: int, tokens: Any) -> Callable[[], tuple[float, int]]:
    """A round: the median milliseconds of some adds, each freed again, and the tokens that the last found."""
    allocator = BlockAllocator(PROMPT // block_size + 64, block_size)
    allocator.add("first", tokens)
    allocator.mark_computed("first", PROMPT)
    allocator.free("first")

    def run() -> tuple[float, int]:
        taken, cached = [], 0
        for _ in range(ADDS):
            start = time.perf_counter()
            cached = allocator.add("again", tokens)
            taken.append((time.perf_counter() - start) * 1e3)
            allocator.free("again")
        return statistics.median(taken), cached

    return run
