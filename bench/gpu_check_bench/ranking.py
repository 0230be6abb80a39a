"""Does the cost model rank variants as the device does?

Variants that the model likes and variants drawn at random are measured in interleaved rounds; then the model's order,
by itself and by what the compiler made of each, is compared with the measured one.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagegen_autotune import inputs
from pagegen_autotune.cells import Cell
from pagegen_autotune.job import Job
from pagegen_autotune.measure import KernelBench, classify, compare
from pagegen_autotune.offline import Prediction

from gpu_check_bench import models
from gpu_check_bench.context import Context
from gpu_check_bench.timing import interleave
from gpu_check_bench.worker import Cases, Row
from pagegen import costs, targets
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Status, Variant, Workload

LIKED, DRAWN = 9, 9
DRY_RUN_LIKED, DRY_RUN_DRAWN = 3, 2
TOP = 5
NEAR = 0.05  # the winner, or as good
LOOKED_AT, FAR = 60, 4.0  # of the space, and how far behind the best predicted a drawn variant may be
ROUNDS = 7
CASES = (("llama-3.1-8b bf16", 16), ("llama-3.1-8b fp8", 64))
BATCHES = ((64, 4096), (1, 8192), (16, 1024))
# What one process compiles of a case's variants beforehand, side by side with others.
SLICES = 3


@dataclass(frozen=True)
class Ranked:
    """One model's decode step with blocks of one size."""

    name: str
    spec: AttentionSpec
    layout: CacheLayout

    def workloads(self, dry_run: bool) -> list[Workload]:
        shapes = ((2, 40),) if dry_run else BATCHES
        return [Workload(context_lens=(context,) * batch) for batch, context in shapes]


def chosen(dry_run: bool) -> list[Ranked]:
    specs = models.specs(dry_run)
    asked = [(name, models.block_sizes(True)[0]) for name in specs] if dry_run else CASES
    return [Ranked(f"{name}, blocks of {size}", specs[name], CacheLayout(block_size=size)) for name, size in asked]


@functools.cache
def variants(ranked: Ranked, context: Context) -> tuple[Variant, ...]:
    """The variants to measure, the same in every process: the model's shortlist, and others of the space."""
    from pagegen.db import open_db

    with open_db(context.folder / "candidates.db") as store:
        job = Job(
            ranked.spec, models.profile(context.dry_run), context.device, store, [ranked.layout], "guided", "mean"
        )
    cell = next(cell for cell in job.cells if cell.batches == "decode")
    liked, drawn = (DRY_RUN_LIKED, DRY_RUN_DRAWN) if context.dry_run else (LIKED, DRAWN)
    first = promising(context, ranked.spec, cell)[:liked]
    rest = [variant for variant in cell.space.points() if variant not in first]
    some = random.Random(0).sample(rest, min(LOOKED_AT, len(rest)))
    load = ranked.workloads(context.dry_run)[0]

    def us(variant: Variant) -> float:
        return costs.predict_us(ranked.spec, ranked.layout, variant, context.device, load)

    # some of the rest would take a minute to compile: tiles that registers do not hold
    limit = FAR * min(map(us, first))
    return (*first, *[variant for variant in some if us(variant) <= limit][:drawn])


def promising(context: Context, spec: AttentionSpec, cell: Cell) -> list[Variant]:
    """The default and the variants that the model likes, the best first. C++ variants, a dry run's, have no such list
    before they are measured: those that differ from the default in one thing."""
    if context.target.family == "cpp":
        return [cell.default, *cell.space.neighbours(cell.default)]
    return Prediction(spec, context.device).shortlist(cell)


def add_cases(context: Context, cases: Cases) -> None:
    for ranked in chosen(context.dry_run):
        cases.add(ranked.name, functools.partial(measure, context, ranked))


def compile_slice(context: Context, ranked: Ranked, number: int) -> Row:
    """Compiles every n-th variant of a case as it will be run, and keeps what the compiler told."""
    from pagegen_autotune import known

    from pagegen.db import open_db

    loads = inputs.check_workloads(ranked.spec, ranked.layout)
    checks = [inputs.check_batch(ranked.spec, ranked.layout, load, context.on, i) for i, load in enumerate(loads)]
    told, tried, failed = [], 0, {}
    for variant in variants(ranked, context)[number::SLICES]:
        if tried and context.left_s() <= 0:
            break
        tried += 1
        try:
            kernel = targets.load_attention(ranked.spec, ranked.layout, variant, context.target)
            for check in checks:
                compare(kernel, check, ranked.spec.q_dtype)  # `measure` judges it
            kernel(replace(checks[0].call, lse=None))
        except Exception as error:  # a variant may fail in any way: its failure is its result
            failed[variant.name] = ": ".join(classify(error))
            if context.stuck():
                break
            continue
        told.append(
            known.compile_facts(
                ranked.spec,
                ranked.layout,
                variant,
                context.target,
                decode=True,
                code_hash=targets.code_hash(context.target),
            )  # fmt: skip
        )
    with open_db(context.database) as store:
        for facts in filter(None, told):
            store.record_facts(facts)
    return {"compiled": tried - len(failed), **({"failed": failed} if failed else {})}


