"""What people and engines ask: the variant for one batch, and the block size for a profile."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pagegen import costs, targets
from pagegen.selection.ladder import device_for, opened, rule_for, sentence
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    Device,
    Measurement,
    Profile,
    Selection,
    Status,
    Target,
    Variant,
    Workload,
    check,
)
from pagegen.spec.layout import USUAL_BLOCK_SIZES

if TYPE_CHECKING:
    from pagegen.db import Database
    from pagegen.db.block_size import BlockSizeRow

# Distance of two batches that are alike in every figure that `workload_distance` compares, yet not the same.
UNLIKE_IN_DETAIL = 0.01


def select(
    spec: AttentionSpec, layout: CacheLayout, target: Target | str, workload: Workload, db: Database | str | None = None
) -> Selection:
    """The variant for one batch, decided as `rule_for` decides.

    `predicted_us` is the median of that variant's trials on this very batch (`evidence["time"]` is "measured"), else
    that on the nearest batch, scaled by the cost model's ratio of the two ("scaled"), else the cost model's own figure
    ("predicted"; the reference path's where it serves), else None. Never raises for a database; TypeError, ValueError
    for wrong arguments.
    """
    for name, value, kind in (
        ("spec", spec, AttentionSpec),
        ("layout", layout, CacheLayout),
        ("workload", workload, Workload),
    ):
        check.instance(name, value, kind)
    target, layout = Target.parse(target), layout.canonical(spec.num_kv_heads)
    rule = rule_for(spec, layout, target, db)
    variant = rule.choose(workload.num_seqs, workload.max_query_len, workload.max_context_len)
    us, further, evidence = None, 0.0, dict(rule.evidence)
    try:
        if evidence.get("kind") == "reference":
            us, found = costs.reference_us(spec, layout, device_for(target), workload), {"time": "predicted"}
        else:
            us, further, found = _expected(spec, layout, target, variant, workload, db)
        evidence.update(found)
    except Exception as error:  # as on the ladder: no file may stop a model
        evidence["time"] = f"unknown: {sentence(error)}"
    return Selection(
        variant=variant, reason=rule.reason, distance=rule.distance + further, predicted_us=us, evidence=evidence
    )


def _expected(
    spec: AttentionSpec, layout: CacheLayout, target: Target, variant: Variant, workload: Workload,
    db: Database | str | None,
) -> tuple[float, float, dict[str, Any]]:  # fmt: skip
    """(microseconds, distance of the batch they were measured on, what they rest on)."""
    device = device_for(target)

    def predicted(load: Workload) -> float:
        return costs.predict_us(spec, layout, variant, device, load)

    nearest = _nearest_trial(spec, layout, device, variant, workload, db)
    if nearest is None:
        return predicted(workload), 0.0, {"time": "predicted"}
    load, us = nearest
    if load == workload:
        return us, 0.0, {"time": "measured", "measured_us": us}
    figures = {"num_seqs": load.num_seqs, "total_context": load.total_context, "total_q": load.total_q}
    evidence = {"time": "scaled", "measured_us": us, "measured_workload": figures}
    return us * predicted(workload) / predicted(load), workload_distance(load, workload), evidence


def _nearest_trial(
    spec: AttentionSpec, layout: CacheLayout, device: Device, variant: Variant, workload: Workload,
    db: Database | str | None,
) -> tuple[Workload, float] | None:  # fmt: skip
    """The batch on which this variant was measured that is nearest to the asked one, and its median."""
    from pagegen.db import DatabaseError
    from pagegen.db.block_size import measured_medians

    try:
        with opened(db) as source:
            found = _trials(source, spec, layout, device, variant)
    except DatabaseError:
        return None  # the rule's reason says what is wrong with it
    medians = {load: us for (_, load), us in measured_medians(found).items() if load.is_decode == workload.is_decode}
    if not medians:
        return None
    best = min(medians, key=lambda load: (workload_distance(load, workload), load.context_lens, load.query_lens))
    return best, medians[best]


def _trials(
    db: Database, spec: AttentionSpec, layout: CacheLayout, device: Device, variant: Variant | None = None
) -> list[Measurement]:
    code = targets.code_hash(device.target)
    return db.trials(
        spec=spec, layout=layout, target=device.target, device=device, variant=variant, status=Status.OK, code_hash=code
    )


def workload_distance(a: Workload, b: Workload) -> float:
    """How unlike two batches are: the Euclidean distance of the base-2 logarithms of their sequences, total and longest
    context, and queries. 0 for the same batch only."""

    def point(w: Workload) -> list[float]:
        return [math.log2(1 + x) for x in (w.num_seqs, w.total_context, w.max_context_len, w.total_q)]

    return 0.0 if a == b else max(math.dist(point(a), point(b)), UNLIKE_IN_DETAIL)


def best_block_size(
    spec: AttentionSpec,
    target: Target | str,
    profile: Profile,
    *,
    db: Database | str | None = None,
    memory_bytes: int | None = None,
    objective: str = "throughput",
    num_layers: int = 1,
) -> list[BlockSizeRow]:
    """Block sizes for a profile, best first (see `pagegen.db.block_size` for the figures and the order).

    The sizes are those that were measured for this spec, target and code, on this machine's device where it has
    trials, else on the device with the most; where nothing was measured, the usual ones, predicted. `spec` is one
    layer: `num_layers` says how many share `memory_bytes` and make up a token. A database that cannot be read is named
    in the rows' `reason`.

    Raises ValueError for bad arguments, and where nothing was measured and the device's rates are not known.
    """
    check.instance("spec", spec, AttentionSpec)
    check.instance("profile", profile, Profile)
    target = Target.parse(target)
    from pagegen.db import DatabaseError, block_size

    device, layouts, trials = device_for(target), [], {}
    try:
        with opened(db) as source:
            code = targets.code_hash(target)
            device = _measured_device(source, spec, code, device)
            layouts = source.measured_layouts(spec, target, code)
            trials = {layout: _trials(source, spec, layout, device) for layout in layouts}
    except DatabaseError:
        pass  # every row's reason says what is wrong with it
    rows = [
        block_size.row(
            spec, layout, device, profile, rule_for(spec, layout, target, db), trials.get(layout, ()),
            memory_bytes=memory_bytes, num_layers=num_layers,
        )
        for layout in layouts or [CacheLayout(block_size=b) for b in USUAL_BLOCK_SIZES]
    ]  # fmt: skip
    return block_size.ranked(rows, objective)


def _measured_device(db: Database, spec: AttentionSpec, code: str, here: Device) -> Device:
    from pagegen.db.codec import device_identity

    measured = db.measured_devices(spec, here.target, code)
    is_here = [device for device in measured if device_identity(device) == device_identity(here)]
    return here if is_here or not measured else measured[0]
