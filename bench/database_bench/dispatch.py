"""How long does an operator take to choose a variant from a rule that was prepared?"""

from __future__ import annotations

import statistics
import time

from pagegen import selection
from pagegen.db import Database
from pagegen.selection.predicted import predicted_rule
from pagegen.spec import AttentionSpec, CacheLayout, Device, DispatchRule

# (sequences, longest query, longest context)
BATCHES = tuple((seqs, 1, context) for seqs in (1, 8, 64, 256) for context in (500, 4000, 40_000))
ROUNDS, REPEATS = 7, 500


def chosen(db: Database, spec: AttentionSpec, layout: CacheLayout, device: Device) -> dict[str, float]:
    """Microseconds of one choice, of the stored rule and of the cost model's longer one."""
    tuned = selection.rule_for(spec, layout, device.target, db)
    model = predicted_rule(spec, layout, device)
    return {
        "us": choice_us(tuned), "clauses": len(tuned.clauses),
        "model_us": choice_us(model), "model_clauses": len(model.clauses),
    }  # fmt: skip


def choice_us(rule: DispatchRule) -> float:
    """The median over rounds of the mean over all batches."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(REPEATS):
            for batch in BATCHES:
                rule.choose(*batch)
        found.append((time.perf_counter() - start) / REPEATS / len(BATCHES) * 1e6)
    return round(statistics.median(found), 3)
