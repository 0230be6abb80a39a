"""The search on recorded times: a bench whose clock is a recording, and what the search's choice is worth.

The search sees half of the rounds of a recording, drawn anew for each seed; what it chose is judged on the other half.
The code that runs is the tuner's own: `Session`, with its races, confirmations and portfolios.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagegen_autotune.cells import Cell
from pagegen_autotune.executor import LocalExecutor
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.ledger import Ledger
from pagegen_autotune.measure import Verdict
from pagegen_autotune.objective import OBJECTIVES
from pagegen_autotune.portfolio import decide
from pagegen_autotune.probing import REACH
from pagegen_autotune.search import Strategy
from pagegen_autotune.session import ROUNDS, Session
from pagegen_autotune.space import Space
from pagegen_autotune.tree import leaves

from pagegen import costs
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CompileFacts,
    Device,
    Measurement,
    Profile,
    Status,
    Variant,
    Workload,
)

Rounds = Mapping[Workload, Sequence[int]]
Times = Mapping[tuple[Variant, Workload], float]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A case as it was measured: the default's microseconds by workload and round, and every variant's ratio to the
    default's call beside it."""

    name: str
    spec: AttentionSpec
    layout: CacheLayout
    profile: Profile
    device: Device
    environment: Mapping[str, str]
    code_hash: str
    variants: tuple[Variant, ...]
    default_us: Mapping[Workload, tuple[float, ...]]
    ratios: Mapping[tuple[Variant, Workload], tuple[float, ...]]

    @classmethod
    def load(cls, path: Path) -> Recording:
        """What `record.write` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        profile = Profile.from_dict(data["profile"])
        variants = tuple(map(Variant.from_dict, data["variants"]))
        default_us, ratios = {}, {}
        for workload, cell in zip(profile.workloads, data["cells"], strict=True):
            default_us[workload] = tuple(cell["default_us"])
            for variant, row in zip(variants, cell["ratios"], strict=True):
                ratios[variant, workload] = tuple(r / 1e4 for r in row)
        return cls(
            name=data["case"], spec=AttentionSpec.from_dict(data["spec"]),
            layout=CacheLayout(**data["layout"]), profile=profile, device=Device.from_dict(data["device"]),
            environment=data["environment"], code_hash=data["code_hash"], variants=variants, default_us=default_us,
            ratios=ratios,
        )  # fmt: skip

    @property
    def default(self) -> Variant:
        return self.variants[0]

    def times(self, rounds: Rounds) -> Times:
        """Microseconds of every variant on every workload: medians over some of the rounds."""
        base = {w: statistics.median(us[i] for i in rounds[w]) for w, us in self.default_us.items()}
        return {(v, w): base[w] * statistics.median(r[i] for i in rounds[w]) for (v, w), r in self.ratios.items()}

    def halves(self, seed: int) -> tuple[Rounds, Rounds]:
        """The rounds that the search of a seed sees, in an order drawn at random, and those that it is judged by."""
        searched, judged = {}, {}
        for number, (workload, us) in enumerate(self.default_us.items()):
            order = list(range(len(us)))
            random.Random(f"{seed} {number}").shuffle(order)
            searched[workload], judged[workload] = order[: len(us) // 2], order[len(us) // 2 :]
        return searched, judged

    def step_us(self, times: Times, served: Mapping[Workload, Variant]) -> float:
        """The expected step time of serving each workload by its variant."""
        return OBJECTIVES["mean"]({w: times[served[w], w] for w in served}, list(self.profile))

    def all_by(self, variant: Variant) -> dict[Workload, Variant]:
        """The choice of one variant for everything."""
        return dict.fromkeys(self.profile.workloads, variant)

    def best(self, times: Times) -> Variant:
        """The variant with the least step time."""
        return min(self.variants, key=lambda v: self.step_us(times, self.all_by(v)))


class ReplayBench:
    """A `Bench` that answers from a recording. Asked again for a contender, or for another workload, it goes on to the
    next round of the half that the search sees, and after the last again to the first."""

    regime = "cold"
    workers = 1

    def __init__(self, recording: Recording, seed: int) -> None:
        self.environment = dict(recording.environment)
        self.seconds = 0.0
        self.samples: Counter[tuple[Variant, Workload]] = Counter()
        self.compiled: set[Variant] = set()
        self._recording = recording
        self._order, _ = recording.halves(seed)
        self._at: Counter[Workload] = Counter()
        self._seen: set[Variant] = set()
        self._workload: Workload | None = None

    def check(self, layout: CacheLayout, variants: Sequence[Variant]) -> dict[Variant, Verdict]:
        self.compiled.update(variants)
        return {v: Verdict(status=Status.OK, max_error=0.0) for v in variants}

    def sample(self, layout: CacheLayout, variant: Variant, workload: Workload) -> float:
        if workload != self._workload or variant in self._seen:
            self._at[workload] += 1
            self._seen.clear()
        self._workload = workload
        self._seen.add(variant)
        self.samples[variant, workload] += 1
        order = self._order[workload]
        number = order[self._at[workload] % len(order)]
        us = self._recording.default_us[workload][number] * self._recording.ratios[variant, workload][number]
        self.seconds += us / 1e6
        return us

    def gauge(self) -> float | None:
        return None

    def facts(self, layout: CacheLayout, variant: Variant, *, decode: bool) -> CompileFacts | None:
        return None


class _Memory:
    """The part of a database that a run asks for, in memory."""

    @contextmanager
    def atomic(self) -> Iterator[None]:
        yield

    def record(self, measurement: Measurement) -> bool:
        return True

    def trials(self, **question: Any) -> list[Measurement]:
        return []


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of a search. `regret` is how much longer the profile's step takes than with the best variant for it, both
    by the rounds that nobody searched; `against_search` the same against the variant that an exhaustive search over all
    of the search's rounds would have chosen. Shares are of all variants on all workloads: `cells` of what was measured
    at all, `samples` of the samples at as many rounds as the tuner takes at most, `trials` of the database's rows (the
    default's, confirmations and drift included), `compiled` of the variants. `stated_at_most` is the regret that the
    tuner itself states, at its confidence."""

    regret: float
    against_search: float
    cells: float
    samples: float
    trials: float
    compiled: float
    variants: int
    speedup: float
    stated_at_most: float | None


