"""The tuner's first candidates, compiled and checked side by side, so that Triton's cache has them when time counts."""

from __future__ import annotations

import functools
from dataclasses import replace

from pagegen_autotune import inputs
from pagegen_autotune.job import Job
from pagegen_autotune.measure import classify, compare

from gpu_check_bench import models, published, ranking
from gpu_check_bench.context import Context
from gpu_check_bench.worker import Cases, Row
from pagegen import targets
from pagegen.spec import AttentionSpec, CacheLayout, Status

# Of the model's shortlist, beside the default: a cell's kernels take 2 to 3 s each.
FIRST = 6
DRY_RUN_FIRST = 1


def add_cases(context: Context, cases: Cases) -> None:
    """A case a class of batches of a block size of a model."""
    for name, spec in models.specs(context.dry_run).items():
        for size in models.block_sizes(context.dry_run):
            for batches in ("decode", "mixed"):
                run = functools.partial(shortlist, context, spec, CacheLayout(block_size=size), batches)
                cases.add(f"{name}, blocks of {size}, {batches}", run)
    for name, row in published.kernels(context).items():
        cases.add(f"published: {name}", functools.partial(published.first_call, context, row))
    for ranked in ranking.chosen(context.dry_run):
        for number in range(ranking.SLICES):
            run = functools.partial(ranking.compile_slice, context, ranked, number)
            cases.add(f"to rank: {ranked.name}, {number + 1} of {ranking.SLICES}", run)


def shortlist(context: Context, spec: AttentionSpec, layout: CacheLayout, batches: str) -> Row:
    """Compiles and checks the default and the most promising variants, the most promising first."""
    from pagegen.db import open_db

    profile = models.profile(context.dry_run)
    with open_db(context.folder / "candidates.db") as store:
        job = Job(spec, profile, context.device, store, [layout], "guided", "mean")
    cell = next(cell for cell in job.cells if cell.batches == batches)
    first = DRY_RUN_FIRST if context.dry_run else FIRST
    variants = ranking.promising(context, spec, cell)[: 1 + first]
    loads = inputs.check_workloads(spec, layout)
    checks = [inputs.check_batch(spec, layout, load, context.on, seed) for seed, load in enumerate(loads)]
    failed = {}
    tried = 0
    for variant in variants:
        if tried and context.left_s() <= 0:
            break
        tried += 1
        try:
            kernel = targets.load_attention(spec, layout, variant, context.target)
            for check in checks:
                verdict = compare(kernel, check, spec.q_dtype)
                if verdict.status is not Status.OK:
                    failed[variant.name] = f"{verdict.status.value}: {verdict.detail}"
                    break
            else:  # as the tuner times it
                kernel(replace(checks[batches == "mixed"].call, lse=None))
        except Exception as error:  # a candidate may fail in any way: its failure is its result
            status, detail = classify(error)
            failed[variant.name] = f"{status.value}: {detail}"
            if context.stuck():
                break
    row: Row = {"compiled": tried - len(failed), "of": len(variants)}
    if failed:
        row["failed"] = failed
    if any(text.startswith(Status.WRONG_RESULT.value) for text in failed.values()):
        row["error"] = "a candidate's result is wrong"
    return row
