"""Samples on a machine that others use too: runs take turns, each between two samples of a gauge.

A gauge is what the hardware gives just then: sequential read bandwidth for what memory bounds, multiply-adds for what
arithmetic bounds. A virtual machine's bandwidth changes from second to second, so every rate is divided by the gauge
around it, and runs are compared within a round. A sample is undisturbed when its process had its threads' whole share
of the CPU; medians are over the undisturbed ones where there are three or more, else over all. Shares and ratios are
given by CPU time too, which others' turns on the CPU do not lengthen; threads that wait asleep for one another look
better by it than they are.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

SAMPLE_SECONDS = 0.01  # shorter calls are repeated: a read of the gauge takes as long
MOST_CALLS = 512
UNDISTURBED = 0.95
ENOUGH = 3  # undisturbed samples for a median of them alone
Timed = tuple[float, float]  # seconds, seconds of CPU time


class Failed(Exception):
    """A run has no number, and why."""


@dataclass
class Runner:
    """Something to time: `run(first, calls)` makes `calls` calls, the first of them number `first`, and returns the
    time they took; `work` is what one call does, in bytes or floating-point operations. A run may raise `Failed`."""

    name: str
    run: Callable[[int, int], Timed]
    work: float
    calls: int = 1
    done: int = 0
    failure: str = ""
    note: str = ""
    owners: tuple[Any, ...] = ()  # what `run` knows by address alone

    def sample(self) -> Timed:
        timed = self.run(self.done, self.calls)
        self.done += self.calls
        return timed

    def warm_up(self) -> None:
        """Runs twice and decides how many calls make a sample."""
        self.calls = 1
        self.sample()
        seconds = self.sample()[0]
        self.calls = max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / max(seconds, 1e-7))))


def here(name: str, call: Callable[[int], Any], work: float, note: str = "") -> Runner:
    """A runner of this process."""

    def run(first: int, calls: int) -> Timed:
        start, cpu_start = time.perf_counter(), time.process_time()
        for i in range(first, first + calls):
            call(i)
        return time.perf_counter() - start, time.process_time() - cpu_start

    return Runner(name, run, work, note=note)


@dataclass(frozen=True)
class Gauge:
    """What the hardware gives: `run` does `work` and tells how long it took; `one_thread` is the rate of one thread at
    the start, in giga-units a second, by CPU time."""

    run: Callable[[], Timed]
    work: float
    one_thread: float

    def state(self, seconds: float, cpu_seconds: float, threads: int) -> str:
        """What a reading of twice the work says of the machine: "fast" where all threads together do 1.4 times what one
        alone did, "slow" where a second one gains less, "disturbed" where they had not the CPU to themselves; of one
        thread it says nothing."""
        if threads == 1:
            return "one thread"
        if cpu_seconds < UNDISTURBED * threads * seconds:
            return "disturbed"
        return "fast" if 2 * self.work / seconds / 1e9 >= 1.4 * self.one_thread else "slow"


@dataclass(frozen=True)
class Sample:
    """One round of one runner: seconds (of CPU time) a call, work a second, the gauge's rate around it, and what share
    of the gauge's work a second of CPU time does."""

    seconds: float
    cpu_seconds: float
    rate: float
    gauge: float
    cpu_share: float
    state: str
    undisturbed: bool


@dataclass
class Taken:
    """All samples of some runners, by name and round (None: failed)."""

    samples: dict[str, list[Sample | None]] = field(default_factory=dict)

    def of(self, name: str) -> list[Sample]:
        return [s for s in self.samples.get(name, ()) if s is not None]

    def pairs(self, name: str, over: str) -> list[tuple[Sample, Sample]]:
        """Both runs' samples of the same rounds; undisturbed ones where there are enough."""
        pairs = [
            (a, b)
            for a, b in zip(self.samples.get(name, ()), self.samples.get(over, ()), strict=False)
            if a is not None and b is not None
        ]
        clean = [(a, b) for a, b in pairs if a.undisturbed and b.undisturbed]
        return clean if len(clean) >= ENOUGH else pairs