def replay(
    recording: Recording, strategy: Strategy, seed: int, *, reach: float = REACH, budget: float | None = None
) -> Outcome:
    """One run of a strategy on a recording, with a budget of trials as a share of all variants on all workloads."""
    whole = len(recording.variants) * len(recording.profile.workloads)
    bench = ReplayBench(recording, seed)
    cell = _cell(recording)
    ledger = Ledger(_Memory(), recording.spec, recording.device, recording.code_hash, bench)  # type: ignore[arg-type]
    stop = StopSignal()

    def clock() -> float:
        return bench.seconds

    session = Session(
        [cell], ledger, LocalExecutor(bench, clock, stop), strategy, clock=clock, budget_s=None, stop=stop,
        progress=False, seed=seed, objective=OBJECTIVES["mean"], reach=reach,
        max_trials=None if budget is None else int(budget * whole),
    )  # fmt: skip
    session.run(lambda cell: None)
    decision = decide(session.evidence(cell), cell.loads, "decode")
    assert decision is not None and decision.tree is not None
    stated = decision.regret_bound
    served = {w: leaf.variant for leaf in leaves(decision.tree) for w in leaf.part}
    seen, times = map(recording.times, recording.halves(seed))
    best, exhaustive, default, ours = (
        recording.step_us(times, chosen)
        for chosen in (*map(recording.all_by, (recording.best(times), recording.best(seen), recording.default)), served)
    )
    return Outcome(
        regret=ours / best - 1,
        against_search=ours / exhaustive - 1,
        cells=len(bench.samples) / whole,
        samples=bench.samples.total() / (whole * ROUNDS),
        trials=ledger.added.total() / whole,
        compiled=len(bench.compiled) / len(recording.variants),
        variants=len(set(served.values())),
        speedup=default / ours,
        stated_at_most=None if stated is None else stated.at_most,
    )


def _cell(recording: Recording) -> Cell:
    """The search of the recorded grid, from the default on, as the tuner sets it up."""
    names = [n for n in type(recording.default).__dataclass_fields__ if _values(recording, n)[1:]]
    axes = {name: _values(recording, name) for name in names}
    known = set(recording.variants)
    loads = sorted(recording.profile, key=lambda load: -load[1] * (load[0].total_context + load[0].total_q))
    prior = _prior(recording, loads[0][0])
    space = Space(
        recording.default, lambda v: [] if v in known else ["not recorded"], (), axes=axes, prior=prior.__getitem__
    )
    return Cell(layout=recording.layout, batches="decode", space=space, loads=tuple(loads))


def _values(recording: Recording, name: str) -> tuple[Any, ...]:
    return tuple(sorted({getattr(v, name) for v in recording.variants}))


@functools.cache
def _known_prior(name: str) -> dict[Variant, float]:
    return {}


def _prior(recording: Recording, workload: Workload) -> dict[Variant, float]:
    """What the cost model expects of every variant, asked once a recording."""
    known = _known_prior(recording.name)
    for variant in recording.variants:
        if variant not in known:
            known[variant] = costs.predict_us(recording.spec, recording.layout, variant, recording.device, workload)
    return known
