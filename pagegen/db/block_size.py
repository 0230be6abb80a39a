"""Which block size serves a profile best: step time, slots wasted, metadata, and the sequences that memory admits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pagegen import costs
from pagegen.costs import symbols
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    Device,
    DispatchRule,
    Profile,
    Variant,
    Workload,
    check,
)

OBJECTIVES = ("throughput", "latency")
# Block sizes within 2 % of the best one's time are told apart by what they waste: trials repeat no better than that.
TIE = 0.02


# What a model expects one call of a variant on a batch to take, in microseconds.
Expected = Callable[[Variant, Workload], float]


@dataclass(frozen=True, kw_only=True)
class BlockSizeRow:
    """One block size under a profile.

    Times are microseconds of attention in one layer. `step_us` is the mean over the profile's steps, `p50_us` and
    `p99_us` are over tokens: what a decoded token waits for in one layer, steps weighing by their sequences.
    `waste_share` is slots allocated but unused over slots allocated; `metadata_bytes` is a sequence's share of block
    table, lengths and slot mapping; both are means over the profile. `admitted_sequences` fit the memory at the
    profile's decode contexts (None: no limit was given). `tokens_per_s` is the server's, if attention over all layers
    were all that a step does: steps are the profile's, cut to the admitted sequences.
    `measured_share` is the share of the profile's weight whose time was measured as it is, `scaled_share` that whose
    measured time was scaled by the cost model, since memory cuts the batch; the rest is the model's alone. `kind` is
    "measured" when all was measured as it is, else "predicted". `variants` names what serves, in order of first use.
    `workload_us` are the times of the profile's workloads one by one, each whole, whatever the memory admits.
    """

    block_size: int
    order: str
    step_us: float
    waste_share: float
    metadata_bytes: float
    admitted_sequences: int | None
    tokens_per_s: float
    p50_us: float
    p99_us: float
    kind: str
    measured_share: float
    scaled_share: float
    device: str
    variants: tuple[str, ...]
    reason: str
    workload_us: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return {**asdict(self), "variants": list(self.variants), "workload_us": list(self.workload_us)}


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One workload of the profile as it runs: `us` a layer for `tokens` decoded tokens; `whole_us` before memory cut
    it."""

    us: float
    whole_us: float
    tokens: float
    weight: float
    origin: str  # "measured", "scaled" or "predicted"


def row(
    spec: AttentionSpec,
    layout: CacheLayout,
    device: Device,
    profile: Profile,
    rule: DispatchRule,
    medians: Mapping[tuple[Variant, Workload], float],
    *,
    memory_bytes: int | None = None,
    num_layers: int = 1,
    expected: Expected | None = None,
) -> BlockSizeRow:
    """What one layout gives on `device` with the variants of `rule`. `medians` are this layout's measured times on that
    device; where a workload has none for the variant that serves it, the cost model answers (`expected`, where more
    than the plain model is known) and the row says so.

    Raises ValueError where the cost model is needed and knows no rate of the device.
    """
    check.integer("num_layers", num_layers)
    if memory_bytes is not None:
        check.integer("memory_bytes", memory_bytes)
    if expected is None:

        def expected(variant: Variant, workload: Workload) -> float:
            return costs.predict_us(spec, layout, variant, device, workload)

    admitted = None if memory_bytes is None else _admitted(spec, layout, profile, memory_bytes, num_layers)
    used: dict[str, None] = {}
    steps = []
    for workload, weight in profile:
        variant = rule.choose(workload.num_seqs, workload.max_query_len, workload.max_context_len)
        used.setdefault(variant.name)
        steps.append(_step(expected, variant, workload, weight, medians, admitted))
    step_us = sum(step.weight * step.us for step in steps)
    tokens = sum(step.weight * step.tokens for step in steps)
    shares = {o: math.fsum(step.weight for step in steps if step.origin == o) for o in ("measured", "scaled")}
    measured = all(step.origin == "measured" for step in steps)
    return BlockSizeRow(
        block_size=layout.block_size,
        order=layout.order,
        step_us=step_us,
        waste_share=_waste_share(layout, profile),
        metadata_bytes=_mean_over_sequences(symbols.METADATA_BYTES, spec, layout, profile),
        admitted_sequences=admitted,
        tokens_per_s=tokens / (step_us * num_layers) * 1e6 if step_us else 0.0,
        p50_us=_quantile(steps, 0.5),
        p99_us=_quantile(steps, 0.99),
        kind="measured" if measured else "predicted",
        measured_share=1.0 if measured else shares["measured"],
        scaled_share=shares["scaled"],
        device=device.name,
        variants=tuple(used),
        reason=rule.reason,
        workload_us=tuple(step.whole_us for step in steps),
    )


