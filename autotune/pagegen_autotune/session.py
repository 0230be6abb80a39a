"""A measured run: the default everywhere first, then a search in each cell with fresh samples for its winner, and at
the end rounds over all layouts, so that their step times compare."""

from __future__ import annotations

import functools
import math
import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from pagegen.spec import CacheLayout, Status, Variant, Workload
from pagegen.spec.result import BASELINE, COMPARE, CONFIRM, SEARCH
from pagegen_autotune.evidence import Evidence, Loads
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.ledger import Ledger
from pagegen_autotune.measure import Bench, Rounds, Verdict, interleave
from pagegen_autotune.portfolio import best, leader
from pagegen_autotune.search import Strategy
from pagegen_autotune.space import Space

ROUNDS = 7
# Five rounds make a median; a trial with fewer is measured again by the next run.
ENOUGH_ROUNDS = 5
CONFIRM_ROUNDS = 9
# Of a budget: the defaults' extra rounds, and what is kept for comparing layouts; of a cell's share: the search, and
# within it what compiling may take.
BASELINE_SHARE, COMPARE_SHARE, SEARCH_SHARE, COMPILE_SHARE = 0.2, 0.1, 0.75, 0.6


class BaselineFailed(Exception):
    """The default variant failed, so that there is nothing to compare with."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One search: a layout and a class of batches ("decode", "mixed" or "all"). `loads` are the class's workloads with
    their weights."""

    layout: CacheLayout
    batches: str
    space: Space
    loads: Loads

    @property
    def default(self) -> Variant:
        return self.space.start

    @property
    def name(self) -> str:
        """For people: "block size 16 NHD, decode"."""
        return f"block size {self.layout.block_size} {self.layout.order}, {self.batches}"


Contender = tuple[Cell, Variant]


