"""Where a run's kernels are compiled, checked and timed.

The tuner says what is to be done and an executor does it: on one bench here, or on the devices of a cluster
(`pagegen_autotune.fleet.executor`). Nothing else of a run differs.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagegen.spec import CacheLayout, CompileFacts, Variant, Workload
from pagegen.spec.result import SEARCH
from pagegen_autotune import racing
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.measure import Bench, Verdict
from pagegen_autotune.rounds import Rounds, interleave

Entry = tuple[CacheLayout, Variant]


@dataclass(frozen=True, kw_only=True)
class Race:
    """Interleaved rounds on one workload, on one device: what is timed side by side and is lost or stored as one.

    `until` is when no further round begins, by the run's clock. In rounds of a search whoever is clearly slower than
    the best leaves; `best_known` is the best ratio to the first entry, the default, that was measured before. Nothing
    can be compared where one of `essential` fails. `seed` decides the order within rounds.
    """

    entries: tuple[Entry, ...]
    workload: Workload
    purpose: str
    rounds: int
    until: float
    seed: int
    best_known: float | None = None
    essential: tuple[Entry, ...] = ()


Result = tuple[Race, Rounds[Entry]]


class Executor(Protocol):
    """Runs checks, and races side by side. `workers` variants are worth checking at once; `free` races can be started
    now, `busy` were started and have not ended."""

    @property
    def regime(self) -> str: ...

    @property
    def environment(self) -> dict[str, str]: ...

    @property
    def workers(self) -> int: ...

    @property
    def free(self) -> int: ...

    @property
    def busy(self) -> int: ...

    def check(self, layout: CacheLayout, variants: Sequence[Variant]) -> dict[Variant, Verdict]:
        """Compiles variants and compares what they compute with the reference."""

    def start(self, race: Race) -> None:
        """Begins a race; only where one is free."""

    def ended(self, wait_s: float) -> list[Result]:
        """The races that ended; waits so long for one where none did."""

    def facts(self, layout: CacheLayout, variant: Variant, *, decode: bool) -> CompileFacts | None:
        """What the compiler made of a variant, None where it does not say."""


def run(
    race: Race, entries: Sequence[Entry], bench: Bench, into: Rounds[Entry], *, more: Callable[[], bool]
) -> None:  # fmt: skip
    """Runs a race, or as many of its entries as are sound, on a bench; `more` is asked before each further round.
    Whatever happens, `into` holds what was measured until then."""

    def sample(entry: Entry) -> float:
        layout, variant = entry
        return bench.sample(layout, variant, race.workload)

    interleave(
        entries, sample, into, rounds=race.rounds, rng=random.Random(race.seed), more=more, gauge=bench.gauge,
        judge=functools.partial(racing.losers, best_known=race.best_known) if race.purpose == SEARCH else None,
    )  # fmt: skip


class LocalExecutor:
    """One bench, one race at a time: it is run by `start`. A stop that was requested ends it between two samples, and
    what was measured until then is its result."""

    def __init__(self, bench: Bench, clock: Callable[[], float], stop: StopSignal) -> None:
        self.regime = bench.regime
        self.environment = bench.environment
        self.workers = bench.workers
        self.check = bench.check
        self.facts = bench.facts
        self._bench = bench
        self._clock = clock
        self._stop = stop
        self._ended: list[Result] = []

    @property
    def free(self) -> int:
        return int(not self._ended)

    @property
    def busy(self) -> int:
        return len(self._ended)

    def start(self, race: Race) -> None:
        """Runs a race. Raises KeyboardInterrupt once a stop was requested."""
        rounds: Rounds[Entry] = Rounds()
        self._ended.append((race, rounds))
        run(race, race.entries, _Stoppable(self._bench, self._stop), rounds, more=lambda: self._clock() < race.until)

    def ended(self, wait_s: float) -> list[Result]:
        found, self._ended = self._ended, []
        if not found:
            time.sleep(wait_s)
        return found


class _Stoppable:
    """A bench that takes no further sample once a stop was requested."""

    def __init__(self, bench: Bench, stop: StopSignal) -> None:
        self.regime, self.environment, self.workers = bench.regime, bench.environment, bench.workers
        self.check, self.gauge, self.facts = bench.check, bench.gauge, bench.facts
        self._bench = bench
        self._stop = stop

    def sample(self, layout: CacheLayout, variant: Variant, workload: Workload) -> float:
        self._stop.check()
        return self._bench.sample(layout, variant, workload)
