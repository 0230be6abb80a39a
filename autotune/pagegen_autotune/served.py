"""Block size as the outer variable: what a whole server would do with each, and apart from it what requests wait for.

A block size decides more than the kernel's time: how many slots are wasted, in what grain prefixes are shared, and so
how many sequences the memory admits and how often one has to give way. All of that is simulated together, by the policy
that serves real models, over the same requests for each block size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pagegen import selection
from pagegen.db.block_size import OBJECTIVES, TIE, BlockSizeRow
from pagegen.serving import Latencies, RequestTimes, ServerFigures
from pagegen.spec import AttentionSpec, Device, Profile, Target, check
from pagegen_autotune.drawn import drawn_trace, id_tokens
from pagegen_autotune.load import WINDOWS, capacity_per_s, offered
from pagegen_autotune.simulation import Server, Simulation, Step
from pagegen_autotune.step_model import AttentionCost, fit
from pagegen_autotune.trace import Trace

if TYPE_CHECKING:
    from pagegen.db import Database

REQUESTS = 1_000
UTILISATION = 0.8
# what sampling and bookkeeping take a sequence, as `Server` has it
SEQ_S = 20e-6
# of bandwidth and of the dense matrix rate, as projections of large models reach them
MEMORY_EFFICIENCY, MATRIX_EFFICIENCY = 0.85, 0.5


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What a step takes beside attention: `base_s`, and for each prefill token and sequence. All 0: attention alone."""

    base_s: float = 0.0
    prefill_token_s: float = 0.0
    seq_s: float = 0.0

    @classmethod
    def of_weights(cls, weights_bytes: int, device: Device) -> Rest:
        """Of a model with so many bytes of 16-bit weights: all are read once a step, and multiplied by each token.
        Raises ValueError where the device's rates are not known."""
        check.integer("weights_bytes", weights_bytes)
        if not (device.bandwidth_gb_s > 0 and device.matrix_tflops > 0):
            raise ValueError(f"weights_bytes needs a device whose rates are known, got {device.name}")
        return cls(
            base_s=weights_bytes / (MEMORY_EFFICIENCY * device.bandwidth_gb_s * 1e9),
            # two bytes and two operations a weight and token
            prefill_token_s=weights_bytes / (MATRIX_EFFICIENCY * device.matrix_tflops * 1e12),
            seq_s=SEQ_S,
        )


