"""How long calls take on a device: in a CUDA graph, from a cold cache, in rounds over all contenders.

A graph holds a number of calls that differ in the blocks they read; a sample replays it once between two events and
divides. Before each sample a buffer of several times the last-level cache is read (not written: lines to write back
would take bandwidth from what is timed). Warm samples leave that out. Where a contender cannot be captured its calls
are launched one by one between the events, which its row says: the host's time may then be part of it.
On a CPU, in a dry run, the host's clock takes the place of events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagegen.spec import check

Call = Callable[[], object]
WARM_UPS = 3
# Reading it takes some 100 us, in which the host launches what is timed.
LEAST_READ_BYTES = 512 << 20
GRAPH, EVENTS, HOST = "CUDA graph", "CUDA events, launched one by one", "host clock"


class Runner(Protocol):
    """Something that can be timed again and again. `how` says by what."""

    how: str

    def sample(self) -> float:
        """Microseconds of one call, the mean over those of one replay."""
        ...


class Clock(Protocol):
    """Makes runners."""

    def runner(self, calls: Sequence[Call], *, cold: bool = True) -> Runner: ...


class HostClock:
    """Times on the host: calls return when they are done."""

    def runner(self, calls: Sequence[Call], *, cold: bool = True) -> Runner:
        for call in calls[:WARM_UPS]:
            call()
        return _HostRunner(calls)


@dataclass
class _HostRunner:
    calls: Sequence[Call]
    how: str = HOST

    def sample(self) -> float:
        start = time.perf_counter_ns()
        for call in self.calls:
            call()
        return max(1, time.perf_counter_ns() - start) / 1e3 / len(self.calls)


class DeviceClock:
    """Times on a GPU. `cold_bytes` is the size of what is read before a cold sample."""

    def __init__(self, cold_bytes: int) -> None:
        self._buffer = torch.zeros(max(cold_bytes, LEAST_READ_BYTES) // 4, dtype=torch.int32, device="cuda")

    def runner(self, calls: Sequence[Call], *, cold: bool = True) -> Runner:
        """Warms the calls up beside the main stream, as capture asks for, and captures them."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                calls[0]()
            for call in calls[1:]:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # torch leaves its own where ending the capture fails
            torch.cuda.synchronize()  # raises where the failed capture left the device unusable
            how = f"{EVENTS} (no capture: {check.first_line(error)[:200]})"
            return _DeviceRunner(self, lambda: _all(calls), len(calls), cold, how)
        return _DeviceRunner(self, graph.replay, len(calls), cold, GRAPH)

    def cool(self) -> None:
        """Fills the last-level cache with something else, without a line to write back."""
        torch.amax(self._buffer)


@dataclass
class _DeviceRunner:
    clock: DeviceClock
    replay: Call
    count: int
    cold: bool
    how: str

    def sample(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        if self.cold:
            self.clock.cool()  # the host launches what follows while this runs
        else:
            self.replay()
        start.record()
        self.replay()
        end.record()
        end.synchronize()
        return max(float(start.elapsed_time(end)), 1e-6) * 1e3 / self.count


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def interleave(runners: Mapping[str, Runner], rounds: int, left_s: Callable[[], float]) -> dict[str, list[float]]:
    """Rounds of one sample each, begun by another contender every time; fewer where time runs out, one at least."""
    names = list(runners)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        if number and left_s() <= 0:
            break
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(runners[name].sample())
    return found


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """The median and how far samples spread, in microseconds."""
    return {
        "us": round(statistics.median(samples), 2),
        "least_us": round(min(samples), 2),
        "most_us": round(max(samples), 2),
        "samples": len(samples),
    }
