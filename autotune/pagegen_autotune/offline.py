"""Tuning for a device that is not here: the cost model ranks, the real compiler prunes, and the model ranks again by
what the compiler made of each candidate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagegen import costs, targets
from pagegen.costs.rules import broken_by_code
from pagegen.selection.predicted import PREDICTED_MARGIN
from pagegen.spec import AttentionSpec, CacheLayout, CompileFacts, Device, Status, Variant, Workload
from pagegen_autotune import tree
from pagegen_autotune.cells import Cell
from pagegen_autotune.compiling import Compiled, Compilers, Task
from pagegen_autotune.known import FORMS, facts_of
from pagegen_autotune.objective import OBJECTIVES, Loads, Objective, mean
from pagegen_autotune.partition import REGRET_BOUND
from pagegen_autotune.portfolio import Decision
from pagegen_autotune.shortlist import plain, shape, spread
from pagegen_autotune.space import resources

# Candidates of a cell that are compiled, about a second each; at most so many of one shape of tiles and warps.
MAX_COMPILED, MAX_ALIKE = 16, 3
# So many of the best on each of a small, a middling and a large batch are ranked on all batches.
FINALISTS = 24
# Steps uphill in the cost model, from so many of the best on each of those batches.
CLIMBS, LEADERS = 4, 3
# Candidates within 2 % of the best are as good: the one that takes fewer resources is chosen.
TIE = 0.02


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A variant that a compiler or its code ruled out: the rule, and why."""

    rule: str
    reason: str


