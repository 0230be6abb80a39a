"""Requests that arrive at their own times, served to the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from pagegen.serving.job import OnToken
from pagegen.serving.request import Outcome, Request
from pagegen.serving.scheduler import Scheduler
from pagegen.serving.step import Step


class Clock(Protocol):
    """Seconds since a moment of its own. A simulated one is set forward by whoever computes the steps."""

    def now_s(self) -> float:
        """Seconds since this clock's beginning."""

    def wait_until(self, time_s: float) -> None:
        """Returns when `now_s` has reached `time_s`."""


class WallClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._start_s

    def wait_until(self, time_s: float) -> None:
        """Returns when `now_s` has reached `time_s`."""
        time.sleep(max(0.0, time_s - self.now_s()))


def replay(
    scheduler: Scheduler,
    requests: Iterable[Request],
    run: Callable[[Step], Sequence[int] | None],
    clock: Clock,
    on_token: OnToken | None = None,
) -> Iterator[Outcome]:
    """Submits each request when it arrives (by `arrival_s`, in which order they must come), lets `run` compute the
    steps, and yields the requests as they end. Where a step, a callback or a request fails, what ended is
    yielded and then the error goes on: the step in flight counts as failed, and the scheduler can be used on (with the
    same clock while it serves somebody) or its requests aborted.

    Raises ValueError for arrivals out of order and RuntimeError where requests wait and nothing is left that would
    make room (the cache holds what is not the scheduler's), besides what `submit`, `run` and the callbacks raise.
    """
    coming = iter(requests)
    following = next(coming, None)
    while True:
        while following is not None and following.arrival_s <= clock.now_s():
            scheduler.submit(following, on_token)
            following = _after(following, coming)
        step = scheduler.schedule(clock.now_s())
        if step is not None:
            try:
                ended = scheduler.complete(step, run(step), clock.now_s())
            except BaseException as error:
                _fail(scheduler, step, error)
                yield from scheduler.drain()
                raise
            yield from ended
        elif following is not None:
            clock.wait_until(following.arrival_s)
        elif scheduler.waiting:
            raise RuntimeError(f"{scheduler.waiting} requests wait for blocks that no request of this scheduler holds")
        else:
            return


def _fail(scheduler: Scheduler, step: Step, error: BaseException) -> None:
    """Hands back a step that failed with `error`, unless it has landed; raises `error` where that fails too."""
    if scheduler.in_flight is step:
        try:
            scheduler.fail(step)
        except Exception as another:
            raise error from another


def _after(last: Request, coming: Iterator[Request]) -> Request | None:
    following = next(coming, None)
    if following is not None and following.arrival_s < last.arrival_s:
        raise ValueError(
            f"requests must come in order of arrival_s, got {following.id!r} at {following.arrival_s} "
            f"after {last.id!r} at {last.arrival_s}"
        )
    return following
