"""`tune`: from a spec and a profile to measured trials and a dispatch rule in the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from pagegen import targets
from pagegen.selection import device_for
from pagegen.spec import AttentionSpec, CacheLayout, Device, Profile, Target, Variant, check
from pagegen_autotune.arguments import layouts_of, opened
from pagegen_autotune.executor import LocalExecutor
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.isolated import IsolatedBench, WorkerLost
from pagegen_autotune.job import Job
from pagegen_autotune.ledger import Store
from pagegen_autotune.measure import Bench, KernelBench
from pagegen_autotune.measured import Run, TuneError, measured
from pagegen_autotune.report import Report

log = logging.getLogger(__name__)


def tune(
    spec: AttentionSpec,
    profile: Profile,
    *,
    block_sizes: Sequence[int] | None = None,
    target: str | Target | None = None,
    db: Store | Path | str | None = None,
    budget_s: float | None = None,
    progress: bool = True,
    orders: Sequence[str] = ("NHD",),
    strategy: str = "guided",
    objective: str = "mean",
    budget_trials: int | None = None,
    bench: Bench | None = None,
    clock: Callable[[], float] = time.monotonic,
    seed: int = 0,
    only: Mapping[CacheLayout, Mapping[str, Sequence[Variant]]] | None = None,
    device: Device | str | None = None,
) -> Report:
    """Finds the variants that serve `spec` best on the batches of `profile`, for each of `block_sizes` (tokens a block;
    default: the usual ones) and memory `orders` ("NHD", "HND").

    On a target that is here (`cpu`, or this machine's GPU) candidates are checked, then timed, in a process of their
    own (see `pagegen_autotune.isolated`); every trial goes to `db` (a Database, path or URL; default: the default
    database), and trials that are there already are not run again. For a GPU that is not here the cost model ranks and
    the compiler verifies. Either way the dispatch rule of each layout is left in `db`. `budget_s` bounds the seconds;
    the default variants are measured whatever it is; `budget_trials` bounds the trials (a variant on a workload)
    beside theirs. `objective` is what variants are chosen by: the "mean" step time over the profile, its "p99", or
    "cvar", the mean of its slowest 5 %; each over the batches of a class.
    `strategy` is how to search: "guided" by a model of the trials, "coordinate" around the default, or "exhaustive";
    `seed` is that of its draws, and `progress` writes lines about it to standard error.
    Ctrl-C, SIGTERM and SIGHUP end the run early, within seconds: the report then says `interrupted`, and the next run
    goes on from there.
    `bench` and `clock` replace what compiles, checks and times, and what tells the time. `only` names the layouts and
    for each class of batches ("decode", "mixed" or "all") the variants to measure in place of a search. `device` is the
    product of the target that is meant ("NVIDIA H200"): where this machine's is another, the run is a prediction.

    Raises ValueError or TypeError for a spec that no generated kernel serves, for the interpreter and for bad arguments
    (a strategy and a budget of trials are for what is measured), TuneError when not even a default variant passes its
    check, no process starts or an absent GPU cannot be compiled for, and the database's errors.
    """
    layouts = layouts_of(
        spec, profile, block_sizes, orders, strategy=strategy, objective=objective, budget_s=budget_s,
        budget_trials=budget_trials, seed=seed,
    )  # fmt: skip
    where = _checked_target(spec, target)
    if only is not None:
        check.instance("only", only, Mapping)
        layouts = [layout for layout in layouts if layout in only]
        if not layouts:
            raise ValueError(f"only must name some of the layouts to tune, got {list(only)}")
    with ExitStack() as stack:
        store: Store = stack.enter_context(opened(db))
        stop = stack.enter_context(StopSignal())
        start = clock()
        meant = device_for(where, device)
        here = bench is not None or (is_present(where) and meant == targets.current_device(where))
        if not here and (budget_trials is not None or strategy != "guided"):
            raise ValueError(
                "budget_trials and strategy are for what is measured, and nothing is timed for "
                f"{meant.name} ({where}), which is not here: leave them out, got {budget_trials!r} and {strategy!r}"
            )
        job = Job(spec, profile, meant, store, layouts, strategy, objective, only)
        store.save_profile(profile)
        if here:
            try:
                used = bench or stack.enter_context(_bench(spec, where, meant, profile, seed, stop))
            except KeyboardInterrupt:
                if not stop.requested:
                    raise
                seconds = clock() - start
                return Report(
                    kind="measured", profile=profile.name, device=meant, rows=(), interrupted=True, seconds=seconds
                )
            run = Run(LocalExecutor(used, clock, stop), clock, stop, budget_s, budget_trials, seed)
            facts = measured(job, run, progress=progress)
        else:
            facts = _predicted(job, clock, budget_s, stop, progress)
        return Report(profile=profile.name, device=meant, seconds=clock() - start, **facts)


def _bench(
    spec: AttentionSpec, target: Target, device: Device, profile: Profile, seed: int, stop: StopSignal
) -> AbstractContextManager[Bench]:
    """The bench of a device that is here, in a process of its own. Score and mask functions are known to this process
    alone: kernels with one run in it."""
    if spec.score_mod is not None or spec.mask_mod is not None:
        log.warning("candidates with a score or mask function run in this process: one that crashes ends it")
        return nullcontext(KernelBench(spec, target, device, profile, seed=seed))
    try:
        return IsolatedBench(spec, target, device, profile, seed=seed, stop=stop)
    except WorkerLost as error:
        raise TuneError(f"no process that runs candidates for {target} could be started: {error.detail}") from error


def is_present(target: Target) -> bool:
    """Whether this machine can run kernels for `target`, whatever PAGEGEN_TARGET says."""
    if target.kind == "cpu":
        return True
    if not target.is_gpu or not torch.cuda.is_available():
        return False
    try:
        targets.current_device(target)
    except ValueError:  # another GPU than the target
        return False
    return True


def _predicted(
    job: Job, clock: Callable[[], float], budget_s: float | None, stop: StopSignal, progress: bool
) -> dict[str, Any]:
    from pagegen_autotune.absent import CannotCompile, predicted

    try:
        return predicted(job, clock, budget_s, stop, progress=progress)
    except CannotCompile as error:
        raise TuneError(str(error)) from error


def _checked_target(spec: AttentionSpec, target: str | Target | None) -> Target:
    where = Target.current() if target is None else Target.parse(target)
    if where.kind == "interpreter":
        raise ValueError(
            "target must be one whose times mean something, got interpreter: Triton's interpreter runs thousands of "
            "times slower than any device. Use cpu, or a GPU such as sm_90 (predicted where it is not here)"
        )
    reason = targets.unsupported(spec, where)
    if reason is not None:
        raise ValueError(f"spec must be one that a generated kernel serves on {where}: {reason}")
    return where