def ranked(rows: Iterable[BlockSizeRow], objective: str) -> list[BlockSizeRow]:
    """Best first: for "throughput" by tokens/s, for "latency" by p99 and then p50. Rows within TIE of the best are as
    good as it, and go by less waste.

    Rows that are measured throughout come before those that are not, whatever the prediction says.
    """
    check.one_of("objective", objective, OBJECTIVES)
    rows = list(rows)

    def aims(r: BlockSizeRow) -> tuple[float, ...]:
        return (
            (1 / r.tokens_per_s if r.tokens_per_s else math.inf,) if objective == "throughput" else (r.p99_us, r.p50_us)
        )

    def standing(r: BlockSizeRow) -> tuple[bool, bool]:
        return (r.admitted_sequences == 0, r.kind != "measured")

    best = {s: min(aims(r)[0] for r in rows if standing(r) == s) for s in map(standing, rows)}

    def key(r: BlockSizeRow) -> tuple[float, ...]:
        ties = aims(r)[0] <= (1 + TIE) * best[standing(r)]
        return (*standing(r), not ties, r.waste_share if ties else 0.0, *aims(r), r.waste_share, r.block_size)

    return sorted(rows, key=key)


def _step(
    expected: Expected,
    variant: Variant,
    workload: Workload,
    weight: float,
    medians: Mapping[tuple[Variant, Workload], float],
    admitted: int | None,
) -> _Step:
    us = medians.get((variant, workload))
    origin = "predicted" if us is None else "measured"
    tokens = float(sum(n > 0 for n in workload.query_lens))
    if us is None:
        us = expected(variant, workload)
    whole_us = us
    if admitted is not None and admitted < workload.num_seqs:
        if admitted == 0:
            return _Step(us=0.0, whole_us=us, tokens=0.0, weight=weight, origin=origin)
        part = _cut(workload, admitted)
        us *= expected(variant, part) / expected(variant, workload)
        tokens = float(sum(n > 0 for n in part.query_lens))
        origin = "scaled" if origin == "measured" else origin
    return _Step(us=us, whole_us=whole_us, tokens=tokens, weight=weight, origin=origin)


def _cut(workload: Workload, sequences: int) -> Workload:
    """The workload with so many of its sequences, evenly spread over their context lengths."""
    order = sorted(range(workload.num_seqs), key=lambda i: (workload.context_lens[i], i))
    kept = [order[(2 * i + 1) * len(order) // (2 * sequences)] for i in range(sequences)]
    return Workload(
        context_lens=tuple(workload.context_lens[i] for i in kept),
        query_lens=tuple(workload.query_lens[i] for i in kept),
    )


def _sequences(profile: Profile) -> list[tuple[int, int, float]]:
    """(context, queries, weight) of every sequence of every step."""
    return [
        (context, queries, weight)
        for workload, weight in profile
        for context, queries in zip(workload.context_lens, workload.query_lens, strict=True)
    ]


def _waste_share(layout: CacheLayout, profile: Profile) -> float:
    wasted = sum(weight * layout.wasted_slots(context) for context, _, weight in _sequences(profile))
    slots = sum(weight * layout.blocks_for(context) * layout.block_size for context, _, weight in _sequences(profile))
    return wasted / slots if slots else 0.0


def _mean_over_sequences(expression: Any, spec: AttentionSpec, layout: CacheLayout, profile: Profile) -> float:
    total = sequences = 0.0
    for load, weight in profile:
        values = {**symbols.bind_spec(spec, layout), **symbols.bind_workload(spec, load)}
        total += weight * symbols.total(expression, values)
        sequences += weight * load.num_seqs
    return total / sequences


def _admitted(spec: AttentionSpec, layout: CacheLayout, profile: Profile, memory_bytes: int, num_layers: int) -> int:
    """Sequences whose blocks fit the memory over all layers, at the mean number of blocks of the profile's decoding
    sequences (of all, where none decodes)."""
    decoding = [(context, weight) for context, queries, weight in _sequences(profile) if queries <= 1]
    counted = decoding or [(context, weight) for context, _, weight in _sequences(profile)]
    blocks = sum(w * layout.blocks_for(context) for context, w in counted) / sum(w for _, w in counted)
    block_bytes = layout.block_size * spec.kv_bytes_per_token * num_layers
    return int(memory_bytes // block_bytes // max(blocks, 1.0))


def _quantile(steps: Sequence[_Step], share: float) -> float:
    """The time that `share` of the tokens do not exceed; a step weighs by its tokens."""
    by_time = sorted(steps, key=lambda step: step.us)
    whole = math.fsum(step.weight * step.tokens for step in by_time)
    passed = 0.0
    for step in by_time:
        passed += step.weight * step.tokens
        if passed >= share * whole * (1 - 1e-12):
            return step.us
    return by_time[-1].us