class Session:
    """One run over `cells`. `left_out` collects, in words, what the budget or a failure kept from being measured."""

    def __init__(
        self, cells: Sequence[Cell], ledger: Ledger, bench: Bench, strategy: Strategy, *,
        clock: Callable[[], float], budget_s: float | None, stop: StopSignal, progress: bool, seed: int,
    ) -> None:  # fmt: skip
        self.cells = cells
        self.left_out: list[str] = []
        self._ledger = ledger
        self._bench = bench
        self._strategy = strategy
        self._clock = clock
        self._start = clock()
        self._budget_s = math.inf if budget_s is None else budget_s
        self._stop = stop
        self._rng = random.Random(seed)
        self._evidence: dict[Cell, Evidence] = {}
        self._verdicts: dict[tuple[CacheLayout, Variant], Verdict] = {}
        self._expected = 0
        # dynamic_ncols: a fixed width wraps in a narrow terminal; the bar counts trials (a variant on a workload)
        self._bar: tqdm[Any] = tqdm(total=0, unit="trial", dynamic_ncols=True, disable=not progress)

    def run(self, finished: Callable[[Cell], None]) -> None:
        """Measures until done, out of budget or stopped (KeyboardInterrupt); `finished` is called when a cell's
        decision or its figures have changed."""
        try:
            sound = [cell for cell in self.cells if self._guarded(cell, self._baseline)]
            for number, cell in enumerate(sound):
                until = self._clock() + self._share(sound[number:])
                self._guarded(cell, functools.partial(self._search, until=until))
                finished(cell)
            self._compare_layouts(sound)
            for cell in sound:
                finished(cell)
        finally:
            self._bar.close()

    def evidence(self, cell: Cell) -> Evidence:
        """The trials of the cell's layout, for comparison with the cell's default."""
        trials = self._ledger.trials(cell.layout)
        known = self._evidence.get(cell)
        if known is None or known.count != len(trials):
            known = self._evidence[cell] = Evidence(trials, cell.default)
        return known

    def _guarded(self, cell: Cell, step: Callable[[Cell], None]) -> bool:
        try:
            step(cell)
        except BaselineFailed as failure:
            self.left_out.append(f"{cell.name}: the default variant failed ({failure}); nothing was compared")
            return False
        return True

    # --- time ---------------------------------------------------------------------------------------------------

    def _share(self, cells: Sequence[Cell]) -> float:
        """Seconds for the first of `cells`: of what is left, its part by weight times cost, layouts alike."""
        left = self._start + (1 - COMPARE_SHARE) * self._budget_s - self._clock()
        if math.isinf(left):
            return left
        cost = {c: sum(weight * self.evidence(c).cost_us(w) for w, weight in c.loads) for c in self.cells}
        parts = [cost[c] / sum(cost[d] for d in self.cells if d.layout == c.layout) for c in cells]
        return max(0.0, left) * parts[0] / sum(parts)

    def _fits(self, cell: Cell, workload: Workload, calls: int, until: float) -> bool:
        """Whether one round of so many calls is likely to end in time."""
        return self._clock() + calls * self.evidence(cell).cost_us(workload) / 1e6 < until

    # --- the parts of a run -------------------------------------------------------------------------------------

    def _baseline(self, cell: Cell) -> None:
        """The default on every workload: one round whatever the budget, since every row needs a measured time."""
        missing = [w for w, _ in cell.loads if self.evidence(cell).default_us(w) is None]
        if not missing:
            return
        self._bar.set_description(cell.name)
        self._require(cell)
        self._expect(len(missing))
        until = self._start + BASELINE_SHARE * self._budget_s
        for workload in missing:
            self._rounds([(cell, cell.default)], workload, BASELINE, ENOUGH_ROUNDS, until)

    def _search(self, cell: Cell, *, until: float) -> None:
        self._bar.set_description(cell.name)
        search_until = self._clock() + SEARCH_SHARE * (until - self._clock())
        search = self._strategy(cell.space)
        batch = next(search)
        while self._measure(cell, batch, search_until):
            scores = {c.variant: c.ratio for c in self.evidence(cell).comparisons(cell.loads, fresh=False)}
            self._bar.set_postfix_str(f"best {min([1.0, *scores.values()]):.2f} of the default's time")
            try:
                batch = search.send(scores)
            except StopIteration:
                break
        self._confirm(cell, until)

    def _measure(self, cell: Cell, batch: Sequence[Variant], until: float) -> bool:
        """One batch on every workload; False when time ran out before its end."""
        known_bad = self._ledger.failed(cell.layout)
        todo = {v: len(self._pending(cell, v)) for v in batch if v not in known_bad and self._pending(cell, v)}
        if not todo:
            return True
        self._expect(sum(todo.values()))
        now = self._clock()
        ready, complete = self._compile(cell, list(todo), now + COMPILE_SHARE * (until - now))
        self._expect(-sum(trials for v, trials in todo.items() if v not in ready))
        for number, (workload, _) in enumerate(cell.loads):
            failed = self._ledger.failed(cell.layout)
            pending = [v for v in ready if v not in failed and workload in self._pending(cell, v)]
            if pending and not self._fits(cell, workload, 1 + len(pending), until):
                some = f"{len(cell.loads) - number} of {len(cell.loads)} workloads"
                self.left_out.append(f"{cell.name}: {len(pending)} variants on {some}")
                return False
            if pending:
                contenders = [(cell, v) for v in (cell.default, *pending)]
                self._rounds(contenders, workload, SEARCH, ROUNDS, until)
        return complete

    def _pending(self, cell: Cell, variant: Variant) -> list[Workload]:
        """The workloads on which `variant` still lacks rounds beside the default."""
        evidence = self.evidence(cell)
        return [w for w, _ in cell.loads if len(evidence.pairs(variant, w, fresh=False)) < ENOUGH_ROUNDS]

    def _confirm(self, cell: Cell, until: float) -> None:
        """Fresh samples for the variant that looks best, until the decision rests on such samples."""
        while (found := leader(self.evidence(cell), cell.loads)) is not None:
            if len(self._checked(cell, [cell.default, found])) < 2:
                return
            self._expect(len(cell.loads))
            for workload, _ in cell.loads:
                if not self._fits(cell, workload, 2, until):
                    self.left_out.append(f"{cell.name}: fresh samples to confirm {found.name}")
                    return
                self._rounds([(cell, cell.default), (cell, found)], workload, CONFIRM, CONFIRM_ROUNDS, until)

    def _compare_layouts(self, cells: Sequence[Cell]) -> None:
        """Rounds over the chosen variants of all layouts: block sizes measured minutes apart do not compare."""
        until = self._start + self._budget_s
        self._bar.set_description("comparing block sizes")
        for workload in dict.fromkeys(w for cell in cells for w, _ in cell.loads):
            finalists = [c for cell in cells if workload in dict(cell.loads) for c in self._finalists(cell)]
            known = [self.evidence(cell).sessions(v, workload, COMPARE) for cell, v in finalists]
            if len({cell.layout for cell, _ in finalists}) < 2 or set.intersection(*known):
                continue
            contenders = [(cell, v) for cell, v in finalists if self._checked(cell, [v])]
            if not contenders or not self._fits(contenders[0][0], workload, len(contenders), until):
                self.left_out.append("rounds over all block sizes: their step times are of different minutes")
                return
            self._expect(len(contenders))
            self._rounds(contenders, workload, COMPARE, ROUNDS, until)

    def _finalists(self, cell: Cell) -> list[Contender]:
        """The cell's default and what replaces it, if anything does."""
        winner = best(self.evidence(cell), cell.loads)
        return [(cell, cell.default), (cell, winner.variant)] if winner else [(cell, cell.default)]

    # --- compiling, checking, timing ------------------------------------------------------------------------------

    def _compile(self, cell: Cell, variants: Sequence[Variant], until: float) -> tuple[list[Variant], bool]:
        """Those that pass their check, as many as time allows, and whether it allowed all."""
        passed: list[Variant] = []
        self._require(cell)
        for first in range(0, len(variants), self._bench.workers):
            if self._clock() >= until:
                self.left_out.append(f"{cell.name}: {len(variants) - first} variants not compiled")
                return passed, False
            passed += self._checked(cell, variants[first : first + self._bench.workers])
        return passed, True

    def _require(self, cell: Cell) -> None:
        """The default must pass its check in this process, even where an earlier run stored its failure."""
        if not self._checked(cell, [cell.default]):
            raise BaselineFailed(self._verdicts[cell.layout, cell.default].detail)

    def _checked(self, cell: Cell, variants: Iterable[Variant]) -> list[Variant]:
        """Those of `variants` that pass; the failures are stored."""
        variants = list(variants)
        new = [v for v in variants if (cell.layout, v) not in self._verdicts]
        if new:
            found = self._bench.check(cell.layout, new)
            self._stop.check()  # a compiler that Ctrl-C killed has found nothing wrong
            for variant, verdict in found.items():
                self._verdicts[cell.layout, variant] = verdict
                if verdict.status is not Status.OK:
                    self._ledger.fail(cell.layout, variant, cell.loads[0][0], verdict)
        return [v for v in variants if self._verdicts[cell.layout, v].status is Status.OK]

    def _rounds(
        self, contenders: Sequence[Contender], workload: Workload, purpose: str, rounds: int, until: float
    ) -> None:
        """Interleaved rounds on one workload, stored whatever ends them. Raises BaselineFailed for a lone cell."""
        measured: Rounds[Contender] = Rounds()

        def sample(contender: Contender) -> float:
            self._stop.check()
            cell, variant = contender
            return self._bench.sample(cell.layout, variant, workload)

        try:
            interleave(contenders, sample, measured, rounds=rounds, rng=self._rng, more=lambda: self._clock() < until)
        finally:
            # one transaction: a commit for each trial takes tens of milliseconds, as long as measuring it
            with self._ledger.store.atomic():
                self._store(workload, measured, purpose)
        self._bar.update(len(contenders) - (purpose in (SEARCH, CONFIRM)))  # there the default only keeps time
        for (cell, variant), (_, detail) in measured.failures.items():
            if variant == cell.default and purpose != COMPARE:
                raise BaselineFailed(detail)

    def _store(self, workload: Workload, measured: Rounds[Contender], purpose: str) -> None:
        session = uuid.uuid4().hex
        for (cell, variant), (status, detail) in measured.failures.items():
            self._ledger.fail(cell.layout, variant, workload, Verdict(status=status, detail=detail))
        for (cell, variant), samples in measured.samples.items():
            if samples:
                error = self._verdicts[cell.layout, variant].max_error
                self._ledger.succeed(
                    cell.layout, variant, workload, samples, session=session, purpose=purpose, max_error=error
                )

    def _expect(self, trials: int) -> None:
        self._expected += trials
        self._bar.total = self._expected
        self._bar.refresh()
