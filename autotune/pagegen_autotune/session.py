"""A measured run: the default everywhere first, then a search in each cell with fresh samples for what it found, and
at the end rounds over all layouts, so that their step times compare, and the default once more, for drift."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

from pagegen.spec import Variant, Workload
from pagegen.spec.result import AFTER, BASELINE, COMPARE, CONFIRM, SEARCH
from pagegen_autotune import probing, roofline
from pagegen_autotune.cells import Cell, Contender
from pagegen_autotune.claims import Claims
from pagegen_autotune.evidence import Evidence
from pagegen_autotune.executor import Executor, Race
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.ledger import Ledger
from pagegen_autotune.objective import Loads, Objective
from pagegen_autotune.partition import divisions
from pagegen_autotune.portfolio import best, leaders
from pagegen_autotune.probing import ENOUGH_ROUNDS, REACH
from pagegen_autotune.progress import Progress
from pagegen_autotune.search import Strategy
from pagegen_autotune.trials import BaselineFailed, Trials

ROUNDS = 7
CONFIRM_ROUNDS, AFTER_ROUNDS = 9, 3
# Of a budget: when measuring ends, since storing and a last call take time; the defaults' extra rounds; what is kept
# for comparing layouts. Of a share what compiling may take.
END, BASELINE_SHARE, COMPARE_SHARE, COMPILE_SHARE = 0.95, 0.2, 0.1, 0.6
# Of a cell's share of the time: when looking around ends, and when the other batches of what is near the best are
# measured; the rest confirms. Of its trials as many are kept as it takes to measure some finalists on the other
# batches, and as it takes to confirm one beside a rival, but no more than a quarter for either.
EXPLORE_SHARE, SEARCH_SHARE = 0.75, 0.85
FINALISTS, RIVALS, KEPT_SHARE = 3, 1, 0.25
EQUAL_SHARE = 0.5  # of a share: what goes to all cells alike, since compiling takes as long whatever their calls take


class Session:
    """One run over `cells`. `left_out` says what the budget or a failure kept from being measured. `max_trials` bounds
    the trials beside the defaults' first rounds; `reach`: how far behind the best a variant may be and stay."""

    def __init__(
        self, cells: Sequence[Cell], ledger: Ledger, executor: Executor, strategy: Strategy, *,
        clock: Callable[[], float], budget_s: float | None, stop: StopSignal, progress: bool, seed: int,
        objective: Objective, max_trials: int | None = None, reach: float = REACH, claims: Claims | None = None,
        line: Progress | None = None,
    ) -> None:  # fmt: skip
        self.cells = cells
        self.left_out: list[str] = []
        self._ledger = ledger
        self._strategy = strategy
        self._objective = objective
        self._clock = clock
        self._start = clock()
        self._budget_s = math.inf if budget_s is None else END * budget_s
        self._max_trials = math.inf if max_trials is None else max_trials
        self._reach = reach
        self._evidence: dict[Cell, Evidence] = {}
        self._searched: set[Cell] = set()
        self._line = line or Progress(progress, lambda: self._start + self._budget_s - clock(), clock)
        self._trials = Trials(
            ledger, executor, clock=clock, stop=stop, progress=self._line, seed=seed, claims=claims
        )  # fmt: skip

    def run(self, finished: Callable[[Cell], None]) -> None:
        """Measures until done, out of budget or stopped (KeyboardInterrupt); `finished` is called when a cell's
        decision or its figures have changed."""
        try:
            sound = [cell for cell in self.cells if self._guarded(cell, self._baseline)]
            self._max_trials += self._trials.begun
            for number, cell in enumerate(sound):
                until = self._clock() + self._share(sound[number:])
                few = (self._max_trials - self._trials.begun) / len(sound[number:])
                trials = self._trials.begun + few
                self._guarded(cell, functools.partial(self._search, until=until, trials=trials))
                finished(cell)
            self._compare_layouts(sound)
            self._line.at("the defaults once more")
            for cell in sound:
                self._guarded(cell, self._again)
                finished(cell)
        finally:
            self._line.close()

    def evidence(self, cell: Cell) -> Evidence:
        """The trials of the cell's layout, for comparison with the cell's default."""
        trials = self._ledger.trials(cell.layout)
        known = self._evidence.get(cell)
        if known is None or known.count != len(trials):
            known = self._evidence[cell] = Evidence(trials, cell.default, self._objective)
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
        """Seconds for the first of `cells`: its part of what is left, half by weight times cost, layouts alike."""
        left = self._start + (1 - COMPARE_SHARE) * self._budget_s - self._clock()
        if math.isinf(left):
            return left
        cost = {c: sum(weight * self.evidence(c).cost_us(w) for w, weight in c.loads) for c in self.cells}
        beside = {c: [d for d in self.cells if d.layout == c.layout] for c in cells}
        parts = [
            EQUAL_SHARE / len(beside[c]) + (1 - EQUAL_SHARE) * cost[c] / sum(cost[d] for d in beside[c]) for c in cells
        ]
        return max(0.0, left) * parts[0] / sum(parts)

    def _fits(self, cell: Cell, workload: Workload, calls: int, until: float, trials: float) -> bool:
        """Whether one round of so many calls is likely to end in time, and the trials are as many as are left."""
        in_time = self._clock() + calls * self.evidence(cell).cost_us(workload) / 1e6 < until
        return in_time and self._trials.begun + calls <= trials

    # --- the parts of a run -------------------------------------------------------------------------------------
    # Races are yielded, and asked for when the executor is free; None waits until all before are stored.

    def _baseline(self, cell: Cell) -> None:
        """The default on every workload: one round whatever the budget, since every row needs a measured time."""
        missing = [w for w, _ in cell.loads if self.evidence(cell).default_us(w) is None]
        if not missing:
            return
        self._line.at(cell.name)
        self._trials.require(cell)
        self._line.expect(len(missing))
        until = self._start + BASELINE_SHARE * self._budget_s
        alone = [(cell, cell.default)]
        self._trials.run(self._trials.race(alone, w, BASELINE, ENOUGH_ROUNDS, until) for w in missing)

    def _search(self, cell: Cell, *, until: float, trials: float) -> None:
        self._line.at(cell.name)
        earlier = self.cells[: self.cells.index(cell)]
        won = [best(self.evidence(c), c.loads) for c in earlier if c.batches == cell.batches]
        cell.space.seed(winner.variant for winner in won if winner)  # block sizes have much in common
        probes = probing.probes(self.evidence(cell), cell.loads, self._reach)
        now, left = self._clock(), trials - self._trials.begun
        others, all_of = len(cell.loads) - len(probes), len(cell.loads)
        search_until = now + SEARCH_SHARE * (until - now)
        search_trials = _less(trials, left, (2 + RIVALS) * all_of)  # the default, the leader and its rivals
        explore_until = now + EXPLORE_SHARE * (until - now)
        explore_trials = _less(search_trials, left, (1 + FINALISTS) * others)
        search = self._strategy(cell.space)
        batch, seen = next(search, []), list[Variant]()
        rounds = ROUNDS if len(probes) == len(cell.loads) else ENOUGH_ROUNDS
        while batch and self._measure(cell, batch, probes, rounds, explore_until, explore_trials):
            seen += batch
            scores = self.evidence(cell).scores(probes, among=seen)  # no others: a resumed run takes the same steps
            share = roofline.share(self._ledger.spec, self._ledger.device, cell, self.evidence(cell))
            self._line.best(min([1.0, *scores.values()]), share)
            try:
                batch = search.send(scores)
            except StopIteration:
                break
        self._settle(cell, search_until, search_trials)
        self._confirm(cell, until, trials)
        self._divide(cell, until, trials)

    def _settle(self, cell: Cell, until: float, trials: float) -> None:
        """What is near the best, on the workloads that the search did not look at, the best first."""
        scores = self.evidence(cell).scores(cell.loads)
        ranked = sorted(scores, key=lambda v: (scores[v], v.name))
        self._measure(cell, ranked, cell.loads, ROUNDS, until, trials)

    def _measure(
        self, cell: Cell, batch: Sequence[Variant], loads: Loads, rounds: int, until: float, trials: float
    ) -> bool:
        """Some variants on some of the workloads; False when time or trials ran out before the end."""
        todo = self._pending(cell, batch, loads)
        if not todo:
            return True
        lacking = {w for workloads in todo.values() for w in workloads}
        left = self._left(trials)
        room = max(int(left > 1), left // len(lacking) - 1)  # variants on all of them, beside the default
        before = len(self.left_out)
        if room < len(todo):
            some = f"{len(lacking)} of {len(cell.loads)} workloads"
            self.left_out.append(f"{cell.name}: {len(todo) - room} variants on {some}")
            todo = {v: todo[v] for v in list(todo)[:room]}
        self._line.expect(sum(map(len, todo.values())))
        now = self._clock()
        ready = self._trials.compile(cell, list(todo), now + COMPILE_SHARE * (until - now)) if todo else []
        late = sum(not self._trials.was_checked(cell, v) for v in todo)
        if late:
            self.left_out.append(f"{cell.name}: {late} variants not compiled")
        self._line.expect(-sum(len(workloads) for v, workloads in todo.items() if v not in ready))
        self._trials.run(self._races(cell, ready, todo, [w for w, _ in loads], rounds, until, trials))
        return len(self.left_out) == before

    def _races(
        self, cell: Cell, ready: Sequence[Variant], todo: dict[Variant, list[Workload]], workloads: Sequence[Workload],
        rounds: int, until: float, trials: float,
    ) -> Iterator[Race | None]:  # fmt: skip
        """The variants beside the default, workload by workload. The first two decide who is left for the others, which
        do not depend on one another."""
        order = [w for w in probing.order(self.evidence(cell), cell.loads) if w in workloads]
        for number, workload in enumerate(order):
            if number <= probing.PROBES:
                yield None
            pending = [v for v, missing in self._pending(cell, ready, cell.loads).items() if workload in missing]
            room = max(1, min(len(pending), self._left(trials) - 1))
            if pending and not self._fits(cell, workload, 1 + room, until, trials):
                some = f"{len(order) - number} of {len(cell.loads)} workloads"
                self.left_out.append(f"{cell.name}: {len(pending)} variants on {some}")
                return
            pending = pending[:room]  # of a budget of trials the rest is spent on the first, which promise most
            self._line.expect(len(pending) - sum(workload in todo[v] for v in ready))
            if pending:
                contenders = [(cell, v) for v in (cell.default, *pending)]
                best_known = probing.best_known(self.evidence(cell), workload)
                self._searched.add(cell)
                yield self._trials.race(contenders, workload, SEARCH, rounds, until, best_known=best_known)

    def _left(self, trials: float) -> int:
        """How many of so many trials are left; of no bound a number that no run comes to."""
        return int(min(trials, 1e9)) - self._trials.begun

    def _pending(self, cell: Cell, variants: Sequence[Variant], wanted: Loads) -> dict[Variant, list[Workload]]:
        return probing.pending(self.evidence(cell), cell.loads, variants, wanted, self._reach)

    def _confirm(self, cell: Cell, until: float, trials: float) -> None:
        """Fresh samples for the variant that looks best, side by side with those that the search cannot tell from it,
        as far as the budget allows; until the decision rests on such samples."""
        before = list[Variant]()
        while (found := leaders(self.evidence(cell), cell.loads)) and found != before:
            before = found
            left = self._left(trials)
            round_s = sum(self.evidence(cell).cost_us(w) for w, _ in cell.loads) / 1e6
            in_time = min(1e9, (until - self._clock()) / max(1e-9, CONFIRM_ROUNDS * round_s))
            many = max(1, min(left // len(cell.loads), int(in_time)) - 1)
            if not self._fresh(cell, found[:many], [w for w, _ in cell.loads], until, trials):
                return

    def _divide(self, cell: Cell, until: float, trials: float) -> None:
        """Fresh samples, beside what was chosen, for variants that would serve a part of the batches better."""
        before = None
        while cell.batches != "all":
            winner = best(self.evidence(cell), cell.loads)
            chosen = winner.variant if winner else cell.default
            wanted = divisions(self.evidence(cell), cell.loads, chosen)
            if not wanted or wanted == before:
                return
            before = wanted
            for variant, part in wanted:
                if not self._fresh(cell, [chosen, variant], [w for w, _ in part], until, trials):
                    return

    def _fresh(
        self, cell: Cell, variants: Sequence[Variant], workloads: Sequence[Workload], until: float, trials: float
    ) -> bool:
        """Rounds for `variants` beside the default on some workloads, but for those on which there are enough: of a run
        that was killed, or of another tuner that works beside this one. False where one failed or a budget ended."""
        asked = list(dict.fromkeys([cell.default, *variants]))
        if len(self._trials.checked(cell, asked)) < len(asked):
            return False
        self._line.expect(len(workloads) * (len(asked) - 1))
        before = len(self.left_out)

        def races() -> Iterator[Race]:
            for workload in workloads:
                if set.intersection(*(self.evidence(cell).sessions(v, workload, CONFIRM) for v in asked)):
                    self._line.expect(1 - len(asked))
                    continue
                if not self._fits(cell, workload, len(asked), until, trials):
                    self.left_out.append(f"{cell.name}: fresh samples to confirm {variants[-1].name}")
                    return
                yield self._trials.race([(cell, v) for v in asked], workload, CONFIRM, CONFIRM_ROUNDS, until)

        self._trials.run(races())
        if len(self.left_out) > before:
            return False
        self._searched.add(cell)
        return True

    def _compare_layouts(self, cells: Sequence[Cell]) -> None:
        """Rounds over the chosen variants of all layouts: block sizes measured minutes apart do not compare."""
        self._line.at("comparing block sizes")
        wanted: list[tuple[Workload, list[Contender]]] = []
        for workload in dict.fromkeys(w for cell in cells for w, _ in cell.loads):
            finalists = [c for cell in cells if workload in dict(cell.loads) for c in self._finalists(cell)]
            known = [self.evidence(cell).sessions(v, workload, COMPARE) for cell, v in finalists]
            if len({cell.layout for cell, _ in finalists}) >= 2 and not set.intersection(*known):
                wanted.append((workload, [c for c in finalists if self._trials.checked(c[0], [c[1]])]))
        self._line.expect(sum(len(contenders) for _, contenders in wanted))
        self._trials.run(self._comparisons(wanted))

    def _comparisons(self, wanted: Sequence[tuple[Workload, list[Contender]]]) -> Iterator[Race]:
        until = self._start + self._budget_s
        for workload, contenders in wanted:
            if not contenders or not self._fits(contenders[0][0], workload, len(contenders), until, math.inf):
                self.left_out.append("rounds over all block sizes: their step times are of different minutes")
                return
            yield self._trials.race(contenders, workload, COMPARE, ROUNDS, until)

    def _finalists(self, cell: Cell) -> list[Contender]:
        """The cell's default and what replaces it, if anything does."""
        winner = best(self.evidence(cell), cell.loads)
        return [(cell, cell.default), (cell, winner.variant)] if winner else [(cell, cell.default)]

    def _again(self, cell: Cell) -> None:
        """The default once more where this run measured others: how much the machine changed meanwhile."""
        if cell in self._searched:
            self._trials.run(self._repeats(cell))

    def _repeats(self, cell: Cell) -> Iterator[Race]:
        until = self._start + self._budget_s
        for workload, _ in cell.loads:
            if (cell.layout, cell.default) in self._ledger.arrived(0, workload, AFTER):
                continue  # by another tuner that works beside this one
            if not self._fits(cell, workload, AFTER_ROUNDS, until, math.inf):
                return
            self._line.expect(1)
            yield self._trials.race([(cell, cell.default)], workload, AFTER, AFTER_ROUNDS, until)


def _less(trials: float, left: float, wanted: int) -> float:
    """`trials` less the `wanted` ones that are kept for later: at most KEPT_SHARE of those `left`."""
    return trials if math.isinf(left) else trials - min(wanted, KEPT_SHARE * left)
