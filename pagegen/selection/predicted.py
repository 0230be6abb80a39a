"""The cost model's choice: a dispatch rule for a kernel that nothing was measured for."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from pagegen import costs, targets
from pagegen.spec import AttentionSpec, CacheLayout, Clause, Device, DispatchRule, Variant, Workload

# Further than any layout's distance, log2(2048 / 1) + 1.5: the answer rests on no trial.
PREDICTED_DISTANCE = 16.0
# A variant must be predicted at least 10 % faster to displace the default: the model's error is larger than that.
PREDICTED_MARGIN = 0.10
# Variants within 2 % of the best are as good: the first of the candidates, which rise in size, is taken.
PREDICTED_TIE = 0.02
# Classes of decode batches: (at most so many sequences, at most so long contexts), None is no bound. A class is judged
# by its largest batch, the unbounded ones by 256 sequences and 32,768 tokens, with contexts of all lengths up to there.
Cell = tuple[int | None, int | None]
DECODE_CELLS: tuple[Cell, ...] = tuple(
    (seqs, context) for seqs in (1, 4, 16, 64, None) for context in (1024, 8192, None)
)
UNBOUNDED_SEQS, UNBOUNDED_CONTEXT = 256, 32768
# What stands for every batch with longer queries.
PREFILL = Workload(context_lens=(2048,) * 4, query_lens=(512,) * 4)


@functools.lru_cache(maxsize=256)  # 0.4 s: 15 classes of batches, some 40 variants each
def predicted_rule(
    spec: AttentionSpec, layout: CacheLayout, device: Device, fit: costs.Fit | None = None
) -> DispatchRule:
    """The rule of the variants that the cost model (with the coefficients of `fit`, where given) expects to be fastest,
    the default where none is clearly so.

    Raises ValueError where the device's rates are not known.
    """
    target = device.target

    def allowed(decode: bool) -> list[Variant]:
        found = costs.candidates(spec, layout, target, decode=decode)
        return [v for v in found if not costs.legal(spec, layout, v, device)]

    choices = {decode: allowed(decode) for decode in (True, False)}

    def fastest(workload: Workload, decode: bool) -> Variant:
        default = targets.default_variant(spec, layout, target, decode=decode)
        times = {v: costs.predict_us(spec, layout, v, device, workload, fit=fit) for v in [default, *choices[decode]]}
        least = min(times.values())
        if least > (1 - PREDICTED_MARGIN) * times[default]:
            return default
        return next(v for v in choices[decode] if times[v] <= (1 + PREDICTED_TIE) * least)

    def of_cell(seqs: int | None, context: int | None) -> Variant:
        count, longest = seqs or UNBOUNDED_SEQS, context or UNBOUNDED_CONTEXT
        return fastest(Workload(context_lens=tuple(longest * (i + 1) // count for i in range(count))), decode=True)

    # one variant for every batch where a row's result must not depend on the others
    cells = () if spec.batch_invariant else DECODE_CELLS
    clauses = merged_clauses((cell, of_cell(*cell)) for cell in cells)
    return DispatchRule(
        clauses=(*clauses, Clause(variant=fastest(PREFILL, decode=False))),
        reason=f"the cost model's choice for {device.name}, not measured" + (f"; {fit}" if fit else ""),
        distance=PREDICTED_DISTANCE,
        evidence={"kind": "predicted", "device": device.name},
    )


def merged_clauses(choices: Iterable[tuple[Cell, Variant]]) -> list[Clause]:
    """Decode clauses for the chosen variants of cells that rise, None last, without those that say what the next
    says as well."""
    rows: dict[int | None, list[tuple[int | None, Variant]]] = {}
    for (seqs, context), variant in choices:
        kept = rows.setdefault(seqs, [])
        if kept and kept[-1][1] == variant:
            kept[-1] = (context, variant)
        else:
            kept.append((context, variant))
    bounds = list(rows)
    return [
        Clause(variant=variant, max_num_seqs=seqs, max_query_len=1, max_context_len=context)
        for i, seqs in enumerate(bounds)
        if i + 1 == len(bounds) or rows[seqs] != rows[bounds[i + 1]]
        for context, variant in rows[seqs]
    ]
