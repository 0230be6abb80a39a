"""The real tuner on the chat profile, one run a model and cache dtype, its trials kept for `records`."""

from __future__ import annotations

import functools

from pagegen_autotune import Report, tune

from gpu_check_bench import models
from gpu_check_bench.context import Context
from gpu_check_bench.worker import Cases, Row

# Of the part's time: the first model's bf16 cache, what the aims are about, gets as much as two others. A run may end
# a little late: it measures the defaults whatever its budget is.
WEIGHTS = (2.0, 1.2, 1.0, 1.0)
SPENT = 0.9


def add_cases(context: Context, cases: Cases) -> None:
    names = list(models.specs(context.dry_run))
    for number, name in enumerate(names):
        weights = WEIGHTS[number : len(names)]
        cases.add(name, functools.partial(run, context, name, weights[0] / sum(weights)))


def run(context: Context, name: str, share: float) -> Row:
    """One run within its share of what is left of the part."""
    report = tune(
        models.specs(context.dry_run)[name],
        models.profile(context.dry_run),
        block_sizes=models.block_sizes(context.dry_run),
        target=context.target,
        db=context.database,
        budget_s=max(1.0, SPENT * share * context.left_s()),
        progress=False,
    )
    row = told(report)
    failed = {status: count for status, count in report.trials.items() if status != "ok"}
    if failed.get("wrong_result"):
        row["error"] = f"{failed['wrong_result']} candidates had wrong results"
    return row


def told(report: Report) -> Row:
    """A report in a few figures; its rules are in the records."""
    return {
        "profile": report.profile,
        "seconds_tuned": round(report.seconds, 1),
        "trials": dict(report.trials),
        "left_out": len(report.left_out),
        "block_sizes": [
            {
                "block_size": row.layout.block_size,
                "step_us": round(row.step_us, 2),
                "default_step_us": round(row.default_step_us, 2),
                "speedup": round(row.speedup, 3),
                "regret_at_most": None if row.regret_at_most is None else round(row.regret_at_most, 4),
                "variants": row.variants,
                "chosen": {d.batches: d.chosen.name for d in row.decisions},
            }
            for row in report.rows
        ],
    }