def measure(context: Context, ranked: Ranked) -> Row:
    """The measured and the predicted order on each batch."""
    profile = models.profile(context.dry_run)
    bench = KernelBench(ranked.spec, context.target, context.device, profile, seed=0)
    found: list[Row] = []
    sound: dict[Variant, None] = {}
    failed = {}
    for variant in variants(ranked, context):
        if len(sound) > TOP and context.left_s() <= 0:
            break
        verdict = bench.check(ranked.layout, [variant])[variant]
        if verdict.status is Status.OK:
            sound[variant] = None
        else:
            failed[variant.name] = f"{verdict.status.value}: {verdict.detail}"
    for workload in ranked.workloads(context.dry_run):
        if found and context.left_s() <= 0:
            break
        found.append(_on(context, ranked, bench, workload, list(sound)))
    row: Row = {"variants": len(sound), "failed": failed, "batches": found}
    if any(text.startswith(Status.WRONG_RESULT.value) for text in failed.values()):
        row["error"] = "a variant's result is wrong"
    return row


@dataclass
class _Sampled:
    """A variant on a batch, as something that `interleave` times."""

    bench: KernelBench
    ranked: Ranked
    variant: Variant
    workload: Workload
    how: str = "the tuner's"

    def sample(self) -> float:
        return self.bench.sample(self.ranked.layout, self.variant, self.workload)


def _on(context: Context, ranked: Ranked, bench: KernelBench, workload: Workload, sound: Sequence[Variant]) -> Row:
    runners = {v.name: _Sampled(bench, ranked, v, workload) for v in sound}
    for runner in runners.values():
        runner.sample()  # warm
    samples = interleave(runners, ROUNDS, context.left_s)
    measured = [statistics.median(samples[v.name]) for v in sound]
    static = [costs.predict_us(ranked.spec, ranked.layout, v, context.device, workload) for v in sound]
    row: Row = {
        "batch": workload.num_seqs, "context": workload.max_context_len, "winner": sound[least(measured)].name,
        "winner_us": round(min(measured), 2), "variants": len(sound), "static": agreement(static, measured),
    }  # fmt: skip
    compiled = _by_code(context, ranked, workload, sound)
    if compiled is not None:
        row["compiled"] = agreement(compiled, measured)
    return row


def _by_code(context: Context, ranked: Ranked, workload: Workload, sound: Sequence[Variant]) -> list[float] | None:
    """Predictions by what the compiler made of each; None where it was not kept for all, or is no part of the model."""
    from pagegen.db import open_db

    if any(isinstance(variant, CppVariant) for variant in sound):
        return None
    with open_db(context.database) as store:
        told = store.compile_facts(spec=ranked.spec, layout=ranked.layout, target=context.target)
    facts = {known.variant: known for known in told if known.form == "decode"}
    if not all(variant in facts for variant in sound):
        return None
    return [costs.predict_us(ranked.spec, ranked.layout, v, context.device, workload, facts=facts[v]) for v in sound]


# ---- comparing orders ----------------------------------------------------------------------------------------------


def agreement(predicted: Sequence[float], measured: Sequence[float]) -> Row:
    """Whether the `TOP` best predicted hold the winner or one within `NEAR` of it, what the best of them loses to it,
    and Spearman's rank correlation (None for fewer than three, or where all are equal)."""
    top = sorted(range(len(predicted)), key=lambda i: predicted[i])[:TOP]
    loss = min(measured[i] for i in top) / min(measured) - 1
    return {
        "top_loss": round(loss, 4),
        "top_holds_winner": loss <= NEAR,
        "rank_correlation": spearman(predicted, measured),
    }


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Spearman's rank correlation, equal values sharing the mean of their ranks."""
    if len(xs) < 3:
        return None
    try:
        return round(statistics.correlation(ranks(xs), ranks(ys)), 3)
    except statistics.StatisticsError:  # all of one side are equal
        return None


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the least; equal values share the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + 1 + (order.count(value) - 1) / 2 for value in values]


def least(values: Sequence[float]) -> int:
    return min(range(len(values)), key=lambda i: values[i])
