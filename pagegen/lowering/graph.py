"""The step graph's nouns: steps, paths, and which path is cheapest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import networkx as nx

from pagegen.spec import Variant

# Nodes are states (str) and steps: two ways between the same states are two nodes, which a simple digraph can hold.
Graph: TypeAlias = "nx.DiGraph[str | Step]"
START, END = "projected", "attended"


@dataclass(frozen=True, kw_only=True)
class Step:
    """Work that turns state `source` into `target` in `us` microseconds, which were `measured` or are predicted.
    `does` names the public function that does it, `variant` the kernel where there is a choice."""

    name: str
    source: str
    target: str
    us: float
    does: str
    variant: Variant | None = None
    measured: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return {
            "step": self.name,
            "from": self.source,
            "to": self.target,
            "us": self.us,
            "cost": "measured" if self.measured else "predicted",
            "does": self.does,
            "variant": None if self.variant is None else self.variant.name,
        }


# The measured time of a step as predicted, in microseconds, or None. Its name says which step is meant: a variant may
# stand in several. Splits and their reduction are asked for as one step, since one call does both.
Measured: TypeAlias = Callable[[Step], "float | None"]


def whole_calls(times_us: Mapping[Variant, float]) -> Measured:
    """The measured times of whole `pagegen.paged_attention` calls over the workload, as trials have them."""

    def measured(step: Step) -> float | None:
        whole = (step.source, step.target, step.does) == ("written", "attended", "pagegen.paged_attention")
        return times_us.get(step.variant) if whole and step.variant is not None else None

    return measured


@dataclass(frozen=True, kw_only=True)
class Path:
    """Steps in a row. Its time is a sum of measured and of predicted times, which are kept apart."""

    steps: tuple[Step, ...]

    @property
    def measured_us(self) -> float:
        return sum(step.us for step in self.steps if step.measured)

    @property
    def predicted_us(self) -> float:
        return sum(step.us for step in self.steps if not step.measured)

    @property
    def us(self) -> float:
        return self.measured_us + self.predicted_us

    @property
    def cost(self) -> str:
        """Whence the time is known: "measured", "predicted" or, where steps differ, "mixed"."""
        kinds = {step.measured for step in self.steps}
        return "mixed" if len(kinds) > 1 else "measured" if kinds == {True} else "predicted"

    @property
    def name(self) -> str:
        return " + ".join(step.name for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return {
            "path": self.name,
            "us": self.us,
            "cost": self.cost,
            "measured_us": self.measured_us,
            "predicted_us": self.predicted_us,
            "steps": [step.to_dict() for step in self.steps],
        }


def add(graph: Graph, step: Step) -> None:
    """Puts a step between its states."""
    graph.add_edge(step.source, step, us=step.us)
    graph.add_edge(step, step.target, us=0.0)


def timed(step: Step, measured: Measured | None) -> Step:
    """The step at its measured time, where there is one."""
    us = measured(step) if measured is not None and not step.measured else None
    return step if us is None else replace(step, us=us, measured=True)


def plan(graph: Graph, source: str = START) -> Path:
    """The cheapest path from `source` to the result."""
    return _path(nx.shortest_path(graph, source, END, weight="us"))


def paths(graph: Graph, source: str = START, *, limit: int | None = None) -> list[Path]:
    """The paths from `source` to the result, cheapest first, the first `limit` of them or all."""
    return [_path(nodes) for nodes in islice(nx.shortest_simple_paths(graph, source, END, weight="us"), limit)]


def _path(nodes: list[Any]) -> Path:
    return Path(steps=tuple(node for node in nodes if isinstance(node, Step)))
