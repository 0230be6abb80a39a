"""The ways to do one attention step, as a graph: states of the data, and the work that leads between them.

    operands --attend--> attended
    operands --attend in splits--> partials --reduce--> attended
    operands --gather--> contiguous --dense--> attended

Every edge carries its expected time; the plan is the cheapest path. An edge that nothing serves is not there, so
that a fallback is one more edge and not a special case.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import networkx as nx

from pagegen import costs, targets
from pagegen.spec import AttentionSpec, CacheLayout, Device, TritonVariant, Variant, Workload

Graph: TypeAlias = "nx.MultiDiGraph[str]"

# What a dense step costs beside its bytes: one launch to gather K and V each, one for each product and the softmax.
DENSE_LAUNCHES = 5
DENSE_LAUNCH_US = 5.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One edge: the work `name` turns state `source` into `target` in an expected `us` microseconds."""

    name: str
    source: str
    target: str
    us: float


@dataclass(frozen=True, kw_only=True)
class Path:
    """Steps from the operands to the result, and their expected time in all."""

    steps: tuple[Step, ...]

    @property
    def us(self) -> float:
        return sum(step.us for step in self.steps)

    @property
    def name(self) -> str:
        return " + ".join(step.name for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return {"path": self.name, "us": self.us, "steps": [asdict(step) for step in self.steps]}


def step_graph(spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device, workload: Workload) -> Graph:
    """Every way to do the step on `device` with `variant`'s tiles. Times are predictions (`pagegen.costs`)."""
    graph: Graph = nx.MultiDiGraph()
    if targets.unsupported(spec, device.target) is None:
        for step in _kernel_steps(spec, layout, variant, device, workload):
            graph.add_edge(step.source, step.target, key=step.name, step=step, us=step.us)
    gathered = costs.kv_bytes(spec, layout, workload)
    per_us = device.bandwidth_gb_s * 1e3
    for step in (
        Step(name="gather", source="operands", target="contiguous", us=2 * gathered / per_us + 2 * DENSE_LAUNCH_US),
        Step(
            name="dense", source="contiguous", target="attended",
            us=costs.roofline_us(spec, layout, device, workload) + (DENSE_LAUNCHES - 2) * DENSE_LAUNCH_US,
        ),
    ):  # fmt: skip
        graph.add_edge(step.source, step.target, key=step.name, step=step, us=step.us)
    return graph


def _kernel_steps(
    spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device, workload: Workload
) -> list[Step]:
    us = costs.predict_us(spec, layout, variant, device, workload)
    if not isinstance(variant, TritonVariant):  # a C++ kernel divides and merges inside one call
        return [Step(name="attend", source="operands", target="attended", us=us)]
    whole_us = costs.predict_us(spec, layout, replace(variant, num_splits=1), device, workload)
    steps = [Step(name="attend", source="operands", target="attended", us=whole_us)]
    if variant.num_splits > 1:
        reduce_us = costs.reduce_us(spec, layout, variant, device, workload)
        steps.append(Step(name="attend in splits", source="operands", target="partials", us=us - reduce_us))
        steps.append(Step(name="reduce", source="partials", target="attended", us=reduce_us))
    return steps


def paths(graph: Graph) -> list[Path]:
    """Every path from the operands to the result, cheapest first."""
    found = [
        Path(steps=tuple(graph.edges[edge]["step"] for edge in edges))  # type: ignore[index]
        for edges in nx.all_simple_edge_paths(graph, "operands", "attended")
    ]
    return sorted(found, key=lambda path: (path.us, path.name))
