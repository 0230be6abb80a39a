"""After a new compiler or driver: the best few of each portfolio measured again, in place of a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pagegen import targets
from pagegen.spec import AttentionSpec, Profile, Target, Variant, Workload, check
from pagegen_autotune.evidence import Evidence
from pagegen_autotune.job import default_variants
from pagegen_autotune.known import FORMS
from pagegen_autotune.ledger import same_environment
from pagegen_autotune.measure import Bench, environment_of
from pagegen_autotune.measured import TuneError
from pagegen_autotune.report import Report
from pagegen_autotune.tuner import is_present, tune

if TYPE_CHECKING:
    from pagegen.db import Database
    from pagegen.db.staleness import Staleness

# The chosen variant and its two runners-up: their order is what a new compiler may change.
TOP = 3


def revalidate(
    spec: AttentionSpec,
    profile: Profile,
    *,
    db: Database | str | None = None,
    target: str | Target | None = None,
    k: int = TOP,
    objective: str | None = None,
    budget_s: float | None = None,
    progress: bool = True,
    bench: Bench | None = None,
    clock: Callable[[], float] = time.monotonic,
    seed: int = 0,
) -> Report:
    """Measures the default and the `k` best stored variants of every portfolio of `spec` that a change of toolchain or
    driver made stale, on the batches of `profile`, and leaves new portfolios: k variants a class of batches and layout,
    whatever the search space. Portfolios that are valid are left alone. `objective` is by default the one that they
    were chosen by.

    Raises TuneError for a target that is not here, where none is stale, where they were chosen by several objectives
    and none is named, and where only a search can help since the templates changed; otherwise as `tune`.
    """
    from pagegen.db import Database, open_db

    check.integer("k", k)
    where = Target.current() if target is None else Target.parse(target)
    if bench is None and not is_present(where):
        raise TuneError(f"target must be here to measure again, got {where}: run this on a machine that has it")
    if not isinstance(db, Database):
        with open_db(db) as opened:
            return revalidate(
                spec, profile, db=opened, target=where, k=k, objective=objective, budget_s=budget_s, progress=progress,
                bench=bench, clock=clock, seed=seed,
            )  # fmt: skip
    stale = _stale(db, spec, where, bench)
    chosen_by = _objective(stale) if objective is None else objective
    only = {s.portfolio.layout: top_variants(db, s, profile, k) for s in stale}
    layouts = list(only)
    return tune(
        spec, profile, block_sizes=sorted({layout.block_size for layout in layouts}), target=where, db=db,
        budget_s=budget_s, progress=progress, orders=sorted({layout.order for layout in layouts}), bench=bench,
        clock=clock, seed=seed, only=only, objective=chosen_by,
    )  # fmt: skip


def _stale(db: Database, spec: AttentionSpec, where: Target, bench: Bench | None) -> list[Staleness]:
    """The portfolios to measure again on this device."""
    from pagegen.db.staleness import INVALID, REVALIDATE, staleness

    now = environment_of(where) if bench is None else bench.environment
    device = targets.current_device(where)
    judged = staleness(
        db, code_hash=targets.code_hash, environment=lambda target: now, spec=spec, target=where, device=device
    )
    stale = [s for s in judged if s.state == REVALIDATE]
    if stale:
        return stale
    if any(s.state == INVALID for s in judged):
        raise TuneError(f"the templates changed since {where} was tuned: run pagegen tune, which searches anew")
    if judged:
        raise TuneError(f"nothing to measure again: all {len(judged)} portfolios of this spec on {where} are valid")
    raise TuneError(f"nothing to measure again: no portfolio of this spec on {device.name}: run pagegen tune")


def _objective(stale: Sequence[Staleness]) -> str:
    """What the portfolios were chosen by: a new compiler is no reason to choose by something else."""
    found = {str(s.portfolio.rule.evidence.get("objective", "mean")) for s in stale}
    if len(found) > 1:
        raise TuneError(f"the portfolios were chosen by {' and '.join(sorted(found))}: name one with --objective")
    return found.pop()


def top_variants(db: Database, stale: Staleness, profile: Profile, k: int) -> dict[str, list[Variant]]:
    """For each class of batches the variants to measure again: what the portfolio chooses, then the best by the trials
    that it rests on, the default left out, which is measured anyway; at most `k`."""
    from pagegen.db.staleness import measured_environment

    portfolio = stale.portfolio
    then = measured_environment(db, portfolio, portfolio.device) or {}
    trials = [
        trial
        for trial in db.trials(
            spec=portfolio.spec, layout=portfolio.layout, target=portfolio.target, device=portfolio.device,
            code_hash=portfolio.code_hash,
        )
        if same_environment(trial.environment, then)
    ]  # fmt: skip
    found: dict[str, list[Variant]] = {}
    for batches, default in default_variants(portfolio.spec, portfolio.layout, portfolio.target).items():
        loads = _loads(profile, batches) or _loads(portfolio.profile, batches)
        evidence = Evidence(trials, default)
        by_load = [evidence.comparisons([(w, weight)], fresh=False) for w, weight in loads]
        scores: dict[Variant, list[float]] = {}
        for comparisons in by_load:
            for comparison in comparisons:
                scores.setdefault(comparison.variant, []).append(comparison.ratio)
        # measured on more of the batches first: the mean of few says less
        ranked = sorted(scores, key=lambda v: (-len(scores[v]), sum(scores[v]) / len(scores[v]), v.name))
        chosen = [_choice(stale, w) for w, _ in loads]
        found[batches] = [v for v in dict.fromkeys([*chosen, *ranked]) if v != default][:k]
    return found


def _choice(stale: Staleness, workload: Workload) -> Variant:
    rule = stale.portfolio.rule
    return rule.choose(workload.num_seqs, workload.max_query_len, workload.max_context_len)


def _loads(profile: Profile, batches: str) -> Sequence[tuple[Workload, float]]:
    return [(workload, weight) for workload, weight in profile if workload.is_decode in FORMS[batches]]