@dataclass
class Prediction:
    """Predicts and compiles for one spec and device, and chooses by `objective`. `named`, where given, are the only
    variants to consider in place of the space. `rejected` holds the variants that did not compile or whose code breaks
    a rule, by layout and name; `facts` what the compiler told of all that it took, by layout, variant and form."""

    spec: AttentionSpec
    device: Device
    fit: costs.Fit | None = None
    named: Callable[[Cell], Sequence[Variant]] | None = None
    objective: Objective = mean
    rejected: dict[tuple[CacheLayout, str], Rejected] = field(default_factory=dict)
    facts: dict[tuple[CacheLayout, Variant, bool], CompileFacts] = field(default_factory=dict)
    _shortlists: dict[Cell, list[Variant]] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], float] = field(default_factory=dict)

    # --- before anything is compiled --------------------------------------------------------------------------------

    def shortlist(self, cell: Cell) -> list[Variant]:
        """The candidates of a cell that are worth compiling, the most promising first, after the default."""
        if cell not in self._shortlists:
            self._shortlists[cell] = [cell.default, *self._promising(cell)]
        return self._shortlists[cell]

    def _promising(self, cell: Cell) -> list[Variant]:
        """The variants that may win, by the estimates: over all batches of the cell, then on single ones. All of those
        that were named."""
        if self.named is not None:
            return [v for v in dict.fromkeys(self.named(cell)) if v != cell.default]
        pool = self._pool(cell)
        heads = [self._ranked(cell, pool, [load])[:FINALISTS] for load in spread(cell.loads)]
        finalists = list(dict.fromkeys(v for head in heads for v in head))
        best = [self._ranked(cell, finalists, cell.loads), *(self._ranked(cell, finalists, [w]) for w in cell.loads)]
        ordered = [*best[0][: MAX_COMPILED // 2], *(v for turn in zip(*best, strict=True) for v in turn)]
        alike: Counter[tuple[Any, ...]] = Counter()
        found: list[Variant] = []
        for variant in dict.fromkeys(ordered):
            alike[shape(variant)] += 1
            if alike[shape(variant)] <= MAX_ALIKE and self._may_win(cell, variant):
                found.append(variant)
        return found[:MAX_COMPILED]

    def _may_win(self, cell: Cell, variant: Variant) -> bool:
        """Whether the estimates leave it possible that the variant beats the default somewhere by the margin that a
        choice needs: they may be off by half of it."""
        limit = 1 - PREDICTED_MARGIN / 2
        return any(self.us(cell, variant, w) <= limit * self.us(cell, cell.default, w) for w, _ in cell.loads)

    def _pool(self, cell: Cell) -> list[Variant]:
        """The variants on the way up from the cost model's candidates, the default and what won elsewhere: the model is
        smooth, and a climb asks it for a sixth of the space's points."""
        offered = costs.candidates(self.spec, cell.layout, self.device.target, decode=cell.batches != "mixed")
        legal = [v for v in offered if not costs.legal(self.spec, cell.layout, v, self.device)]
        pool = dict.fromkeys([*cell.space.seeds, *legal, *cell.space.neighbours(cell.default)])
        climbed: set[Variant] = {cell.default}
        for _ in range(CLIMBS):
            heads = [self._ranked(cell, pool, [load])[:LEADERS] for load in spread(cell.loads)]
            leaders = [v for v in dict.fromkeys(v for head in heads for v in head) if v not in climbed]
            climbed.update(leaders)
            pool.update(dict.fromkeys(v for leader in leaders for v in cell.space.neighbours(leader)))
        found = dict.fromkeys(plain(self.spec, v) for v in pool)
        return [v for v in found if v != plain(self.spec, cell.default)]

    def _ranked(self, cell: Cell, variants: Iterable[Variant], loads: Loads) -> list[Variant]:
        return sorted(variants, key=lambda v: (self._sum_us(cell, loads, v), resources(v), v.name))

    # --- compiling ---------------------------------------------------------------------------------------------------

    def tasks(self, cells: Iterable[Cell]) -> list[Task]:
        """What is left to compile of the cells' shortlists, the most promising of each cell first."""
        queues = [self._tasks(cell) for cell in cells]
        turns = [
            task for turn in range(max(map(len, queues), default=0)) for q in queues for task in q[turn : turn + 1]
        ]
        return list(dict.fromkeys(turns))

    def _tasks(self, cell: Cell) -> list[Task]:
        return [
            Task(layout=cell.layout, variant=variant, decode=decode)
            for variant in self.shortlist(cell)
            for decode in FORMS[cell.batches]
            if not self.seen(cell.layout, variant, decode)
        ]

    def seen(self, layout: CacheLayout, variant: Variant, decode: bool) -> bool:
        """Whether it is known what a compiler makes of a kernel."""
        return (layout, variant, decode) in self.facts or (layout, variant.name) in self.rejected

    def compile(
        self, compilers: Compilers, cells: Sequence[Cell], may_go_on: Callable[[], bool]
    ) -> Iterator[tuple[Task, Compiled]]:
        """Compiles the shortlists of the cells, as far as `may_go_on` allows; yields each kernel as it is done."""
        for task, compiled in compilers.run(self.tasks(cells), may_go_on):
            self.take(task, compiled)
            yield task, compiled

    def take(self, task: Task, compiled: Compiled) -> None:
        """Keeps what a compiler made of a kernel."""
        where = (task.layout, task.variant.name)
        if compiled.facts is None:
            words = {Status.COMPILE_ERROR: "does not compile", Status.TIMEOUT: "takes too long to compile"}
            what = words.get(compiled.status, "fails in the compiler")
            self.rejected[where] = Rejected(rule=compiled.status.value, reason=f"{what}: {compiled.detail}")
            return
        target = self.device.target
        facts = facts_of(
            compiled.facts, self.spec, task.layout, task.variant, target, decode=task.decode,
            code_hash=targets.code_hash(target),
        )  # fmt: skip
        self.facts[task.layout, task.variant, task.decode] = facts
        for rule, reason in broken_by_code(facts, self.device)[:1]:
            self.rejected[where] = Rejected(rule=rule, reason=reason)

    # --- deciding ----------------------------------------------------------------------------------------------------

    def decide(self, cell: Cell) -> Decision:
        """The predicted best of what compiled for a cell, or the default where nothing is clearly better; by a tree
        over the batch's integers where one variant would lose more than the bound of a portfolio."""
        others = self._shortlists.get(cell, [cell.default])[1:]  # none where no time was left to look for them
        sound = [v for v in others if self._is_sound(cell, v)]
        chosen = self._best(cell, cell.loads, cell.default, sound)
        plan = self._plan(cell, chosen, sound)
        served = {w: leaf.variant for leaf in tree.leaves(plan) for w in leaf.part}
        before = {w: self.us(cell, cell.default, w) for w, _ in cell.loads}
        after = {w: self.us(cell, served[w], w) for w, _ in cell.loads}
        objectives = {name: (of(before, cell.loads), of(after, cell.loads)) for name, of in OBJECTIVES.items()}
        return Decision(
            batches=cell.batches,
            default=cell.default,
            chosen=chosen,
            default_us=objectives["mean"][0],
            chosen_us=objectives["mean"][1],
            weight=math.fsum(share for _, share in cell.loads),
            confidence=self._words(cell, chosen, served, sound),
            compared=sum(any(self.seen(cell.layout, v, decode) for decode in FORMS[cell.batches]) for v in others),
            regret=self._regret(cell, served, sound),
            tree=plan,
            by_workload={w: (before[w], after[w]) for w in before},
            objectives=objectives,
        )

    def _best(self, cell: Cell, loads: Loads, base: Variant, sound: Sequence[Variant]) -> Variant:
        """The variant that is predicted to serve `loads` clearly better than `base`, of equals the one that takes fewer
        resources; else `base`."""
        times = {v: self._sum_us(cell, loads, v) for v in sound}
        best = min(times.values(), default=math.inf)
        if best > (1 - PREDICTED_MARGIN) * self._sum_us(cell, loads, base):
            return base
        return min((v for v in sound if times[v] <= (1 + TIE) * best), key=lambda v: (resources(v), v.name))

    def _plan(self, cell: Cell, chosen: Variant, sound: Sequence[Variant]) -> tree.Tree:
        """The smallest tree that loses no more than REGRET_BOUND by the predictions, else the cheapest. One leaf where
        a row's result must not depend on what it is batched with."""

        def best_of(part: tree.Part) -> tuple[float, Variant]:
            own = [load for load in cell.loads if load[0] in part]
            variant = chosen if len(own) == len(cell.loads) else self._best(cell, own, chosen, sound)
            return self._sum_us(cell, own, variant), variant

        whole = [w for w, _ in cell.loads]
        if cell.batches == "all":
            return tree.Leaf(variant=chosen, part=tuple(whole))
        found = tree.grow(whole, best_of)
        for one in found:
            served = {w: leaf.variant for leaf in tree.leaves(one) for w in leaf.part}
            if self._regret(cell, served, sound) <= REGRET_BOUND:
                return one
        return found[-1]

    def _regret(self, cell: Cell, served: Mapping[Workload, Variant], sound: Sequence[Variant]) -> float:
        """The excess over the predicted best variant of every batch."""
        known = [cell.default, *sound]
        ideal = {w: min(self.us(cell, v, w) for v in known) for w, _ in cell.loads}
        ours = {w: self.us(cell, served[w], w) for w, _ in cell.loads}
        return self.objective(ours, cell.loads) / self.objective(ideal, cell.loads) - 1

    def _sum_us(self, cell: Cell, loads: Loads, variant: Variant) -> float:
        """The objective over `loads`, times their weight: costs of parts add up to that of all, for other objectives
        than the mean as good as they can."""
        times = {w: self.us(cell, variant, w) for w, _ in loads}
        return self.objective(times, loads) * math.fsum(share for _, share in loads)

    def _is_sound(self, cell: Cell, variant: Variant) -> bool:
        compiled = all((cell.layout, variant, decode) in self.facts for decode in FORMS[cell.batches])
        return compiled and (cell.layout, variant.name) not in self.rejected

    def _words(self, cell: Cell, chosen: Variant, served: Mapping[Workload, Variant], sound: Sequence[Variant]) -> str:
        """What the choice rests on."""
        by = "predicted" if self.fit is None else f"predicted by the cost model {self.fit}"
        used = list(dict.fromkeys([chosen, *served.values()]))
        if used != [cell.default]:
            made = "; ".join(self._described(cell, variant) for variant in used if variant != cell.default)
            return f"{by}; of {len(sound)} that compiled for {self.device.target}: {made}"
        others = self._shortlists.get(cell, [])[1:]
        if cell in self._shortlists and not others:
            return f"{by}; the default stays: nothing else is {PREDICTED_MARGIN:.0%} faster in the cost model"
        if not any(self.seen(cell.layout, v, decode) for v in others for decode in FORMS[cell.batches]):
            return f"{by}; the default stays: the budget left no time to compile for {self.device.target}"
        return f"{by}; the default stays: none of {len(sound)} others that compiled is {PREDICTED_MARGIN:.0%} faster"

    def _described(self, cell: Cell, variant: Variant) -> str:
        """What a compiler made of a variant, and what its programs wait for on the batch that weighs most."""
        told = [self.facts[cell.layout, variant, decode] for decode in FORMS[cell.batches]]
        heaviest = cell.loads[0][0]
        bound = costs.parts(self.spec, cell.layout, variant, self.device, heaviest, facts=told[0]).bound
        return f"{' and '.join(map(_words_of, told))}, waiting for {bound}"

    # --- times -------------------------------------------------------------------------------------------------------

    def us(self, cell: Cell, variant: Variant, workload: Workload) -> float:
        """The predicted time of one call, by the compiler's facts where they are known."""
        form = (True,) if cell.batches == "decode" else (workload.is_decode,) if cell.batches == "all" else (False,)
        facts = self.facts.get((cell.layout, variant, form[0]))
        key = (cell.layout, variant, workload, facts is not None, form)
        if key not in self._known:
            self._known[key] = costs.predict_us(
                self.spec, cell.layout, variant, self.device, workload, facts=facts, fit=self.fit
            )
        return self._known[key]

    def rejections(self, layout: CacheLayout) -> dict[str, dict[str, Any]]:
        """How many variants of a layout each rule ruled out after compiling, with one of them and its reason."""
        found: dict[str, dict[str, Any]] = {}
        for (where, name), one in self.rejected.items():
            if where == layout:
                row = found.setdefault(one.rule, {"variants": 0, "reason": one.reason, "example": name})
                row["variants"] += 1
        return found

    def reasons(self) -> dict[str, tuple[str, ...]]:
        """The rejected variants with their rule, for counting."""
        return {
            f"{name} at block size {layout.block_size} {layout.order}": (f"{one.rule.replace('_', ' ')} (compiled)",)
            for (layout, name), one in self.rejected.items()
        }


def _words_of(facts: CompileFacts) -> str:
    """What a compiler made of a kernel, in words."""
    loop = f", {facts.loop['instructions']} instructions a tile" if facts.loop.get("instructions") else ""
    return (
        f"{facts.registers} registers, {facts.spills or 'no'} spills, {facts.shared_bytes} bytes of shared memory, "
        f"{facts.programs_per_unit} programs a multiprocessor{loop}"
    )
