"""The edges of the step graph: what a target can do, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import networkx as nx

from pagegen import costs, targets
from pagegen.lowering.graph import Graph, Measured, Step, add, plan, timed
from pagegen.spec import AttentionSpec, CacheLayout, Device, TritonVariant, Variant, Workload
from pagegen.spec.dtypes import QUERY_DTYPES
from pagegen.spec.shared_prefix import PrefixGroups, flat_reason, prefix_spec

IN_SPLITS = "attend in splits + reduce"
CASCADE = "pagegen.cascade_attention"
SPLITS = (2, 4, 8, 16, 32)
RESIDENT = (1, 2)  # programs a multiprocessor, where they take equal shares
OWN_TOKENS = 128  # behind a prefix, where a break-even is asked for
MOST_TOKENS = 1 << 20


def step_graph(
    spec: AttentionSpec,
    layout: CacheLayout,
    variant: Variant,
    device: Device,
    workload: Workload,
    *,
    prefix_groups: PrefixGroups = (),
    measured: Measured | None = None,
) -> Graph:
    """Every way to do the step on `device` with `variant`'s tiles.

    `prefix_groups` as `PagedKVCache.batch` reports them: (num_shared_blocks, rows); without them nothing is shared.
    `measured` gives the times that are known. Raises ValueError where the device's bandwidth is not known, or for
    groups that the workload cannot have.
    """
    graph: Graph = nx.DiGraph()
    served = targets.unsupported(spec, device.target) is None
    found = [*_writing(spec, device, workload), *_dense(spec, layout, device, workload)]
    if served:
        reading = costs.with_reuse(spec, layout, device, workload, prefix_groups)
        found += _kernels(spec, layout, variant, reading, workload, measured)
        found += _cascade(spec, layout, variant, device, workload, prefix_groups)
    for step in found:
        add(graph, timed(step, measured))
    return graph


def _writing(spec: AttentionSpec, device: Device, workload: Workload) -> Iterator[Step]:
    yield Step(
        name="rotate", source="projected", target="rotated", us=costs.rotate_us(spec, device, workload),
        does="the model's own rotation",
    )  # fmt: skip
    yield Step(
        name="write", source="rotated", target="written", us=costs.write_us(spec, device, workload),
        does="pagegen.write_kv",
    )  # fmt: skip
    yield Step(
        name="rotate and write", source="projected", target="written",
        us=costs.rotate_write_us(spec, device, workload), does="pagegen.rope_write_kv",
    )  # fmt: skip


def _dense(spec: AttentionSpec, layout: CacheLayout, device: Device, workload: Workload) -> Iterator[Step]:
    plain = spec.kv_dtype in QUERY_DTYPES and spec.kv_scale_granularity == "none" and not spec.kv_zero_points
    features = spec.alibi, spec.sinks, spec.logit_softcap, spec.score_mod, spec.mask_mod
    if plain and not any(features):
        yield Step(
            name="gather", source="written", target="contiguous", us=costs.gather_us(spec, device, workload),
            does="torch.index_select",
        )  # fmt: skip
        yield Step(
            name="dense", source="contiguous", target="attended", us=costs.dense_us(spec, layout, device, workload),
            does="torch.nn.functional.scaled_dot_product_attention",
        )  # fmt: skip
    yield Step(
        name="gather and attend densely", source="written", target="attended",
        us=costs.reference_us(spec, layout, device, workload), does="pagegen.reference_attention",
    )  # fmt: skip


def _kernels(
    spec: AttentionSpec,
    layout: CacheLayout,
    variant: Variant,
    device: Device,
    workload: Workload,
    measured: Measured | None,
) -> Iterator[Step]:
    """What one call of the operator can do: in the chosen variant, and in the best of its other forms."""
    for name, forms in _forms(spec, variant, device).items():
        known = [
            Step(
                name=name,
                source="written",
                target="attended",
                does="pagegen.paged_attention",
                variant=form,
                us=costs.predict_us(spec, layout, form, device, workload),
            )
            for form in forms
            if not costs.legal(spec, layout, form, device)
        ]
        if not known:
            continue
        # what was measured stands for its kind: a prediction must not hide it
        best = min((timed(step, measured) for step in known), key=lambda step: (not step.measured, step.us))
        # a measurement is of both launches and says nothing of either
        if name != IN_SPLITS or best.measured:
            yield best
            continue
        assert isinstance(best.variant, TritonVariant)
        reduce_us = costs.reduce_us(spec, layout, best.variant, device, workload)
        yield replace(best, name="attend in splits", target="partials", us=best.us - reduce_us)
        yield replace(best, name="reduce", source="partials", us=reduce_us)


def _forms(spec: AttentionSpec, variant: Variant, device: Device) -> dict[str, list[Variant]]:
    """The single pass, splits reduced by a second kernel or by the last program, and equal shares of all key tiles, in
    the tiles of `variant` and, where it says nothing else, in several numbers of splits or programs."""
    if not isinstance(variant, TritonVariant):  # a C++ kernel divides and merges inside one call
        return {"attend": [variant]}
    single = replace(variant, num_splits=1, split_tokens=0, reduce="kernel", programs=0)
    if spec.batch_invariant:  # only splits of a fixed size, merged in a fixed order, do not depend on the batch
        split = [variant] if variant.split_tokens else []
        return {"attend": [single], IN_SPLITS: [replace(form, reduce="kernel") for form in split]}
    split = [variant] if variant.splits else [replace(single, num_splits=n) for n in SPLITS]
    shares: list[Variant] = [replace(single, programs=n * device.units) for n in RESIDENT if device.units]
    return {
        "attend": [single],
        IN_SPLITS: [replace(form, reduce="kernel") for form in split],
        "attend in splits, the last reduces": [replace(form, reduce="last") for form in split],
        "attend in equal shares": [variant] if variant.programs else shares,
    }


def _cascade(
    spec: AttentionSpec,
    layout: CacheLayout,
    variant: Variant,
    device: Device,
    workload: Workload,
    prefix_groups: PrefixGroups,
) -> Iterator[Step]:
    """A shared prefix attended once. Nothing where none is shared or the spec does not allow it."""
    flat = flat_reason(
        window=spec.window, score_mod=spec.score_mod, mask_mod=spec.mask_mod,
        batch_invariant=spec.batch_invariant, max_seq_len=workload.max_context_len,
    )  # fmt: skip
    sharing = [(blocks, rows) for blocks, rows in prefix_groups if sum(workload.query_lens[row] for row in rows) > 1]
    if flat is not None or not sharing:
        return
    prefix, own = costs.prefix_workloads(layout, workload, sharing)
    prefix_forms = _prefix_variants(spec, layout, variant, device)
    own_forms = [form for forms in _forms(spec, variant, device).values() for form in forms]
    for name, source, target, part, forms, batch in (
        ("attend prefix", "written", "prefix state", prefix_spec(spec), prefix_forms, prefix),
        ("attend own", "prefix state", "states", spec, own_forms, own),
    ):
        legal = [form for form in forms if not costs.legal(part, layout, form, device)]
        expected = {form: costs.predict_us(part, layout, form, device, batch) for form in legal}
        best = min(expected, key=lambda form: expected[form])
        yield Step(name=name, source=source, target=target, us=expected[best], does=CASCADE, variant=best)
    merge_us = costs.merge_us(spec, device, prefix.total_q)
    yield Step(name="merge", source="states", target="attended", us=merge_us, does=CASCADE)


def _prefix_variants(spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device) -> list[Variant]:
    """Variants for a long prefix that all queries of a group meet as rows: more rows than decode has, and splits,
    which ragged batches do not need otherwise."""
    found = [variant, *costs.candidates(spec, layout, device.target, decode=False)]
    split = [replace(form, num_splits=n) for form in found[1:] if isinstance(form, TritonVariant) for n in SPLITS]
    return [*found, *split]


def break_even_tokens(
    spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device, *, num_seqs: int
) -> int | None:
    """The tokens that sharing must spare `num_seqs` decoding sequences to read before the plan is a cascade, to a
    factor of two; None where it never is. It is what `plan_cascade` takes as `least_saved_tokens`, since planning over
    the graph takes longer than a step.

    Raises ValueError where the device's bandwidth is not known."""
    blocks = 1
    while blocks * layout.block_size <= MOST_TOKENS:
        shared = blocks * layout.block_size
        workload = Workload(context_lens=(shared + OWN_TOKENS,) * num_seqs)
        groups = ((blocks, tuple(range(num_seqs))),)
        chosen = plan(step_graph(spec, layout, variant, device, workload, prefix_groups=groups), "written")
        if chosen.steps[-1].does == CASCADE:
            return shared * (num_seqs - 1)
        blocks *= 2
    return None
