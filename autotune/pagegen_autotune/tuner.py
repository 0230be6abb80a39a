"""`tune`: from a spec and a profile to measured trials and a dispatch rule in the database."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from pagegen import costs, settings, targets
from pagegen.spec import AttentionSpec, CacheLayout, CompileFacts, Device, Profile, Target, Variant, Workload, check
from pagegen.spec.layout import USUAL_BLOCK_SIZES
from pagegen_autotune import known
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.isolated import IsolatedBench
from pagegen_autotune.ledger import Ledger, Store
from pagegen_autotune.measure import Bench, KernelBench
from pagegen_autotune.portfolio import Decision, decide, dispatch_rule
from pagegen_autotune.report import Report, Row, count_reasons
from pagegen_autotune.search import STRATEGIES, Strategy, given
from pagegen_autotune.session import Cell, Session
from pagegen_autotune.space import space_around

log = logging.getLogger(__name__)


class TuneError(RuntimeError):
    """Nothing could be tuned here."""


def tune(
    spec: AttentionSpec,
    profile: Profile,
    *,
    block_sizes: Sequence[int] | None = None,
    target: str | Target | None = None,
    db: Store | str | None = None,
    budget_s: float | None = None,
    progress: bool = True,
    orders: Sequence[str] = ("NHD",),
    strategy: str = "coordinate",
    bench: Bench | None = None,
    clock: Callable[[], float] = time.monotonic,
    seed: int = 0,
    only: Mapping[CacheLayout, Mapping[str, Sequence[Variant]]] | None = None,
) -> Report:
    """Finds the variants that serve `spec` best on the batches of `profile`, for each block size and memory order.

    On a target that is here (`cpu`, or this machine's GPU) candidates are checked, then timed, in a process of their
    own (see `pagegen_autotune.isolated`); every trial goes to `db` (a Database, path or URL; default: the default
    database), and trials that are there already are not run again. For a GPU that is not here the cost model ranks and
    the compiler verifies. Either way the dispatch rule of each layout is left in `db`. `budget_s` bounds the seconds;
    the default variants are measured whatever it is.
    Ctrl-C and SIGTERM end the run early: the report then says `interrupted`, and the next run goes on from there.
    `bench` and `clock` replace what compiles, checks and times, and what tells the time. `only` names the layouts and
    for each class of batches ("decode", "mixed" or "all") the variants to measure in place of a search.

    Raises ValueError for a spec that no generated kernel serves, for the interpreter and for bad arguments, TuneError
    when not even a default variant passes its check or an absent GPU cannot be compiled for, and the database's errors.
    """
    where, layouts = _checked_arguments(spec, profile, block_sizes, target, budget_s, orders, strategy)
    if only is not None:
        layouts = [layout for layout in layouts if layout in only]
    with ExitStack() as stack:
        store: Store = stack.enter_context(_open(db)) if db is None or isinstance(db, str) else db
        stop = stack.enter_context(StopSignal())
        start = clock()
        here = bench is not None or is_present(where)
        device = targets.current_device(where) if here else costs.shipped_device(where)
        job = _Job(spec, profile, device, store, layouts, strategy, only)
        store.save_profile(profile)
        if here:
            used = bench or stack.enter_context(_bench(spec, where, device, profile, seed))
            facts = _measured(job, used, clock, budget_s, stop, progress, seed)
        else:
            facts = _predicted(job, clock, budget_s, stop)
        return Report(profile=profile.name, device=device, seconds=clock() - start, **facts)


def _bench(
    spec: AttentionSpec, target: Target, device: Device, profile: Profile, seed: int
) -> AbstractContextManager[Bench]:
    """The bench of a device that is here, in a process of its own. Score and mask functions are known to this process
    alone: kernels with one run in it."""
    if spec.score_mod is not None or spec.mask_mod is not None:
        log.warning("candidates with a score or mask function run in this process: one that crashes ends it")
        return nullcontext(KernelBench(spec, target, device, profile, seed=seed))
    return IsolatedBench(spec, target, device, profile, seed=seed)


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


def default_variants(spec: AttentionSpec, layout: CacheLayout, target: Target) -> dict[str, Variant]:
    """The classes of batches, the narrower first, and their default variants. Where a row's result must not depend on
    what it is batched with, one variant serves all."""
    mixed = targets.default_variant(spec, layout, target, decode=False)
    if spec.batch_invariant:
        return {"all": mixed}
    return {"decode": targets.default_variant(spec, layout, target, decode=True), "mixed": mixed}


class _Job:
    """What both ways of tuning share: the cells, and how their decisions become stored rules."""

    def __init__(
        self, spec: AttentionSpec, profile: Profile, device: Device, store: Store, layouts: Sequence[CacheLayout],
        strategy: str, only: Mapping[CacheLayout, Mapping[str, Sequence[Variant]]] | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.profile = profile
        self.device = device
        self.store = store
        self.strategy: Strategy = STRATEGIES[strategy]
        self.code_hash = targets.code_hash(device.target)
        self.cells = [c for layout in layouts for c in self._cells(layout)]
        self.layouts = layouts
        if only is not None:
            named = {cell.space: only[cell.layout].get(cell.batches, ()) for cell in self.cells}
            self.strategy = lambda space: given(named[space])

    def defaults(self, layout: CacheLayout) -> dict[str, Variant]:
        """See `default_variants`."""
        return default_variants(self.spec, layout, self.device.target)

    def _cells(self, layout: CacheLayout) -> list[Cell]:
        cells = []
        for batches, start in self.defaults(layout).items():
            loads: dict[Workload, float] = {}
            for workload, weight in self.profile:
                if batches in ("all", "decode" if workload.is_decode else "mixed"):
                    loads[workload] = loads.get(workload, 0.0) + weight  # a profile may hold one batch twice
            # heaviest first: what a short budget leaves out must matter least
            ordered = sorted(loads.items(), key=lambda load: -load[1] * (load[0].total_context + load[0].total_q))
            if ordered:
                space = space_around(start, self.spec, layout, self.device)
                cells.append(Cell(layout=layout, batches=batches, space=space, loads=tuple(ordered)))
        return cells

    def row(self, layout: CacheLayout, decisions: Sequence[Decision], kind: str, evidence: dict[str, Any]) -> Row:
        """The rule of `layout` from its decisions, as a row."""
        verb = "tuned" if kind == "measured" else "predicted, not measured,"
        rule = dispatch_rule(
            decisions, self.defaults(layout), kind=kind, source=f"{verb} on {self.profile.name} for {self.device.name}",
            evidence={"profile": self.profile.name, "device": self.device.name, **evidence},
        )  # fmt: skip
        return Row(layout=layout, rule=rule, decisions=tuple(decisions))

    def save(self, row: Row) -> None:
        self.store.save_portfolio(
            spec=self.spec, layout=row.layout, device=self.device, profile=self.profile, rule=row.rule,
            code_hash=self.code_hash,
        )  # fmt: skip

    def save_known(self, row: Row, facts: Iterable[CompileFacts | None]) -> None:
        """Stores what is known without a run: what a compiler told, and what the cost model expects of the variants
        that a row's decisions name, on the profile's batches."""
        loads = {cell.batches: [load for load, _ in cell.loads] for cell in self.cells if cell.layout == row.layout}
        told = list(filter(None, facts))
        expected = [
            prediction
            for batches, variant in _named(row)
            for prediction in known.predictions(
                self.spec, row.layout, variant, self.device, loads[batches], self.code_hash
            )
        ]
        with self.store.atomic():  # all is at hand: no other writer waits for a compiler
            for found in told:
                self.store.record_facts(found)
            for prediction in expected:
                self.store.record_prediction(prediction)

    def rejected(self, *others: dict[str, tuple[str, ...]]) -> dict[str, int]:
        return count_reasons([*(cell.space.rejected for cell in self.cells), *others])


def _measured(
    job: _Job, bench: Bench, clock: Callable[[], float], budget_s: float | None, stop: StopSignal, progress: bool,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    start = clock()
    ledger = Ledger(job.store, job.spec, job.device, job.code_hash, bench)
    session = Session(
        job.cells, ledger, bench, job.strategy, clock=clock, budget_s=budget_s, stop=stop, progress=progress, seed=seed
    )

    def row(layout: CacheLayout) -> Row | None:
        """None where a class has no measured default: its rule would say nothing."""
        cells = [c for c in job.cells if c.layout == layout]
        decisions = [decide(session.evidence(c), c.loads, c.batches) for c in cells]
        made = [d for d in decisions if d is not None]
        trials = len(ledger.trials(layout))
        return job.row(layout, made, "measured", {"trials": trials}) if len(made) == len(cells) else None

    def save(cell: Cell) -> None:
        found = row(cell.layout)
        if found is not None:
            job.save(found)

    interrupted = False
    try:
        session.run(save)
    except KeyboardInterrupt:
        interrupted = True
        for layout in job.layouts:
            save(next(c for c in job.cells if c.layout == layout))
    rows = tuple(r for r in map(row, job.layouts) if r is not None)
    for made in () if interrupted else rows:
        # a GPU kernel is compiled once more to look at it, about a second each
        late = job.device.target.is_gpu and budget_s is not None and clock() - start > budget_s
        kernels = [] if late else [(v, decode) for batches, v in _named(made) for decode in known.FORMS[batches]]
        job.save_known(made, (bench.facts(made.layout, variant, decode=decode) for variant, decode in kernels))
    if not rows and not interrupted:
        raise TuneError(f"no default variant ran on {job.device.target}: {'; '.join(session.left_out)}")
    return {
        "kind": "measured",
        "rows": rows,
        "trials": {status.value: count for status, count in sorted(ledger.added.items(), key=lambda i: -i[1])},
        "resumed": ledger.resumed,
        "rejected": job.rejected(),
        "left_out": tuple(session.left_out),
        "interrupted": interrupted,
    }


def _predicted(job: _Job, clock: Callable[[], float], budget_s: float | None, stop: StopSignal) -> dict[str, Any]:
    from pagegen_autotune.offline import Prediction

    target = job.device.target
    if importlib.util.find_spec("triton") is None:
        raise TuneError(f"compiling for {target} needs triton: pip install pagegen-attention[triton]")
    if settings.interpreting():
        raise TuneError(f"compiling for {target} needs TRITON_INTERPRET unset: interpreting, nothing is compiled")
    deadline = None if budget_s is None else clock() + budget_s
    prediction = Prediction(job.spec, job.device, job.strategy)
    rows: list[Row] = []
    left_out: list[str] = []

    def may_go_on() -> bool:
        stop.check()
        return deadline is None or clock() < deadline

    interrupted = False
    try:
        for layout in job.layouts:
            decisions = [prediction.decide(c, may_go_on) for c in job.cells if c.layout == layout]
            row = job.row(layout, decisions, "predicted", {})
            rows.append(row)
            stored = job.store.portfolio(job.spec, layout, target, job.code_hash)
            if stored is not None and stored.evidence.get("kind") == "measured":
                where = f"block size {layout.block_size} {layout.order}"
                left_out.append(f"{where}: the measured rule in the database stays")
            else:
                job.save(row)
            job.save_known(row, (facts for facts in prediction.compiled if facts.layout == layout))
    except KeyboardInterrupt:
        interrupted = True
    return {
        "kind": "predicted",
        "rows": tuple(rows),
        "rejected": job.rejected(prediction.rejected),
        "left_out": tuple(left_out),
        "interrupted": interrupted,
    }


def _named(row: Row) -> list[tuple[str, Variant]]:
    """The variants of a row's decisions, with the class of batches of each."""
    return [(d.batches, variant) for d in row.decisions for variant in dict.fromkeys((d.chosen, d.default))]


def _checked_arguments(
    spec: AttentionSpec, profile: Profile, block_sizes: Sequence[int] | None, target: str | Target | None,
    budget_s: float | None, orders: Sequence[str], strategy: str,
) -> tuple[Target, list[CacheLayout]]:  # fmt: skip
    check.instance("spec", spec, AttentionSpec)
    check.instance("profile", profile, Profile)
    if budget_s is not None and not budget_s > 0:
        raise ValueError(f"budget_s must be positive, got {budget_s!r}")
    check.one_of("strategy", strategy, STRATEGIES)
    where = Target.current() if target is None else Target.parse(target)
    if where.kind == "interpreter":
        raise ValueError(
            "target must be one whose times mean something, got interpreter: Triton's interpreter runs thousands of "
            "times slower than any device. Use cpu, or a GPU such as sm_90 (predicted where it is not here)"
        )
    sizes = USUAL_BLOCK_SIZES if block_sizes is None else tuple(block_sizes)
    layouts = [CacheLayout(block_size=check.integer("block_sizes", b), order=o) for o in orders for b in sizes]
    if not layouts:
        raise ValueError(f"block_sizes and orders must not be empty, got {sizes} and {tuple(orders)}")
    reason = targets.unsupported(spec, where)
    if reason is not None:
        raise ValueError(f"spec must be one that a generated kernel serves on {where}: {reason}")
    # orders that are the same bytes are one layout to the operator
    return where, list(dict.fromkeys(layout.canonical(spec.num_kv_heads) for layout in layouts))


def _open(url: str | None) -> Any:
    from pagegen.db import open_db

    return open_db(url)
