"""The operator inside a step: captured in a CUDA graph and replayed on other lengths, compiled as one graph, and what a
call costs the host."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import pagegen
from gpu_check_bench import models, operands
from gpu_check_bench.context import Context
from gpu_check_bench.operands import TOLERANCE, Cell
from gpu_check_bench.timing import Call
from gpu_check_bench.worker import Cases, Row
from pagegen.reference import reference_attention
from pagegen.spec import AttentionSpec

TOKENS, BLOCK = 200, 16
BATCH = 8
HOST_TURNS, HOST_CALLS = 60, 10
HOST_BATCH = 32


def add_cases(context: Context, cases: Cases) -> None:
    cases.add("CUDA graph: capture and replay", functools.partial(replayed, context))
    cases.add("host cost of a call", functools.partial(host_cost, context))
    cases.add("torch.compile, fullgraph", functools.partial(compiled, context, "inductor"))
    if context.on == "cuda":
        cases.add("torch.compile, fullgraph, CUDA graphs", functools.partial(compiled, context, "reduce-overhead"))


@dataclass
class Step:
    """A decode step of one layer: rotate, write, attend. All lengths are below TOKENS."""

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lens: Tensor
    slots: Tensor

    def set_lengths(self, lens: Tensor) -> None:
        """Where every sequence stands; the last token of each is this step's."""
        self.lens.copy_(lens)
        last = lens.long() - 1
        blocks = self.table.gather(1, (last // BLOCK)[:, None])[:, 0]
        self.slots.copy_(blocks.long() * BLOCK + last % BLOCK)

    def run(self, function: Callable[..., Tensor] | None = None) -> Tensor:
        """The step by `layer`, or by what was made of it."""
        return (function or layer)(
            self.q, self.k, self.v, self.lens, self.cos, self.sin, self.k_cache, self.v_cache, self.table, self.slots
        )

    def expected(self) -> Tensor:
        """The result by the reference, over the caches as they are now."""
        rotated = pagegen.rope_write_kv(
            self.q, self.k, self.v, self.lens.long() - 1, self.cos, self.sin, self.k_cache.clone(),
            self.v_cache.clone(), self.slots,
        )  # fmt: skip
        result = reference_attention(rotated.float(), self.k_cache, self.v_cache, self.table, self.lens)
        assert isinstance(result, Tensor)
        return result


def layer(
    q: Tensor, k: Tensor, v: Tensor, lens: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    table: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """What is captured and compiled."""
    rotated = pagegen.rope_write_kv(q, k, v, lens.long() - 1, cos, sin, k_cache, v_cache, slots)
    result = pagegen.paged_attention(rotated, k_cache, v_cache, table, lens, max_seq_len=TOKENS)
    assert isinstance(result, Tensor)
    return result


def make_step(context: Context) -> Step:
    spec = next(iter(models.specs(context.dry_run).values()))
    generator = torch.Generator().manual_seed(0)
    blocks = -(-TOKENS // BLOCK)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(context.on, spec.q_dtype)

    angles = torch.outer(torch.arange(float(TOKENS)), 0.9 ** torch.arange(spec.head_dim / 2))
    pool = (BATCH * blocks, BLOCK, spec.num_kv_heads, spec.head_dim)
    table = torch.randperm(BATCH * blocks, generator=generator).to(torch.int32).view(BATCH, blocks)
    return Step(
        spec=spec,
        q=normal(BATCH, spec.num_q_heads, spec.head_dim),
        k=normal(BATCH, spec.num_kv_heads, spec.head_dim),
        v=normal(BATCH, spec.num_kv_heads, spec.head_dim),
        cos=angles.cos().to(context.on),
        sin=angles.sin().to(context.on),
        k_cache=normal(*pool),
        v_cache=normal(*pool),
        table=table.to(context.on),
        lens=torch.zeros(BATCH, dtype=torch.int32, device=context.on),
        slots=torch.zeros(BATCH, dtype=torch.int64, device=context.on),
    )


def lengths(step: Step, first: int) -> Tensor:
    """Lengths that differ, within TOKENS."""
    return (torch.arange(BATCH, dtype=torch.int32) * 23 % (TOKENS - first) + first).to(step.lens.device)


def replayed(context: Context) -> Row:
    """Captured once, replayed on three sets of lengths, each against the reference. On a CPU the step itself runs."""
    step = make_step(context)
    step.set_lengths(lengths(step, 1))
    replay, result = captured(context, step.run)
    worst = 0.0
    for first in (1, 17, 40):
        step.set_lengths(lengths(step, first))
        replay()
        worst = max(worst, _error(result(), step.expected()))
    return _judged({"replays": 3, "captured": context.on == "cuda"}, worst)


def captured(context: Context, run: Callable[[], Tensor]) -> tuple[Call, Callable[[], Tensor]]:
    """(what runs it again, what gives its result)."""
    kept = [run()]  # compiles
    if context.on == "cpu":

        def again() -> None:
            kept[0] = run()

        return again, lambda: kept[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept[0] = run()
    return graph.replay, lambda: kept[0]


def compiled(context: Context, how: str) -> Row:
    """The layer as one graph: the same numbers as eager, and no break."""
    from torch._dynamo.utils import counters

    step = make_step(context)
    torch._dynamo.reset()
    counters.clear()
    if how == "reduce-overhead":
        for cache in (step.k_cache, step.v_cache):
            torch._dynamo.mark_static_address(cache)
        function = torch.compile(layer, fullgraph=True, mode=how)
    else:
        function = torch.compile(layer, fullgraph=True, backend="eager" if context.dry_run else how)
    worst, start = 0.0, time.monotonic()
    for turn, first in enumerate((1, 17, 40)):
        step.set_lengths(lengths(step, first))
        out = step.run(function).clone()
        worst = max(worst, _error(out, step.expected()))
        if not turn:
            seconds = time.monotonic() - start
    row: Row = {
        "first_call_s": round(seconds, 1), "frames": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
    }  # fmt: skip
    if row["breaks"] or row["frames"] != 1:
        row["error"] = f"expected one graph, got {row['frames']} with {row['breaks']} breaks"
    elif how == "reduce-overhead" and row["cudagraph_skips"]:
        row["error"] = "CUDA graphs were skipped"
    return _judged(row, worst)


def _error(out: Tensor, expected: Tensor) -> float:
    largest = expected.abs().amax(dim=-1, keepdim=True).clamp_min(1e-3)
    share = (out.float() - expected.float()).abs() / largest
    return float(share.nan_to_num(nan=torch.inf).max())


def _judged(row: Row, worst: float) -> Row:
    row["error_share"] = worst
    if worst > TOLERANCE and "error" not in row:
        row["error"] = f"wrong: off by {worst:.3g} of the row's largest value, {TOLERANCE:.3g} allowed"
    return row


def host_cost(context: Context) -> Row:
    """Microseconds until a call returns to the host, its kernel's launch included; the least of many turns, each
    drained before the next. On a CPU the kernel itself is in it: a dry run's figure says nothing."""
    spec = next(iter(models.specs(context.dry_run).values()))
    cell = Cell(spec=spec, batch=HOST_BATCH if context.on == "cuda" else 2, context=64)
    given = operands.make(cell, BLOCK, on=context.on, cold_bytes=1)
    k, v = given.caches[0]
    key = k.new_zeros(cell.batch, spec.num_kv_heads, spec.head_dim)
    slots = torch.arange(cell.batch, device=context.on)
    calls: dict[str, Call] = {
        "paged_attention": lambda: pagegen.paged_attention(
            given.q, k, v, given.block_table, given.seq_lens, max_seq_len=cell.context, out=given.out
        ),
        "write_kv": lambda: pagegen.write_kv(key, key, k, v, slots),
    }
    if context.on == "cuda":
        from gpu_check_bench import fixed_splits

        space, out = fixed_splits.workspace(given.q), torch.empty_like(given.out)
        calls["two bare Triton launches"] = lambda: fixed_splits.decode(
            given.q, k, v, given.block_table, given.seq_lens, out, space, scale=spec.scale
        )
        calls["torch.add"] = lambda: torch.add(given.q, given.q, out=out)
    with torch.inference_mode():
        return {f"{name}_us": round(us, 2) for name, us in host_us(context, calls).items()}


def host_us(context: Context, calls: dict[str, Call]) -> dict[str, float]:
    """The least time of each, the calls taking turns."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(3 if context.dry_run else HOST_TURNS):
        for name, call in calls.items():
            if context.on == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            if turn:  # the first one plans and compiles
                best[name] = min(best[name], (time.perf_counter() - start) / HOST_CALLS * 1e6)
    return best