def interleave(runners: Iterable[Runner], gauge: Gauge, rounds: int, threads: int) -> Taken:
    """`rounds` samples of each runner, in a random order each round. A runner that fails is left out from then on and
    says why."""
    order = [r for r in runners if not r.failure]
    for runner in order:
        _attempt(runner, runner.warm_up)
    taken = Taken({r.name: [] for r in order})
    shuffled = random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        before = gauge.run()
        for runner in order:
            timed = _attempt(runner, runner.sample)
            after = gauge.run()
            sample = None if timed is None else _sample(runner, gauge, threads, timed, before, after)
            taken.samples[runner.name].append(sample)
            before = after
    return taken


def _attempt(runner: Runner, do: Callable[[], Any]) -> Any:
    if runner.failure:
        return None
    try:
        return do()
    except Failed as failure:
        runner.failure = str(failure)
        return None


def _sample(runner: Runner, gauge: Gauge, threads: int, own: Timed, before: Timed, after: Timed) -> Sample:
    rate = 2 * gauge.work / (before[0] + after[0]) / 1e9
    wall = before[0] + own[0] + after[0]
    spent = before[1] + own[1] + after[1]
    seconds, cpu_seconds = own[0] / runner.calls, max(own[1], 1e-9) / runner.calls
    return Sample(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        rate=runner.work / seconds / 1e9,
        gauge=rate,
        cpu_share=runner.work / cpu_seconds * (before[1] + after[1]) / (2 * gauge.work),
        state=gauge.state(before[0] + after[0], before[1] + after[1], threads),
        undisturbed=spent >= UNDISTURBED * threads * wall,
    )


def kept(samples: list[Sample]) -> list[Sample]:
    """The undisturbed samples where there are enough, else all."""
    clean = [s for s in samples if s.undisturbed]
    return clean if len(clean) >= ENOUGH else samples


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Medians of one runner's samples: `ms` a call, `rate` in giga-units a second, `share` of the gauge sample by
    sample, and the same within each state of the machine that was met."""
    if not samples:
        return {}
    by_state = {}
    for state in sorted({s.state for s in samples}):
        those = kept([s for s in samples if s.state == state])
        by_state[state] = {"samples": len(those), **_medians(those)}
    return {
        **_medians(kept(samples)),
        "undisturbed": sum(s.undisturbed for s in samples),
        "samples_ms": [round(s.seconds * 1e3, 4) for s in samples],
        "by_state": by_state,
    }


def _medians(samples: list[Sample]) -> dict[str, float]:
    return {
        "ms": round(statistics.median(s.seconds for s in samples) * 1e3, 4),
        "rate": round(statistics.median(s.rate for s in samples), 2),
        "gauge": round(statistics.median(s.gauge for s in samples), 2),
        "share": round(statistics.median(s.rate / s.gauge for s in samples), 3),
        "cpu_share": round(statistics.median(s.cpu_share for s in samples), 3),
    }


def ratio(taken: Taken, name: str, over: str) -> dict[str, Any] | None:
    """How many times the time of `over` the run `name` took, round by round: median, range, the median by CPU time and
    those of each state of the machine; None where the two have no round in common."""
    pairs = taken.pairs(name, over)
    if not pairs:
        return None
    found = [a.seconds / b.seconds for a, b in pairs]
    return {
        "median": round(statistics.median(found), 3),
        "range": [round(min(found), 3), round(max(found), 3)],
        "cpu": round(statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in pairs), 3),
        "by_state": _by_state(pairs),
    }


def _by_state(pairs: list[tuple[Sample, Sample]]) -> dict[str, float]:
    """Medians over the rounds in which the machine was in the same state for both."""
    found: dict[str, list[float]] = {}
    for a, b in pairs:
        if a.state == b.state:
            found.setdefault(a.state, []).append(a.seconds / b.seconds)
    return {state: round(statistics.median(ratios), 3) for state, ratios in sorted(found.items())}
