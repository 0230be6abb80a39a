"""What both ways of tuning share: the cells of a run, and how their decisions become stored rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagegen import costs, targets
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CompileFacts,
    Device,
    DispatchRule,
    Profile,
    Target,
    Variant,
    Workload,
)
from pagegen.spec.result import INTERIM
from pagegen_autotune import fitting, known, tree
from pagegen_autotune.cells import Cell
from pagegen_autotune.ledger import Store
from pagegen_autotune.objective import OBJECTIVES, Loads, Objective
from pagegen_autotune.portfolio import Decision, dispatch_rule
from pagegen_autotune.report import Row, count_reasons
from pagegen_autotune.search import STRATEGIES, Strategy, given
from pagegen_autotune.space import Prior, space_around
from pagegen_autotune.winners import elsewhere

# The cost model is asked about the heaviest batches of a class: they are most of its time, and it answers some 1,500
# times a second.
PRIOR_LOADS = 2


def default_variants(spec: AttentionSpec, layout: CacheLayout, target: Target) -> dict[str, Variant]:
    """The classes of batches, the narrower first, and their default variants. Where a row's result must not depend on
    what it is batched with, one variant serves all."""
    mixed = targets.default_variant(spec, layout, target, decode=False)
    if spec.batch_invariant:
        return {"all": mixed}
    return {"decode": targets.default_variant(spec, layout, target, decode=True), "mixed": mixed}


class Job:
    """One tuning run, measured or predicted: what is asked, and what becomes of the answers."""

    def __init__(
        self, spec: AttentionSpec, profile: Profile, device: Device, store: Store, layouts: Sequence[CacheLayout],
        strategy: str, objective: str, only: Mapping[CacheLayout, Mapping[str, Sequence[Variant]]] | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.profile = profile
        self.device = device
        self.store = store
        self.strategy: Strategy = STRATEGIES[strategy]
        self.whole = strategy == "exhaustive"
        self.objective: Objective = OBJECTIVES[objective]
        self.objective_name = objective
        self.code_hash = targets.code_hash(device.target)
        self.fit: costs.Fit | None = None
        self.refit()
        self.cells = [c for layout in layouts for c in self._cells(layout)]
        self.layouts = layouts
        self.only = only
        if only is not None:
            named = {cell.space: only[cell.layout].get(cell.batches, ()) for cell in self.cells}
            self.strategy = lambda space: given(named[space])

    def refit(self) -> None:
        """Fits the cost model to the device's trials anew."""
        self.fit = fitting.of_store(self.store, self.device, self.code_hash)

    def defaults(self, layout: CacheLayout) -> dict[str, Variant]:
        """See `default_variants`."""
        return default_variants(self.spec, layout, self.device.target)

    def _cells(self, layout: CacheLayout) -> list[Cell]:
        cells = []
        for batches, start in self.defaults(layout).items():
            loads: dict[Workload, float] = {}
            for workload, weight in self.profile:
                if batches in ("all", "decode" if workload.is_decode else "mixed"):
                    loads[workload] = loads.get(workload, 0.0) + weight  # a profile may hold one batch twice
            # heaviest first: what a short budget leaves out must matter least
            ordered = sorted(loads.items(), key=lambda load: -load[1] * (load[0].total_context + load[0].total_q))
            if ordered:
                seeds = elsewhere(self.store, self.spec, layout, self.device, batches)
                prior = self._prior(layout, ordered)
                space = space_around(start, self.spec, layout, self.device, prior=prior, seeds=seeds)
                cells.append(Cell(layout=layout, batches=batches, space=space, loads=tuple(ordered)))
        return cells

    def _prior(self, layout: CacheLayout, loads: Loads) -> Prior | None:
        """What the cost model expects of a variant on the heaviest of `loads`; None for a device of unknown rates."""
        if not self.device.bandwidth_gb_s > 0:
            return None

        def expected_us(variant: Variant) -> float:
            heaviest = loads[:PRIOR_LOADS]
            # not by the fit: it moves with every trial, and a resumed run must take the steps of the first
            return sum(weight * costs.predict_us(self.spec, layout, variant, self.device, w) for w, weight in heaviest)

        return expected_us

    def row(self, layout: CacheLayout, decisions: Sequence[Decision], kind: str, evidence: dict[str, Any]) -> Row:
        """The rule of `layout` from its decisions, as a row. No cell of it is served by a variant that is not legal
        here: the default is put there."""
        if self.fit is not None:
            evidence = {**evidence, fitting.COST_MODEL: self.fit.to_dict()}
        verb = "tuned" if kind == "measured" else "predicted, not measured,"
        defaults = self.defaults(layout)
        made = dispatch_rule(
            decisions, defaults, kind=kind, source=f"{verb} on {self.profile.name} for {self.device.name}",
            evidence={"profile": self.profile.name, "device": self.device.name, "objective": self.objective_name,
                      **evidence},
        )  # fmt: skip
        safe = list(defaults.values())[-1]
        rule, looked_at = tree.checked(
            made, lambda v: v in defaults.values() or not costs.legal(self.spec, layout, v, self.device), safe
        )
        rule.evidence.update(rule=tree.text(rule), cells_checked=looked_at)
        return Row(layout=layout, rule=rule, decisions=tuple(decisions))

    def save(self, row: Row, *, interim: bool = False) -> bool:
        """Stores a row's rule. An `interim` one, for the case that the run is cut short, says so, and is not stored
        where it is what an earlier run ended with. False, and nothing is stored, where the run compared nothing and an
        earlier one did: the newest rule serves, and must not be one that only says that time ran out."""
        rule = row.rule
        stored = self.store.portfolio(
            self.spec, row.layout, self.device.target, self.code_hash, device=self.device
        )  # fmt: skip
        compared = any(d.compared for d in row.decisions)
        if stored is not None and not compared and _compared(stored, str(rule.evidence["kind"])):
            return False
        if interim:
            if stored == rule:
                return True
            rule = replace(rule, evidence={**rule.evidence, INTERIM: True})
        self.store.save_portfolio(
            spec=self.spec, layout=row.layout, device=self.device, profile=self.profile, rule=rule,
            code_hash=self.code_hash,
        )  # fmt: skip
        return True

    def save_known(self, row: Row, facts: Iterable[CompileFacts | None]) -> None:
        """Stores what is known without a run: what a compiler told, and what the cost model expects of the variants
        that a row's decisions name, on the profile's batches."""
        loads = {cell.batches: [load for load, _ in cell.loads] for cell in self.cells if cell.layout == row.layout}
        told = list(filter(None, facts))
        expected = [
            prediction
            for batches, variant in named(row)
            for prediction in known.predictions(
                self.spec,
                row.layout,
                variant,
                self.device,
                loads[batches],
                self.code_hash,
                facts={(facts.variant, facts.form): facts for facts in told},
                fit=self.fit,
            )  # fmt: skip
        ]
        with self.store.atomic():  # all is at hand: no other writer waits for a compiler
            for found in told:
                self.store.record_facts(found)
            for prediction in expected:
                self.store.record_prediction(prediction)

    def rejected(self, *others: dict[str, tuple[str, ...]]) -> dict[str, int]:
        return count_reasons([*(cell.space.rejected for cell in self.cells), *others])


def kept(row: Row) -> str:
    """What is said of a row that was not stored."""
    where = f"block size {row.layout.block_size} {row.layout.order}"
    return f"{where}: nothing was compared, the rule in the database stays"


def _compared(rule: DispatchRule, kind: str) -> bool:
    """Whether a stored rule rests on a comparison with the default of some kind, measured or predicted."""
    figures = [rule.evidence.get(batches) for batches in known.FORMS]
    found = any(isinstance(told, dict) and told.get("compared", 0) > 0 for told in figures)
    return found and rule.evidence.get("kind") == kind


def named(row: Row) -> list[tuple[str, Variant]]:
    """The variants of a row's decisions, with the class of batches of each."""
    return [(d.batches, variant) for d in row.decisions for variant in dict.fromkeys((*d.variants, d.default))]