@dataclass(frozen=True, kw_only=True)
class ServedBlockSize:
    """One block size under the same requests. Everything is simulated; `attention` says what the step times rest on.

    The server: `speed` is of a run in which all requests wait from the start, so of what it can do; `sequences` run in
    a step on average, `waste_share` of the slots they hold are unused, `hit_share` of the prompt tokens were in the
    prefix cache, and `attention_share` of the time went into attention. `metadata_bytes` are a sequence's tables.
    The requests: `latencies` are of a run at a rate that is the same for all block sizes, and so are `load_preemptions`
    and `load_figures`. `rejected` requests are larger than the memory in these blocks.
    """

    block_size: int
    order: str
    speed: ServerFigures
    sequences: float
    waste_share: float
    hit_share: float
    attention_share: float
    metadata_bytes: float
    latencies: Latencies
    load_figures: ServerFigures
    rejected: int
    attention: BlockSizeRow
    cost: AttentionCost

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields: the server's and the requests' apart."""
        return {
            "block_size": self.block_size,
            "order": self.order,
            "server": {
                **self.speed.to_dict(),
                "sequences": self.sequences,
                "waste_share": self.waste_share,
                "hit_share": self.hit_share,
                "attention_share": self.attention_share,
                "metadata_bytes": self.metadata_bytes,
            },
            "requests": {
                **self.latencies.to_dict(),
                "preemptions": self.load_figures.preemptions,
                "output_tokens_per_s": self.load_figures.output_tokens_per_s,
                "rejected": self.rejected,
            },
            "attention": {
                "kind": self.attention.kind,
                "measured_share": self.attention.measured_share,
                "device": self.attention.device,
                "variants": list(self.attention.variants),
                "base_us": self.cost.base_us,
                "context_us": self.cost.context_us,
                "pair_us": self.cost.pair_us,
                "fit_error": self.cost.mean_error,
            },
        }


def serve_block_sizes(
    spec: AttentionSpec,
    target: Target | str,
    profile: Profile,
    *,
    memory_bytes: int,
    trace: Trace | None = None,
    prefix_block_tokens: int | None = None,
    db: Database | str | None = None,
    num_layers: int = 1,
    rest: Rest | None = None,
    max_num_seqs: int = 256,
    max_batch_tokens: int = 2048,
    utilisation: float = UTILISATION,
    requests: int = REQUESTS,
    seed: int = 0,
    objective: str = "throughput",
    on_run: Callable[[int, int], object] | None = None,
    device: Device | str | None = None,
) -> list[ServedBlockSize]:
    """Block sizes of `selection.best_block_size`, simulated, best first by `objective`: "throughput" by the server's
    output tokens/s, "latency" by the p99 between tokens and then to the first token. Within TIE, less waste goes first.

    `requests` of `trace` are served, or requests drawn from the profile's figures (`drawn_trace`); with
    `prefix_block_tokens` (a drawn trace has its own), prompts share what the trace's ids say. `memory_bytes` are the
    cache's over `num_layers` layers, all taken to be like `spec`. A step takes `rest` (None: nothing) and the layers'
    attention, by a cost fitted to the times of the profile's workloads, measured or predicted. The rate of arrivals
    keeps the smallest block size busy to the share `utilisation`; requests without times come as a Poisson process.
    `on_run` is told how many block sizes are done, of how many.

    Raises ValueError for bad arguments, where no block size can hold any request, or nothing is known of the device.
    """
    _check(memory_bytes, num_layers, requests, objective, utilisation)
    if trace is None:
        trace = drawn_trace(profile, requests, seed)
        prefix_block_tokens = None if trace.prefix_runs is None else id_tokens(profile)
    rows = selection.best_block_size(spec, target, profile, db=db, num_layers=num_layers, device=device)
    return serve_rows(
        spec, [(row, fit(profile, row.workload_us)) for row in rows], memory_bytes=memory_bytes, trace=trace,
        prefix_block_tokens=prefix_block_tokens, num_layers=num_layers, rest=rest, max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens, utilisation=utilisation, requests=requests, seed=seed, objective=objective,
        on_run=on_run,
    )  # fmt: skip


def serve_rows(
    spec: AttentionSpec,
    rows: Sequence[tuple[BlockSizeRow, AttentionCost]],
    *,
    memory_bytes: int,
    trace: Trace,
    prefix_block_tokens: int | None = None,
    num_layers: int = 1,
    rest: Rest | None = None,
    max_num_seqs: int = 256,
    max_batch_tokens: int = 2048,
    utilisation: float = UTILISATION,
    requests: int = REQUESTS,
    seed: int = 0,
    objective: str = "throughput",
    on_run: Callable[[int, int], object] | None = None,
) -> list[ServedBlockSize]:
    """`serve_block_sizes` for block sizes whose rows and costs are at hand, wherever their times are from."""
    _check(memory_bytes, num_layers, requests, objective, utilisation)
    if not rows:
        raise ValueError("rows must hold at least one block size, got none")
    token_bytes = spec.kv_bytes_per_token * num_layers

    def server(row: BlockSizeRow, cost: AttentionCost) -> Server | None:
        blocks = min(memory_bytes // (row.block_size * token_bytes), 2**31 - 1)  # ids are int32
        if not blocks:
            return None
        return _server(rest or Rest(), cost, row.block_size, blocks, num_layers, max_num_seqs, max_batch_tokens)

    able = [(row, cost, made) for row, cost in rows if (made := server(row, cost)) is not None]
    if not able:
        smallest = min(row.block_size for row, _ in rows) * token_bytes
        raise ValueError(f"memory_bytes must hold at least one block of all layers ({smallest}), got {memory_bytes}")
    _, _, reference = min(able, key=lambda one: one[0].block_size)
    load = _load(trace, reference, prefix_block_tokens, utilisation=utilisation, requests=requests, seed=seed)
    served = []
    for i, (row, cost, made) in enumerate(able):
        one = _serve(row, cost, made, load, prefix_block_tokens, num_layers)
        served += [] if one is None else [one]
        if on_run is not None:
            on_run(i + 1, len(able))
    if not served:
        raise ValueError(f"memory_bytes must hold at least one request of the trace, got {memory_bytes}")
    return ranked(served, objective)


def ranked(served: Iterable[ServedBlockSize], objective: str) -> list[ServedBlockSize]:
    """Best first; see `serve_block_sizes`. What rejects fewer requests goes before anything else."""
    check.one_of("objective", objective, OBJECTIVES)

    def aims(one: ServedBlockSize) -> tuple[float, ...]:
        if objective == "throughput":
            return (-one.speed.output_tokens_per_s,)
        gaps, first = one.latencies.inter_token_s, one.latencies.time_to_first_token_s
        return (math.inf if gaps is None else gaps.p99, math.inf if first is None else first.p99)

    served = list(served)
    best = {n: min(aims(one)[0] for one in served if one.rejected == n) for n in {one.rejected for one in served}}

    def order(one: ServedBlockSize) -> tuple[float, ...]:
        first = best[one.rejected]
        tied = aims(one)[0] <= first + TIE * abs(first)
        return (one.rejected, not tied, one.waste_share if tied else 0.0, *aims(one), one.block_size)

    return sorted(served, key=order)


def _check(memory_bytes: int, num_layers: int, requests: int, objective: str, utilisation: float) -> None:
    check.integer("memory_bytes", memory_bytes)
    check.integer("num_layers", num_layers)
    check.integer("requests", requests, at_least=10 * WINDOWS)
    check.one_of("objective", objective, OBJECTIVES)
    if not 0 < utilisation <= 2:
        raise ValueError(f"utilisation must be above 0 and at most 2 (above 1 queues only grow), got {utilisation}")


def _load(
    trace: Trace, server: Server, prefix_block_tokens: int | None, *, utilisation: float, requests: int, seed: int
) -> Trace:
    """The requests to serve, arriving at the rate that keeps `server` busy to the share `utilisation`."""
    load = offered(
        trace, server, utilisation=utilisation, rate_scale=None, seed=seed, most=requests,
        prefix_block_tokens=prefix_block_tokens,
    ).trace  # fmt: skip
    if load.arrival_s is not None:
        return load
    rng = np.random.default_rng(seed)
    rate = utilisation * capacity_per_s(load, server, rng, prefix_block_tokens)
    gaps = rng.exponential(1.0 / rate, len(load))
    return load.take(np.arange(len(load)), np.cumsum(gaps) - gaps[0])


def _server(
    rest: Rest, cost: AttentionCost, block_tokens: int, blocks: int, layers: int, max_num_seqs: int, batch_tokens: int
) -> Server:
    us = layers * 1e-6
    return Server(
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max(batch_tokens, max_num_seqs),
        kv_tokens=blocks * block_tokens,
        block_tokens=block_tokens,
        # a step that takes no time at all would let the clock stand
        base_s=max(rest.base_s + us * cost.base_us, 1e-9),
        prefill_token_s=rest.prefill_token_s,
        context_token_s=us * cost.context_us,
        seq_s=rest.seq_s,
        prefill_pair_s=us * cost.pair_us,
    )


def _serve(
    row: BlockSizeRow, cost: AttentionCost, server: Server, load: Trace, prefix_block_tokens: int | None, layers: int
) -> ServedBlockSize | None:
    """Both runs of one block size; None where the memory holds no request."""
    speed = _Run(load.take(np.arange(len(load)), None), server, prefix_block_tokens)
    if speed.figures is None:
        return None
    under_load = _Run(load, server, prefix_block_tokens)
    assert under_load.figures is not None  # the same requests
    attention_us = sum(count * cost_us for count, cost_us in speed.attention(cost))
    return ServedBlockSize(
        block_size=row.block_size,
        order=row.order,
        speed=speed.figures,
        sequences=speed.rows / speed.figures.steps,
        waste_share=speed.wasted / speed.slots,
        hit_share=speed.figures.hit_tokens / max(1, speed.figures.prompt_tokens),
        attention_share=min(1.0, layers * attention_us * 1e-6 / speed.figures.span_s),
        metadata_bytes=row.metadata_bytes,
        latencies=Latencies.of(under_load.times),
        load_figures=under_load.figures,
        rejected=under_load.rejected,
        attention=row,
        cost=cost,
    )


class _Run:
    """One simulation to its end, with what is summed over its steps. `figures` is None where nothing was served."""

    def __init__(self, trace: Trace, server: Server, prefix_block_tokens: int | None) -> None:
        self.times: list[RequestTimes] = []
        self.rows = self.slots = self.wasted = 0
        self._steps = self._context = self._pairs = 0
        simulation = Simulation(
            trace, server, prefix_block_tokens=prefix_block_tokens, on_end=lambda ended: self.times.append(ended.times)
        )
        for step in simulation.steps():
            self._add(step, server.block_tokens)
        self.rejected = len(simulation.rejected)
        self.figures = simulation.scheduler.figures(simulation.now_s) if self._steps else None

    def attention(self, cost: AttentionCost) -> Sequence[tuple[float, float]]:
        """How often each part of the cost was due, and its price in microseconds."""
        return (self._steps, cost.base_us), (self._context, cost.context_us), (self._pairs, cost.pair_us)

    def _add(self, step: Step, block_tokens: int) -> None:
        count, rows = step.count, len(step.context_lens)
        context = sum(step.context_lens)
        slots = sum(-(-n // block_tokens) for n in step.context_lens) * block_tokens
        self._steps += count
        self.rows += count * rows
        self._context += count * context + rows * (count * (count - 1) // 2)
        # of a run of steps the first stands for all: a block more or less a sequence in the run
        self.slots += count * slots
        self.wasted += count * (slots - context)
        if step.query_lens and max(step.query_lens) > 1:
            self._pairs += sum(q * c for q, c in zip(step.query_lens, step.context_lens, strict=True) if q > 1)
