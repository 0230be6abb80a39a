"""`pagegen explain`: which variant serves a batch, why, and how far it is from the hardware's limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from pagegen.cli import options, output
from pagegen.cli.option_types import count
from pagegen.cli.rejected import rejections
from pagegen.spec import AttentionSpec, CacheLayout, Device, Selection, Status, Target, TritonVariant, Variant, Workload
from pagegen.spec.shared_prefix import PrefixGroups

# A batch is held sequence by sequence.
MAX_SEQUENCES = 2**20
# Quantities that do not add up over sequences.
PER_SEQUENCE = ("mean_keys", "tiles_per_program", "tile_pairs", "shared_bytes")


@click.command()
@options.model_options
@options.layout_options
@click.option("--batch", type=click.IntRange(min=1, max=MAX_SEQUENCES), required=True, help="Sequences.")
@click.option("--context", type=count(), required=True, help="Tokens in each one's cache.")
@click.option("--queries", type=count(), default=1, show_default=True, help="New tokens of each.")
@click.option(
    "--shared-prefix",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="TOKENS",
    help="Leading tokens that all sequences have in common; whole blocks of them are shared.",
)
@options.target_option
@options.device_option
@click.option(
    "--rejected", is_flag=True, help="Also list how many variants each rule, compiler and failed trial ruled out."
)
@options.url_option
@output.json_option
def command(
    model: str,
    layer: str | None,
    q_dtype: str | None,
    kv_dtype: str | None,
    kv_scales: str,
    kv_zero_points: bool,
    block_size: int,
    order: str,
    batch: int,
    context: int,
    queries: int,
    shared_prefix: int,
    target: Target,
    device: str | None,
    rejected: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """The variant that is chosen for a batch, the evidence, the expected time and its share of the roofline."""
    if queries > context:
        raise click.UsageError(f"--queries must be at most --context {context}, got {queries}")
    if shared_prefix > context - queries:
        raise click.UsageError(
            f"--shared-prefix must be at most the {context - queries} tokens before a sequence's queries, "
            f"got {shared_prefix}"
        )
    spec = options.model_spec(model, layer, q_dtype, kv_dtype, kv_scales, kv_zero_points)
    layout = CacheLayout(block_size=block_size, order=order)
    workload = Workload(context_lens=(context,) * batch, query_lens=(queries,) * batch)
    groups = prefix_groups(layout, batch, shared_prefix)
    from pagegen import selection

    meant = options.known_device(target, device)
    with output.plain_failures():
        explanation = selection.explain_selection(spec, layout, target, workload, db=url, device=meant)
        times_us = measured_us(spec, layout, meant, workload, url)
        document = explain(
            spec, layout, meant, workload, explanation.selection, prefix_groups=groups, times_us=times_us
        )
        document |= explanation.ladder_dict()
        if rejected:
            document |= rejections(spec, layout, meant, url, decode=queries == 1)
    output.show({"model": model, **document}, as_json, lambda: _text(model, document))


def prefix_groups(layout: CacheLayout, batch: int, shared_prefix: int) -> PrefixGroups:
    """The one group of a batch whose sequences share their first tokens, as `PagedKVCache.batch` reports it."""
    blocks = shared_prefix // layout.block_size
    return ((blocks, tuple(range(batch))),) if blocks else ()


def measured_us(
    spec: AttentionSpec, layout: CacheLayout, device: Device, workload: Workload, url: str | None
) -> dict[Variant, float]:
    """The median time of every variant that was tried on exactly this batch and device. Empty without a database."""
    from pagegen import targets
    from pagegen.db import DatabaseError
    from pagegen.db.figures import measured_medians
    from pagegen.selection.candidates import opened

    try:
        with opened(url) as db:
            trials = db.trials(
                spec=spec, layout=layout.canonical(spec.num_kv_heads), device=device, workload=workload,
                status=Status.OK, code_hash=targets.code_hash(device.target),
            )  # fmt: skip
    except DatabaseError:  # that it cannot be read stands in the selection's reason
        return {}
    return {variant: us for (variant, _), us in measured_medians(trials).items()}


def explain(
    spec: AttentionSpec,
    layout: CacheLayout,
    device: Device,
    workload: Workload,
    chosen: Selection,
    *,
    prefix_groups: PrefixGroups = (),
    times_us: Mapping[Variant, float] | None = None,
) -> dict[str, Any]:
    """What is known about a choice, JSON-ready."""
    from pagegen import costs

    # the interpreter, and a CPU without a compiler to measure it, have no known bandwidth and so no floor
    roofline_us = costs.roofline_us(spec, layout, device, workload) if device.bandwidth_gb_s > 0 else None
    share = roofline_us / chosen.predicted_us if roofline_us and chosen.predicted_us else None
    return {
        "target": str(device.target),
        "device": device.name,
        "layout": layout.to_dict(),
        "batch": {"num_seqs": workload.num_seqs, "total_context": workload.total_context, "total_q": workload.total_q},
        "variant": chosen.variant.to_dict(),
        "variant_name": chosen.variant.name,
        "reason": chosen.reason,
        "grade": chosen.grade,
        "confidence": chosen.confidence,
        "distance": chosen.distance,
        "evidence": chosen.evidence,
        "predicted_us": chosen.predicted_us,
        "roofline_us": roofline_us,
        "roofline_share": share,
        "prefix_groups": [[blocks, list(rows)] for blocks, rows in prefix_groups],
        "served_by": "reference" if by_reference(chosen) else "kernel",
        "paths": paths(spec, layout, device, chosen, workload, prefix_groups, times_us or {}),
        "quantities": quantities(spec, layout, device, chosen.variant, workload),
    }


def paths(
    spec: AttentionSpec,
    layout: CacheLayout,
    device: Device,
    chosen: Selection,
    workload: Workload,
    prefix_groups: PrefixGroups,
    times_us: Mapping[Variant, float],
) -> list[dict[str, Any]]:
    """The ways to do the step (`pagegen.lowering`), the cheapest first, which is the plan; none without a known rate.
    `dispatch` marks those whose attention is what `pagegen.paged_attention` does by itself."""
    from pagegen import lowering

    if not device.bandwidth_gb_s > 0:
        return []
    graph = lowering.step_graph(
        spec, layout, chosen.variant, device, workload,
        prefix_groups=prefix_groups, measured=lowering.whole_calls(times_us),
    )  # fmt: skip

    def dispatched(step: lowering.Step) -> bool:
        if by_reference(chosen):
            return step.does == "pagegen.reference_attention"
        return step.variant == chosen.variant and step.does == "pagegen.paged_attention"

    return [
        {**path.to_dict(), "dispatch": any(dispatched(step) for step in path.steps)} for path in lowering.paths(graph)
    ]


def by_reference(chosen: Selection) -> bool:
    """Whether no generated kernel serves what was asked."""
    return chosen.evidence.get("kind") == "reference"


def quantities(
    spec: AttentionSpec, layout: CacheLayout, device: Device, variant: Variant, workload: Workload
) -> list[dict[str, Any]]:
    """The symbolic quantities behind the cost model: each one's name, value over the batch (the mean of those in
    PER_SEQUENCE) and expression for one sequence."""
    from pagegen.costs import symbols

    own = symbols.TRITON_EXPRESSIONS if isinstance(variant, TritonVariant) else symbols.CPP_EXPRESSIONS
    values = {
        **symbols.bind_spec(spec, layout),
        **symbols.bind_workload(spec, workload),
        **symbols.bind_variant(variant),
        **symbols.bind_device(device),
    }
    found = []
    for name, expression in {**symbols.EXPRESSIONS, **own}.items():
        value = symbols.evaluate(expression, values)
        whole = value.shape and name not in PER_SEQUENCE
        shown = float(value.sum() if whole else value.mean())
        found.append({"name": name, "value": round(shown), "expression": str(expression)})
    return found


def _text(model: str, document: dict[str, Any]) -> str:
    time, layout = document["evidence"].get("time", "unknown"), document["layout"]
    us, roofline_us, share = document["predicted_us"], document["roofline_us"], document["roofline_share"]
    lines = [
        f"{model}, block size {layout['block_size']} {layout['order']} on {document['device']} ({document['target']})",
        f"variant   {document['variant_name'] if document['served_by'] == 'kernel' else 'none, the reference path'}",
        f"why       {document['reason']}",
        f"grade     {document['grade']}, confidence {document['confidence']}, distance {document['distance']:.3g}",
        f"time      {'-' if us is None else f'{us:.1f} us'} ({time})",
        f"roofline  {'-' if roofline_us is None else f'{roofline_us:.1f} us'}"
        + ("" if share is None else f", {share:.0%} of the {time} time"),
        "",
        *_ladder_lines(document),
        *_path_lines(document["paths"]),
        output.table(
            document["quantities"],
            {"name": "quantity", "value": "value", "expression": "for one sequence"},
            last_width=90,
        ),  # fmt: skip
    ]
    if "rejected" in document:
        columns = {
            "rule": "rule", "stage": "known by", "variants": "variants", "reason": "rejected because, for one",
            "example": "which is",
        }  # fmt: skip
        lines += ["", f"{document['legal']} of {document['points']} points of the search space are legal"]
        lines += [output.table(document["rejected"], columns)] if document["rejected"] else []
    return "\n".join(lines)


def _ladder_lines(document: dict[str, Any]) -> list[str]:
    """The ladder, and the near misses field by field."""
    if document["evidence"].get("dispatch"):
        lines = [f"an operator prepared from this database takes {document['evidence']['dispatch']}", ""]
    else:
        lines = []
    lines += [output.table(document["ladder"], {"grade": "ladder", "state": "", "why": "why"}), ""]
    rows = [
        {
            "place": miss["place"] if not i else "", "target": miss["target"] if not i else "", "field": name,
            "stored": stored, "asked": asked,
        }
        for miss in document["near_misses"]
        for i, (name, (stored, asked)) in enumerate(miss["fields"].items())
    ]  # fmt: skip
    columns = {"place": "near miss", "target": "target", "field": "field", "stored": "stored", "asked": "asked for"}
    return [*lines, output.table(rows, columns), ""] if rows else lines


def _path_lines(paths: list[dict[str, Any]]) -> list[str]:
    """The plan and its alternatives, aligned: other ways to write with the plan's way to attend, and the other way
    about. Nothing where no path has a known cost."""
    rows = []
    for i, path in enumerate(paths):
        if set(_halves(path)) & set(_halves(paths[0])):
            mark = " ".join(["plan"] * (i == 0) + ["dispatch"] * path["dispatch"])
            rows.append({**path, "us": f"{path['us']:.1f}", "mark": mark})
    columns = {"path": "step, cheapest path first", "us": "us", "cost": "cost", "mark": ""}
    return [output.table(rows, columns), ""] if rows else []


def _halves(path: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the steps that write, and of those that attend."""
    names = [step["step"] for step in path["steps"]]
    written = next(i for i, step in enumerate(path["steps"]) if step["to"] == "written") + 1
    return tuple(names[:written]), tuple(names[written:])
