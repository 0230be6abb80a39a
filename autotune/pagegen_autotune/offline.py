"""Tuning for a device that is not here: the cost model ranks, the real compiler has the last word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pagegen import costs, targets
from pagegen.selection.predicted import PREDICTED_MARGIN
from pagegen.spec import AttentionSpec, CompileFacts, Device, Variant, Workload
from pagegen.targets import offline
from pagegen.targets.errors import CompileError
from pagegen_autotune.known import FORMS, facts_of
from pagegen_autotune.portfolio import Decision
from pagegen_autotune.search import Strategy
from pagegen_autotune.session import Cell
from pagegen_autotune.space import resources

# About a second each; the first that compiles without spills ends the search, which nearly always is the first.
MAX_COMPILED = 6


@dataclass
class Prediction:
    """Predicts and compiles for one spec and device. `rejected` holds the variants that did not compile or spill,
    `compiled` what the compiler told of all that it took."""

    spec: AttentionSpec
    device: Device
    strategy: Strategy
    rejected: dict[str, tuple[str, ...]] = field(default_factory=dict)
    compiled: list[CompileFacts] = field(default_factory=list)
    _known: dict[tuple[Cell, Variant, Workload], float] = field(default_factory=dict)

    def decide(self, cell: Cell, may_go_on: Callable[[], bool]) -> Decision:
        """The predicted best of a cell that compiles for the target and keeps its state in registers. `may_go_on` is
        asked before each compilation; when it says no the default stands."""
        ratios = {cell.default: 1.0}
        search = self.strategy(cell.space)
        batch = next(search)
        while True:
            ratios.update({v: self._mean_us(cell, v) / self._mean_us(cell, cell.default) for v in batch})
            try:
                batch = search.send(ratios)
            except StopIteration:
                break
        ranked = sorted(ratios, key=lambda v: (ratios[v], resources(v), v.name))
        chosen = cell.default
        words = f"predicted; the default stays: nothing else is {PREDICTED_MARGIN:.0%} faster in the cost model"
        for variant in ranked[:MAX_COMPILED]:
            if ratios[variant] > 1 - PREDICTED_MARGIN:
                break
            if not may_go_on():
                words = "predicted; the default stays: the budget left no time to compile for the target"
                break
            facts = self._compile(cell, variant)
            if facts is not None:
                chosen, words = variant, f"predicted; compiled for {self.device.target}: {facts}"
                break
        weight = sum(share for _, share in cell.loads)
        ideal = sum(share * min(self._us(cell, v, w) for v in ranked) for w, share in cell.loads) / weight
        return Decision(
            batches=cell.batches,
            default=cell.default,
            chosen=chosen,
            default_us=self._mean_us(cell, cell.default),
            chosen_us=self._mean_us(cell, chosen),
            weight=weight,
            confidence=words,
            compared=len(ratios) - 1,
            regret=self._mean_us(cell, chosen) / ideal - 1,
        )

    def _compile(self, cell: Cell, variant: Variant) -> str | None:
        """What the compiler says of a variant, in words; None when it refuses it or spills registers."""
        try:
            found = [
                offline.compile_facts(self.spec, cell.layout, variant, self.device.target, decode=decode)
                for decode in FORMS[cell.batches]
            ]
        except CompileError as error:
            self.rejected[variant.name] = (f"does not compile: {str(error).strip().splitlines()[0]}",)
            return None
        target, code_hash = self.device.target, targets.code_hash(self.device.target)
        self.compiled += [
            facts_of(facts, self.spec, cell.layout, variant, target, decode=decode, code_hash=code_hash)
            for facts, decode in zip(found, FORMS[cell.batches], strict=True)
        ]
        if any(facts.spills for facts in found):
            self.rejected[variant.name] = ("spills registers",)
            return None
        registers, shared = max(f.registers for f in found), max(f.shared_bytes for f in found)
        return f"{registers} registers, no spills, {shared} bytes of shared memory"

    def _mean_us(self, cell: Cell, variant: Variant) -> float:
        return sum(s * self._us(cell, variant, w) for w, s in cell.loads) / sum(s for _, s in cell.loads)

    def _us(self, cell: Cell, variant: Variant, workload: Workload) -> float:
        key = (cell, variant, workload)
        if key not in self._known:
            self._known[key] = costs.predict_us(self.spec, cell.layout, variant, self.device, workload)
        return self._known[key]
