"""One run: a workload's requests at their times through a scheduler, a model and a cache."""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pagegen.serving import Clock, Latencies, Outcome, Request, Scheduler, ServerFigures, Step
from serving_bench.workloads import Place, Workload

Run = Callable[[Step], Sequence[int]]


class CpuClock:
    """Seconds of this process's CPU time since it was made: with one thread, what a core of its own would take,
    whoever else wants the core. Waiting sets it forward at once."""

    def __init__(self) -> None:
        self._start_s = time.process_time()

    def now_s(self) -> float:
        return time.process_time() - self._start_s

    def wait_until(self, time_s: float) -> None:
        self._start_s -= max(0.0, time_s - self.now_s())


@dataclass(frozen=True)
class Served:
    """How a run went. `figures` are of the server as a whole, `latencies` of what single requests waited."""

    outcomes: tuple[Outcome, ...]
    figures: ServerFigures
    latencies: Latencies

    def to_row(self) -> dict[str, Any]:
        """What the bench keeps of it: speeds in tokens a second, times in milliseconds."""
        figures, latencies = self.figures, self.latencies
        first, between = latencies.time_to_first_token_s, latencies.inter_token_s
        assert first is not None and between is not None
        return {
            "output_tokens_per_s": figures.output_tokens_per_s,
            "total_tokens_per_s": figures.total_tokens_per_s,
            "span_s": figures.span_s,
            "steps": figures.steps,
            "ttft_p50_ms": first.p50 * 1e3,
            "ttft_p99_ms": first.p99 * 1e3,
            "itl_p50_ms": between.p50 * 1e3,
            "itl_p99_ms": between.p99 * 1e3,
            "hit_rate": figures.hit_tokens / figures.prompt_tokens,
            "computed_tokens": figures.computed_tokens,
            "preemptions": figures.preemptions,
        }


def serve(scheduler: Scheduler, run: Run, workload: Workload, span_s: float, clock: Clock) -> Served:
    """Serves every request to its last token. A dialogue's next turn comes when the answer before has ended and its
    break is over; with `span_s` 0 all dialogues begin at once and there are no breaks."""
    starts = (((i, 0), dialogue[0]) for i, dialogue in enumerate(workload.dialogues))
    coming = [(turn.after * span_s, place, turn.said) for place, turn in starts]
    heapq.heapify(coming)
    outcomes: list[Outcome] = []
    while coming or scheduler.running or scheduler.waiting:
        while coming and coming[0][0] <= clock.now_s():
            due, place, prompt = heapq.heappop(coming)
            scheduler.submit(Request(place, prompt, workload.turn(place).answer, arrival_s=due))
        step = scheduler.schedule(clock.now_s())
        if step is None:
            if not coming:
                raise RuntimeError(f"{scheduler.waiting} requests wait for blocks that nobody holds")
            clock.wait_until(coming[0][0])
            continue
        tokens = run(step)
        for outcome in scheduler.complete(step, tokens, clock.now_s()):
            outcomes.append(outcome)
            following = _next_turn(workload, outcome)
            if following is not None:
                due = clock.now_s() + workload.turn(following[0]).after * span_s
                heapq.heappush(coming, (due, *following))
    latencies = Latencies.of(outcome.times for outcome in outcomes)
    return Served(tuple(outcomes), scheduler.figures(clock.now_s()), latencies)


def _next_turn(workload: Workload, outcome: Outcome) -> tuple[Place, array[int]] | None:
    """Place and prompt of what follows an answer: all before, the answer as it came, and what is said then."""
    dialogue, turn = cast(Place, outcome.request.id)
    following = dialogue, turn + 1
    if following[1] == len(workload.dialogues[dialogue]):
        return None
    return following, cast("array[int]", outcome.request.prompt) + outcome.tokens + workload.turn(following).said
