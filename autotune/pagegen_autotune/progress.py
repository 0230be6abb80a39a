"""The line that says how far a run is: trials done and left, the best so far, its share of the roofline, time left."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

QUIET_S = 10.0  # between two lines where standard error is no terminal, and each stays


class Progress:
    """One line on standard error; where that is a file, one every 10 s. It counts `things`: a trial is a variant on a
    workload. `left_s` tells the seconds that the budget
    leaves, infinite without one; what the known trials will take at the pace of those so far is told where that is
    less. `name` and `position` tell the lines of runs side by side apart: what is measured on, as it is just then, and
    the line's place."""

    def __init__(
        self, show: bool, left_s: Callable[[], float], clock: Callable[[], float] = time.monotonic, *,
        name: Callable[[], str] | None = None, position: int | None = None, things: str = "trials",
    ) -> None:  # fmt: skip
        self._name = name
        self._things = things
        self._shown = show
        self._told = -math.inf
        self._left_s = left_s
        self._clock = clock
        self._start = clock()
        self._done = self._expected = 0
        self._facts = self._part = ""
        self._position = position
        self._bar: tqdm[Any] | None = None  # made when there is something to say, and only for a terminal

    def at(self, what: str) -> None:
        """The part of the run that begins. What the part before left undone is not awaited any more."""
        self._facts = ""
        self._part = what
        self._expected = self._done

    def expect(self, trials: int) -> None:
        """So many more, or fewer, trials lie ahead."""
        self._expected += trials
        self._show()

    def done(self, trials: int) -> None:
        """So many trials ended."""
        self._done += trials
        self._show()

    def best(self, ratio: float, roofline_share: float | None) -> None:
        """The best so far takes `ratio` of the default's time, and its share of what memory or arithmetic allow."""
        share = "" if roofline_share is None else f" ({roofline_share:.0%} of the roofline)"
        self._facts = f"best {ratio:.2f} of the default's time{share}"
        self._show()

    def close(self) -> None:
        """Ends the line."""
        if self._bar is not None:
            self._bar.close()

    def _show(self) -> None:
        terminal = sys.stderr.isatty()
        if not self._shown or not (terminal or self._clock() - self._told >= QUIET_S):
            return
        name = "" if self._name is None else f"{self._name()}: "
        left = max(0, self._expected - self._done)
        elapsed = self._clock() - self._start
        known_s = elapsed / self._done * left if self._done else math.inf
        seconds = min(known_s, self._left_s())
        to_go = f"{_duration(seconds)} to go" if math.isfinite(seconds) else ""
        counts = [f"{self._done} {self._things} done", f"{left} left"]
        text = f"{name}{self._part}: " + ", ".join(filter(None, [*counts, self._facts, to_go]))
        if not terminal:
            self._told = self._clock()
            print(text, file=sys.stderr, flush=True)
        elif self._bar is None:  # dynamic_ncols: a fixed width wraps in a narrow terminal
            self._bar = tqdm(total=0, dynamic_ncols=True, position=self._position, bar_format="{desc}", desc=text)
        else:
            self._bar.set_description_str(text)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
