"""A tuning run for a GPU that is not here: the cells' candidates compiled side by side, their choices stored as
predicted."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from pagegen import costs, settings
from pagegen.spec import CacheLayout
from pagegen_autotune.cells import Cell
from pagegen_autotune.compiling import Compilers
from pagegen_autotune.faults import MachineFault
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.isolated import WorkerLost
from pagegen_autotune.job import Job, kept
from pagegen_autotune.offline import Prediction
from pagegen_autotune.progress import Progress
from pagegen_autotune.report import Row

# Where no budget is given: a hundred kernels take two minutes on two idle cores, and no machine takes ten.
USUAL_BUDGET_S = 480.0


class CannotCompile(RuntimeError):
    """Nothing can be compiled for the target here; the message says what to do."""


def predicted(
    job: Job, clock: Callable[[], float], budget_s: float | None, stop: StopSignal, *, progress: bool = False
) -> dict[str, Any]:
    """What a report of a predicted run holds; the rules, the compiler's facts and the predictions are in the store.

    Layouts are stored one after the other, so that a run that is stopped keeps what it has. Raises CannotCompile.
    """
    target = job.device.target
    if importlib.util.find_spec("triton") is None:
        raise CannotCompile(f"compiling for {target} needs triton: pip install pagegen-attention[triton]")
    if settings.interpreting():
        raise CannotCompile(f"compiling for {target} needs TRITON_INTERPRET unset: interpreting, nothing is compiled")
    until = clock() + (USUAL_BUDGET_S if budget_s is None else budget_s)
    only = job.only
    named = None if only is None else lambda cell: only[cell.layout].get(cell.batches, ())
    prediction = Prediction(job.spec, job.device, fit=job.fit, named=named, objective=job.objective)
    line = Progress(progress, lambda: until - clock(), things="kernels")
    rows: list[Row] = []
    left_out: list[str] = []

    ends = until

    def may_go_on() -> bool:
        stop.check()
        return clock() < ends

    interrupted = False
    try:
        with Compilers(job.spec, job.device, job.profile) as compilers:
            for number, layout in enumerate(job.layouts):
                cells = [cell for cell in job.cells if cell.layout == layout]
                now = clock()  # what is left is shared by the layouts that are left
                ends = now + (until - now) / (len(job.layouts) - number)
                left_out += _compiled(prediction, compilers, cells, may_go_on, line)
                rows.append(_decided(job, prediction, layout, cells))
                left_out += _saved(job, prediction, rows[-1])
    except KeyboardInterrupt:
        interrupted = True
    except WorkerLost as error:
        raise CannotCompile(f"no process that compiles for {target} could be started: {error.detail}") from error
    except MachineFault as fault:
        raise CannotCompile(str(fault)) from fault
    finally:
        line.close()
    return {
        "kind": "predicted",
        "rows": tuple(rows),
        "rejected": job.rejected(prediction.reasons()),
        "left_out": tuple(left_out),
        "interrupted": interrupted,
    }


def _compiled(
    prediction: Prediction, compilers: Compilers, cells: list[Cell], may_go_on: Callable[[], bool], line: Progress
) -> list[str]:
    """Compiles the cells' shortlists; what the budget left no time for, in words."""
    if not may_go_on():
        return [f"{cell.name}: the budget left no time to compile" for cell in cells]
    line.at(f"block size {cells[0].layout.block_size} {cells[0].layout.order}, compiling" if cells else "")
    tasks = len(prediction.tasks(cells))
    line.expect(tasks)
    done = 0
    for _ in prediction.compile(compilers, cells, may_go_on):
        done += 1
        line.done(1)
    line.expect(done - tasks)
    where = f"block size {cells[0].layout.block_size} {cells[0].layout.order}" if cells else ""
    return [f"{where}: {tasks - done} of {tasks} kernels were not compiled"] if done < tasks else []


def _decided(job: Job, prediction: Prediction, layout: CacheLayout, cells: list[Cell]) -> Row:
    evidence: dict[str, Any] = {"compiled": sum(where == layout for where, *_ in prediction.facts)}
    rejections = prediction.rejections(layout)
    if rejections:
        evidence["rejected"] = rejections
    return job.row(layout, [prediction.decide(cell) for cell in cells], "predicted", evidence)


def _saved(job: Job, prediction: Prediction, row: Row) -> list[str]:
    """Stores a row; the words for one that is not stored, since a measured one is there."""
    layout, told = row.layout, []
    # the product that stands for its arch gives way to what was measured on any
    stands = job.device == costs.shipped_device(job.device.target)
    stored = job.store.portfolio(
        job.spec, layout, job.device.target, job.code_hash, device=None if stands else job.device
    )
    if stored is not None and stored.evidence.get("kind") == "measured":
        told = [f"block size {layout.block_size} {layout.order}: the measured rule in the database stays"]
    elif not job.save(row):
        told = [kept(row)]
    job.save_known(row, (facts for (where, *_), facts in prediction.facts.items() if where == layout))
    return told
