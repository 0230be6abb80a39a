"""What people and engines ask: the variant for one batch, and the block size for a profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagegen import costs, targets
from pagegen.selection.candidates import device_for, kept_open, opened, sentence
from pagegen.selection.expected import Expected
from pagegen.selection.grades import workload_distance
from pagegen.selection.ladder import Ladder, rule_for
from pagegen.spec import AttentionSpec, CacheLayout, Device, Profile, Selection, Target, Variant, Workload, check
from pagegen.spec.layout import USUAL_BLOCK_SIZES

if TYPE_CHECKING:
    from pagegen.db import Database
    from pagegen.db.block_size import BlockSizeRow


def select(
    spec: AttentionSpec, layout: CacheLayout, target: Target | str, workload: Workload,
    db: Database | str | None = None, *, device: Device | str | None = None,
) -> Selection:  # fmt: skip
    """The variant for one batch: the first answer on the ladder (see `pagegen.selection.ladder`) whose evidence lies
    within the validity radius of the batch, with its grade and confidence.

    A prepared operator follows `rule_for`, which knows no batch; where it takes another variant,
    `evidence["dispatch"]` names that.

    `predicted_us` is the median of the variant's trials on this very batch (`evidence["time"]` is "measured"), else
    that on the nearest batch, scaled by the cost model's ratio of the two ("scaled"), else the cost model's own figure
    ("predicted"; the reference path's where it serves), else None. `device` is the product of the target that is meant
    ("NVIDIA H200"), where it is not this machine's. Never raises for a database; TypeError, ValueError for wrong
    arguments.
    """
    with kept_open(db) as source:
        return selected(ladder_for(spec, layout, target, workload, source, device))


def ladder_for(
    spec: AttentionSpec, layout: CacheLayout, target: Target | str, workload: Workload, db: Database | str | None,
    device: Device | str | None,
) -> Ladder:  # fmt: skip
    """The ladder of a question about one batch. Raises TypeError or ValueError naming the argument."""
    target, layout = checked(spec, layout, target, workload)
    named = None if device is None else device_for(target, device)
    return Ladder(spec, layout, target, db, workload, named)


def checked(
    spec: AttentionSpec, layout: CacheLayout, target: Target | str, workload: Workload
) -> tuple[Target, CacheLayout]:
    """The target parsed and the layout as the operator sees it. Raises TypeError or ValueError naming the argument."""
    for name, value, kind in (
        ("spec", spec, AttentionSpec),
        ("layout", layout, CacheLayout),
        ("workload", workload, Workload),
    ):
        check.instance(name, value, kind)
    return Target.parse(target), layout.canonical(spec.num_kv_heads)


def selected(ladder: Ladder) -> Selection:
    """The selection for a ladder that was set up for a batch."""
    spec, layout, workload, db = ladder.spec, ladder.layout, ladder.workload, ladder.db
    if workload is None:
        raise ValueError("ladder must be for a workload, got none")
    rule = ladder.rule()
    asked = (workload.num_seqs, workload.max_query_len, workload.max_context_len)
    variant = rule.choose(*asked)
    us, further, evidence = None, 0.0, dict(rule.evidence)
    try:
        if evidence.get("kind") == "reference":
            us, found = costs.reference_us(spec, layout, ladder.device, workload), {"time": "predicted"}
        else:
            us, further, found = _expected(spec, layout, ladder.device, variant, workload, db)
        evidence.update(found)
        dispatch = _dispatched(ladder, asked)
        if dispatch not in (None, variant):
            evidence["dispatch"] = dispatch.name if dispatch else ""
    except Exception as error:  # as on the ladder: no file may stop a model
        evidence["time"] = f"unknown: {sentence(error)}"
    return Selection(
        variant=variant,
        reason=rule.reason,
        # the batch's own distance is part of the rule's where a portfolio answered
        distance=max(rule.distance, further),
        predicted_us=us,
        evidence=evidence,
        grade=str(evidence["grade"]),
        confidence=str(evidence["confidence"]),
    )


def _dispatched(ladder: Ladder, asked: tuple[int, int, int]) -> Variant | None:
    """What the tuned rule of this very kernel takes, where there is one: it is what `prepare` loads."""
    in_order = sorted(ladder.judged, key=lambda c: not c.lead.measured)  # stable
    first = next((c for c in in_order if ladder.serves_here(c)), None)
    if first is None:
        return None
    clauses = first.lead.portfolio.rule.clauses
    if ladder.spec.batch_invariant:
        return clauses[-1].variant
    return next(c.variant for c in clauses if c.admits(*asked))


def _expected(
    spec: AttentionSpec, layout: CacheLayout, device: Device, variant: Variant, workload: Workload,
    db: Database | str | None,
) -> tuple[float, float, dict[str, Any]]:  # fmt: skip
    """(microseconds, distance of the batch they were measured on, what they rest on)."""
    expected = Expected(spec, layout, device, db)

    def predicted(load: Workload) -> float:
        return expected.us(variant, load)

    nearest = _nearest_trial(spec, layout, device, variant, workload, db)
    if nearest is None:
        return predicted(workload), 0.0, {"time": "predicted", **_rests_on(expected, variant)}
    load, us = nearest
    if load == workload:
        return us, 0.0, {"time": "measured", "measured_us": us}
    figures = {"num_seqs": load.num_seqs, "total_context": load.total_context, "total_q": load.total_q}
    evidence = {"time": "scaled", "measured_us": us, "measured_workload": figures}
    return us * predicted(workload) / predicted(load), workload_distance(load, workload), evidence


def _rests_on(expected: Expected, variant: Variant) -> dict[str, Any]:
    """What a predicted time rests on beside the plain model."""
    compiled = {"compiled": True} if expected.is_compiled(variant) else {}
    return {**compiled, **({} if expected.fit is None else {"cost_model": str(expected.fit)})}


def _nearest_trial(
    spec: AttentionSpec, layout: CacheLayout, device: Device, variant: Variant, workload: Workload,
    db: Database | str | None,
) -> tuple[Workload, float] | None:  # fmt: skip
    """The batch on which this variant was measured that is nearest to the asked one, and its median."""
    from pagegen.db import DatabaseError
    from pagegen.db.figures import medians

    code = targets.code_hash(device.target)
    try:
        with opened(db) as source:
            found = medians(source, spec, layout, device, code, variants=[variant], workloads=[workload])
            if not found:
                found = medians(source, spec, layout, device, code, variants=[variant])
    except DatabaseError:
        return None  # the rule's reason says what is wrong with it
    by_load = {load: us for (_, load), us in found.items() if load.is_decode == workload.is_decode}
    if not by_load:
        return None
    best = min(by_load, key=lambda load: (workload_distance(load, workload), load.context_lens, load.query_lens))
    return best, by_load[best]


def best_block_size(
    spec: AttentionSpec,
    target: Target | str,
    profile: Profile,
    *,
    db: Database | str | None = None,
    memory_bytes: int | None = None,
    objective: str = "throughput",
    num_layers: int = 1,
    device: Device | str | None = None,
) -> list[BlockSizeRow]:
    """Block sizes for a profile, best first (see `pagegen.db.block_size` for the figures and the order).

    The sizes are those that were measured for this spec, target and code, on this machine's device where it has
    trials, else on the device with the most; where nothing was measured, the usual ones, predicted. With `device`, the
    product of the target that is meant ("NVIDIA H200"), no other device's times are shown. `spec` is one
    layer: `num_layers` says how many share `memory_bytes` and make up a token. A database that cannot be read is named
    in the rows' `reason`.

    Raises ValueError for bad arguments, and where nothing was measured and the device's rates are not known.
    """
    check.instance("spec", spec, AttentionSpec)
    check.instance("profile", profile, Profile)
    check.count("num_layers", num_layers)
    if memory_bytes is not None:
        check.integer("memory_bytes", memory_bytes, at_most=2**63 - 1)
    target = Target.parse(target)
    from pagegen.db import block_size

    with kept_open(db) as source:
        rows = _rows(spec, target, profile, source, memory_bytes, num_layers, device)
    return block_size.ranked(rows, objective)


def _rows(
    spec: AttentionSpec, target: Target, profile: Profile, db: Database | str | None, memory_bytes: int | None,
    num_layers: int, device: Device | str | None,
) -> list[BlockSizeRow]:  # fmt: skip
    from pagegen.db import DatabaseError, block_size, figures

    meant, layouts = device_for(target, device), []
    code = targets.code_hash(target)
    try:
        with opened(db) as source:
            if device is None:
                meant = figures.measured_device(source, spec, code, meant)
            layouts = source.measured_layouts(spec, target, code)
    except DatabaseError:
        pass  # every row's reason says what is wrong with it
    rows = []
    for layout in layouts or [CacheLayout(block_size=b) for b in USUAL_BLOCK_SIZES]:
        rule = rule_for(spec, layout, target, db, device=device)
        medians = {}
        try:
            with opened(db) as source:
                medians = figures.medians(
                    source, spec, layout, meant, code, variants=rule.variants, workloads=profile.workloads
                )
        except DatabaseError:
            pass  # as above
        rows.append(
            block_size.row(
                spec,
                layout,
                meant,
                profile,
                rule,
                medians,
                memory_bytes=memory_bytes,
                num_layers=num_layers,
                expected=Expected(spec, layout, meant, db).us,
            )  # fmt: skip
        )
    return rows
