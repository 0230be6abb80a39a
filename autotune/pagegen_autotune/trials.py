"""The trials of a run: which variants compile and compute the right thing, and rounds that time them side by side."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from pagegen.spec import CacheLayout, Status, Variant, Workload
from pagegen.spec.result import COMPARE, CONFIRM, SEARCH
from pagegen_autotune import racing
from pagegen_autotune.cells import Cell, Contender
from pagegen_autotune.evidence import ELIMINATED
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.ledger import Ledger
from pagegen_autotune.measure import Bench, Verdict
from pagegen_autotune.progress import Progress
from pagegen_autotune.rounds import Rounds, interleave


class BaselineFailed(Exception):
    """The default variant failed, so that there is nothing to compare with."""


class Trials:
    """Runs trials on a bench and stores every one, failures included."""

    def __init__(
        self, ledger: Ledger, bench: Bench, *, clock: Callable[[], float], stop: StopSignal, progress: Progress,
        seed: int,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._bench = bench
        self._clock = clock
        self._stop = stop
        self._progress = progress
        self._rng = random.Random(seed)
        self._verdicts: dict[tuple[CacheLayout, Variant], Verdict] = {}

    def compile(self, cell: Cell, variants: Sequence[Variant], until: float) -> list[Variant]:
        """Those that pass their check, of as many as time allows. Raises BaselineFailed."""
        passed: list[Variant] = []
        self.require(cell)
        for first in range(0, len(variants), self._bench.workers):
            if self._clock() >= until:
                break
            passed += self.checked(cell, variants[first : first + self._bench.workers])
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
        for first in range(0, len(new), self._bench.workers):
            found = self._bench.check(cell.layout, new[first : first + self._bench.workers])
            self._stop.check()  # a compiler that Ctrl-C killed has found nothing wrong
            for variant, verdict in found.items():
                self._verdicts[cell.layout, variant] = verdict
                if verdict.status is not Status.OK:
                    self._ledger.fail(cell.layout, variant, cell.loads[0][0], verdict)
        return [v for v in variants if self._verdicts[cell.layout, v].status is Status.OK]

    def rounds(
        self, contenders: Sequence[Contender], workload: Workload, purpose: str, rounds: int, until: float, *,
        best_known: float | None = None,
    ) -> None:  # fmt: skip
        """Interleaved rounds on one workload, stored whatever ends them. In those of a search whoever is clearly slower
        than the best leaves; `best_known` is the best ratio to the default that was measured before. Raises
        BaselineFailed for a lone cell."""
        measured: Rounds[Contender] = Rounds()

        def sample(contender: Contender) -> float:
            self._stop.check()
            cell, variant = contender
            return self._bench.sample(cell.layout, variant, workload)

        def judge(samples: Mapping[Contender, Sequence[float]]) -> dict[Contender, float]:
            return racing.losers(samples, best_known=best_known)

        try:
            interleave(
                contenders, sample, measured, rounds=rounds, rng=self._rng, more=lambda: self._clock() < until,
                gauge=self._bench.gauge, judge=judge if purpose == SEARCH else None,
            )  # fmt: skip
        finally:
            # one transaction: a commit for each trial takes tens of milliseconds, as long as measuring it
            with self._ledger.store.atomic():
                self._store(workload, measured, purpose)
        self._progress.done(len(contenders) - (purpose in (SEARCH, CONFIRM)))  # there the default only keeps time
        for (cell, variant), (_, detail) in measured.failures.items():
            if variant == cell.default and purpose != COMPARE:
                raise BaselineFailed(detail)

    def _store(self, workload: Workload, measured: Rounds[Contender], purpose: str) -> None:
        session = uuid.uuid4().hex
        for (cell, variant), (status, detail) in measured.failures.items():
            self._ledger.fail(cell.layout, variant, workload, Verdict(status=status, detail=detail))
        for contender, samples in measured.samples.items():
            if samples:
                cell, variant = contender
                slower = measured.out.get(contender)
                self._ledger.succeed(
                    cell.layout, variant, workload, samples, session=session, purpose=purpose,
                    max_error=self._verdicts[cell.layout, variant].max_error, gauge_gb_s=measured.gauge[contender],
                    detail="" if slower is None else _eliminated(slower, len(samples)),
                )  # fmt: skip


def _eliminated(slower: float, rounds: int) -> str:
    sure = f"{racing.CONFIDENCE:.0%} sure, over all eliminations of the race"
    return f"{ELIMINATED} after {rounds} rounds: at least {slower:.3f} of the best one's time ({sure})"
