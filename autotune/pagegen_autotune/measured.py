"""A measured run: a session on an executor, its decisions stored as they are made. The same here and on a cluster."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagegen.spec import CacheLayout, Status
from pagegen_autotune import known
from pagegen_autotune.cells import Cell
from pagegen_autotune.claims import Claims, Heartbeat
from pagegen_autotune.evidence import Evidence
from pagegen_autotune.executor import Executor
from pagegen_autotune.faults import MachineFault
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.job import Job, kept, named
from pagegen_autotune.ledger import Ledger
from pagegen_autotune.patience import Asking, at_once
from pagegen_autotune.portfolio import Decision, decide
from pagegen_autotune.probing import REACH
from pagegen_autotune.progress import Progress
from pagegen_autotune.report import Row
from pagegen_autotune.session import Session


class TuneError(RuntimeError):
    """Nothing could be tuned here."""


@dataclass(frozen=True)
class Run:
    """How a job is run: where, for how long, and, where other tuners share the database, its leases and its patience
    with that database."""

    executor: Executor
    clock: Callable[[], float]
    stop: StopSignal
    budget_s: float | None = None
    budget_trials: int | None = None
    seed: int = 0
    heartbeat: Heartbeat | None = None
    asking: Asking = at_once


def measured(job: Job, run: Run, *, progress: bool = False, line: Progress | None = None) -> dict[str, Any]:
    """What a report of a measured run holds; trials, rules and what is known beside are in the store. `line` shows how
    far it is, by default one of its own where `progress` is asked for. Raises TuneError where no default ran."""
    start = run.clock()
    ledger = Ledger(job.store, job.spec, job.device, job.code_hash, run.executor, asking=run.asking)
    session = Session(
        job.cells, ledger, run.executor, job.strategy, clock=run.clock, budget_s=run.budget_s, stop=run.stop,
        progress=progress, seed=run.seed, objective=job.objective, max_trials=run.budget_trials,
        reach=math.inf if job.whole else REACH, line=line,
        claims=None if run.heartbeat is None else Claims(run.heartbeat, ledger.question, run.asking),
    )  # fmt: skip

    @functools.lru_cache(maxsize=len(job.cells))
    def decide_by(evidence: Evidence, cell: Cell) -> Decision | None:
        return decide(evidence, cell.loads, cell.batches)

    def decided(cell: Cell) -> Decision | None:
        return decide_by(session.evidence(cell), cell)  # new trials make another Evidence

    def row(layout: CacheLayout) -> Row | None:
        """None where a class has no measured default: its rule would say nothing."""
        cells = [c for c in job.cells if c.layout == layout]
        made = [d for d in map(decided, cells) if d is not None]
        trials = len(ledger.trials(layout))
        return job.row(layout, made, "measured", {"trials": trials}) if len(made) == len(cells) else None

    def save(cell: Cell) -> None:
        found = row(cell.layout)
        if found is not None:
            run.asking(lambda: job.save(found, interim=True))

    interrupted = False
    try:
        session.run(save)
    except (KeyboardInterrupt, MachineFault) as error:
        interrupted = True
        for layout in job.layouts:
            save(next(c for c in job.cells if c.layout == layout))
        if isinstance(error, MachineFault):
            raise TuneError(f"{error}; what was measured is stored, run the same command again") from error
    if not interrupted:
        run.asking(job.refit)
    rows = tuple(r for r in map(row, job.layouts) if r is not None)
    left_out = list(session.left_out)
    for made in () if interrupted else rows:
        late = run.budget_s is not None and run.clock() - start > run.budget_s
        left_out += [] if _finish(job, run, made, late=late) else [kept(made)]
    left_out = [*_failed_defaults(job, ledger, session.left_out), *left_out]
    if not rows and not interrupted:
        raise TuneError(f"no default variant ran on {job.device.target}: {'; '.join(left_out)}")
    return {
        "kind": "measured",
        "rows": rows,
        "trials": {status.value: count for status, count in sorted(ledger.added.items(), key=lambda i: -i[1])},
        "resumed": ledger.resumed,
        "rejected": job.rejected(),
        "left_out": tuple(left_out),
        "drift": {c.name: drift for c in job.cells if (drift := session.evidence(c).drift(c.loads)) is not None},
        "interrupted": interrupted,
    }


def _failed_defaults(job: Job, ledger: Ledger, told: list[str]) -> list[str]:
    """Why a class has no default with a time on every batch: the first failure of each that is not told already."""
    failed: dict[str, str] = {}
    for cell in job.cells:
        for trial in ledger.trials(cell.layout):
            if trial.variant == cell.default and trial.status is not Status.OK and trial.workload in dict(cell.loads):
                failed.setdefault(cell.name, f"{cell.name}: the default variant: {trial.detail}")
    return [text for name, text in failed.items() if not any(t.startswith(f"{name}: the default") for t in told)]


def _finish(job: Job, run: Run, row: Row, *, late: bool) -> bool:
    """Stores a row with the cost model's coefficients, where there are trials enough, and what is known of its
    variants beside. False where an earlier row stays: see `Job.save`."""
    stored = run.asking(lambda: job.save(row))
    # a GPU kernel is compiled once more to look at it, about a second each
    kernels = [] if late and job.device.target.is_gpu else named(row)
    told = [
        run.executor.facts(row.layout, v, decode=decode) for batches, v in kernels for decode in known.FORMS[batches]
    ]
    run.asking(lambda: job.save_known(row, told))
    return stored
