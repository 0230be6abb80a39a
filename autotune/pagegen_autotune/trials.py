"""The trials of a run: which variants compile and compute the right thing, and races that time them side by side."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence

from pagegen.spec import Status, Variant, Workload
from pagegen.spec.result import COMPARE, CONFIRM, SEARCH
from pagegen_autotune import racing
from pagegen_autotune.cells import Cell, Contender
from pagegen_autotune.claims import Claims
from pagegen_autotune.evidence import ELIMINATED
from pagegen_autotune.executor import Entry, Executor, Race
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.ledger import Ledger
from pagegen_autotune.measure import Verdict
from pagegen_autotune.progress import Progress
from pagegen_autotune.queueing import Queue
from pagegen_autotune.rounds import Rounds

# How often who waits for a race looks whether a stop was requested, or whether another tuner gave a lease back.
POLL_S = 0.25


class BaselineFailed(Exception):
    """The default variant failed, so that there is nothing to compare with."""


class Trials:
    """Runs trials on an executor and stores every one, failures included. With `claims`, what another tuner measures
    just now is waited for and read."""

    def __init__(
        self, ledger: Ledger, executor: Executor, *, clock: Callable[[], float], stop: StopSignal, progress: Progress,
        seed: int, claims: Claims | None = None,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._executor = executor
        self._clock = clock
        self._stop = stop
        self._progress = progress
        self._rng = random.Random(seed)
        self._claims = claims
        self._verdicts: dict[Entry, Verdict] = {}
        self._running = 0

    @property
    def begun(self) -> int:
        """Trials that this run added, or that are being measured."""
        return self._ledger.added.total() + self._running

    def compile(self, cell: Cell, variants: Sequence[Variant], until: float) -> list[Variant]:
        """Those that pass their check, of as many as time allows. Raises BaselineFailed."""
        passed: list[Variant] = []
        self.require(cell)
        left = list(variants)
        while left and self._clock() < until:
            many = self._executor.workers
            passed += self.checked(cell, left[:many])
            del left[:many]
        return passed

    def was_checked(self, cell: Cell, variant: Variant) -> bool:
        """Whether there is a verdict on a variant."""
        return (cell.layout, variant) in self._verdicts

    def require(self, cell: Cell) -> None:
        """The default must pass its check in this process, even where an earlier run stored its failure."""
        if not self.checked(cell, [cell.default]):
            raise BaselineFailed(self._verdicts[cell.layout, cell.default].detail)

    def checked(self, cell: Cell, variants: Iterable[Variant]) -> list[Variant]:
        """Those of `variants` that pass; the failures are stored."""
        variants = list(variants)
        new = [v for v in variants if (cell.layout, v) not in self._verdicts]
        while new:
            many = self._executor.workers
            found = self._executor.check(cell.layout, new[:many])
            self._stop.check()  # a compiler that Ctrl-C killed has found nothing wrong
            del new[:many]
            self._verdicts |= {(cell.layout, variant): verdict for variant, verdict in found.items()}
            failures = [
                self._ledger.failure(cell.layout, variant, cell.loads[0][0], verdict)
                for variant, verdict in found.items()
                if verdict.status is not Status.OK
            ]
            (self._ledger.add if self._claims is None else self._ledger.add_once)(failures)
        return [v for v in variants if self._verdicts[cell.layout, v].status is Status.OK]

    def race(
        self, contenders: Sequence[Contender], workload: Workload, purpose: str, rounds: int, until: float, *,
        best_known: float | None = None,
    ) -> Race:  # fmt: skip
        """Rounds for variants that passed their checks, the default first. In those that compare layouts no variant is
        essential."""
        return Race(
            entries=tuple((cell.layout, variant) for cell, variant in contenders),
            workload=workload,
            purpose=purpose,
            rounds=rounds,
            until=until,
            seed=self._rng.getrandbits(63),
            best_known=best_known,
            essential=() if purpose == COMPARE else tuple((c.layout, v) for c, v in contenders if v == c.default),
        )

    def run(self, races: Iterator[Race | None]) -> None:
        """Runs races as the executor becomes free for them, and stores each as it ends, whatever ends the run. The
        next race is asked for when it can be started; None waits until all before it are stored. Raises
        BaselineFailed for a lone cell, when all that was begun is stored."""
        queue = Queue(races, self._claims, self._ledger)
        failed = ""
        try:
            while self._executor.busy or not (failed or queue.ended):
                self._stop.check()
                while not failed and self._executor.free and (race := queue.next(self._executor.busy)):
                    self._running += len(race.entries)
                    self._executor.start(race)
                over = not self._executor.busy and (failed or queue.ended)
                failed = self._collect(0.0 if over else POLL_S) or failed
        except BaseException:
            self._collect(0.0)
            raise
        finally:
            self._running = 0
        if failed:
            raise BaselineFailed(failed)

    def _collect(self, wait_s: float) -> str:
        """Stores the races that ended; says why an essential variant failed, if one did."""
        failed = ""
        for race, measured in self._executor.ended(wait_s):
            self._running -= len(race.entries)
            self._store(race, measured)
            failed = next((measured.failures[e][1] for e in race.essential if e in measured.failures), failed)
        return failed

    def _store(self, race: Race, measured: Rounds[Entry]) -> None:
        """Stores a race in one transaction: a commit for each trial takes tens of milliseconds, as long as measuring
        it. What another tuner took over meanwhile is left to that one."""
        session = uuid.uuid4().hex
        trials = [
            self._ledger.failure(layout, variant, race.workload, Verdict(status=status, detail=detail))
            for (layout, variant), (status, detail) in measured.failures.items()
        ]
        for entry, samples in measured.samples.items():
            if samples:
                layout, variant = entry
                slower = measured.out.get(entry)
                trials.append(
                    self._ledger.success(
                        layout,
                        variant,
                        race.workload,
                        samples,
                        session=session,
                        purpose=race.purpose,
                        max_error=self._verdicts[entry].max_error,
                        gauge_gb_s=measured.gauge[entry],
                        detail="" if slower is None else _eliminated(slower, len(samples)),
                    )  # fmt: skip
                )
        self._ledger.add(trials, None if self._claims is None else self._claims.of(race))
        self._progress.done(len(race.entries) - (race.purpose in (SEARCH, CONFIRM)))  # there the default keeps time


def _eliminated(slower: float, rounds: int) -> str:
    sure = f"{racing.CONFIDENCE:.0%} sure, over all eliminations of the race"
    return f"{ELIMINATED} after {rounds} rounds: at least {slower:.3f} of the best one's time ({sure})"
