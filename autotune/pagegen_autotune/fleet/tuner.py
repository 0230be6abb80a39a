"""`tune_fleet`: one run of the tuner on every distinct device of a Ray cluster, side by side, into one database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from pagegen.spec import AttentionSpec, Profile, check
from pagegen_autotune.arguments import layouts_of, opened
from pagegen_autotune.claims import Heartbeat, LeaseStore
from pagegen_autotune.fleet.cluster import Cluster, Member
from pagegen_autotune.fleet.executor import RayExecutor
from pagegen_autotune.fleet.station import Kit
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.job import Job
from pagegen_autotune.ledger import SAME_ENVIRONMENT, Store
from pagegen_autotune.measured import Run, TuneError, measured
from pagegen_autotune.patience import Patience
from pagegen_autotune.progress import Progress
from pagegen_autotune.report import Report

log = logging.getLogger(__name__)

# A node that is busy with another job is waited for as long as others are measured, and so long at least.
START_WAIT_S = 120.0
_LOOK_S = 0.1


class SharedStore(Store, LeaseStore, Protocol):
    """The part of `pagegen.db.Database` that tuners which share it use."""


@dataclass(frozen=True, kw_only=True)
class FleetReport:
    """What a run on a cluster found: a report for each distinct device. `left_out` says which nodes could not be used,
    and which devices could not be tuned. `lost` counts the stations that were lost on the way."""

    reports: tuple[Report, ...]
    left_out: tuple[str, ...] = ()
    lost: int = 0
    interrupted: bool = False
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return {
            "devices": [report.to_dict() for report in self.reports],
            "left_out": list(self.left_out),
            "lost_stations": self.lost,
            "interrupted": self.interrupted,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        parts = [str(report) for report in self.reports]
        lines = [f"left out: {what}" for what in self.left_out]
        lines += [f"{self.lost} stations were lost; their work was done by others"] if self.lost else []
        return "\n\n".join([*parts, "\n".join(lines)] if lines else parts)


def tune_fleet(
    spec: AttentionSpec,
    profile: Profile,
    *,
    address: str = "auto",
    devices: Sequence[str] = (),
    block_sizes: Sequence[int] | None = None,
    db: SharedStore | str | None = None,
    budget_s: float | None = None,
    progress: bool = True,
    orders: Sequence[str] = ("NHD",),
    strategy: str = "guided",
    objective: str = "mean",
    budget_trials: int | None = None,
    seed: int = 0,
    kit: Kit | None = None,
) -> FleetReport:
    """`tune` on every distinct device of the Ray cluster at `address` ("auto" or HOST:PORT), or on those of `devices`:
    targets, or parts of names.

    Each GPU of the cluster, and the CPU of each node without one, is measured on by one station at a time; equal ones
    share the work. Trials go to `db` as they come, leased while they are measured, so that several runs may share it.
    What a lost node was at is done by another, and a run that is started again goes on where it was. `budget_s` and
    `budget_trials` hold for each distinct device. Ctrl-C and SIGTERM end the run early, as in `tune`.

    Raises ValueError for bad arguments and for a spec with score or mask functions, which other processes do not know,
    TuneError where Ray, the cluster or a device that is wanted is missing, or nothing could be tuned, and the
    database's errors; a database that is out of reach is waited for.
    """
    layouts = layouts_of(
        spec, profile, block_sizes, orders, strategy=strategy, objective=objective, budget_s=budget_s,
        budget_trials=budget_trials, seed=seed,
    )  # fmt: skip
    check.instance("address", address, str)
    wanted = check.instances("devices", devices, str)
    if spec.score_mod is not None or spec.mask_mod is not None:
        raise ValueError("spec must be without score and mask functions on a cluster: other processes do not know them")
    start = time.monotonic()
    with ExitStack() as stack:
        store: SharedStore = stack.enter_context(opened(db))
        stop = stack.enter_context(StopSignal())
        cluster = stack.enter_context(
            Cluster(address, spec, profile, devices=wanted, seed=seed, kit=kit or Kit())
        )  # fmt: skip
        asking = Patience(stop)
        asking(lambda: store.save_profile(profile))
        heartbeat = stack.enter_context(Heartbeat(store))

        def begin(member: Member, position: int) -> _Kind:
            executor = RayExecutor(cluster, spec, member, clock=time.monotonic, stop=stop)
            run = Run(executor, time.monotonic, stop, budget_s, budget_trials, seed, heartbeat, asking)
            line = Progress(progress, lambda: _left(start, budget_s), name=lambda: _name(executor), position=position)

            def work() -> dict[str, Any]:
                job = asking(lambda: Job(spec, profile, executor.device, store, layouts, strategy, objective))
                return measured(job, run, line=line)

            return _Kind(executor, work, line, profile.name)

        kinds = _run(cluster, stop, begin)
        return _report(cluster, kinds, stop, time.monotonic() - start)


class _Kind:
    """The run of one distinct device, in a thread of its own."""

    def __init__(self, executor: RayExecutor, work: Callable[[], dict[str, Any]], line: Progress, profile: str) -> None:
        self.executor = executor
        self.report: Report | None = None
        self.error: Exception | None = None
        self._work = work
        self._line = line
        self._profile = profile
        self.thread = threading.Thread(target=self._run, name=f"pagegen {executor.device.name}")
        self.thread.start()

    def _run(self) -> None:
        start = time.monotonic()
        try:
            facts = self._work()
            seconds = time.monotonic() - start
            self.report = Report(profile=self._profile, device=self.executor.device, seconds=seconds, **facts)
        except KeyboardInterrupt:  # before the run began to measure
            log.info("%s was stopped before anything was measured", self.executor.device.name)
        except Exception as error:  # one device's end is not that of the others; told in the report
            self.error = error
        finally:
            self._line.close()
            self.executor.close()


def _run(cluster: Cluster, stop: StopSignal, begin: Any) -> list[_Kind]:
    """Begins a run for every distinct device as its first station is ready, and gives it the others that come."""
    kinds: dict[Any, _Kind] = {}
    begun = time.monotonic()
    try:
        while not stop.requested:
            for member in cluster.look():
                key = _key(member)
                if key not in kinds:
                    kinds[key] = begin(member, len(kinds))
                elif kinds[key].thread.is_alive():
                    kinds[key].executor.join(member)
                else:
                    cluster.retire(member)
            working = any(kind.thread.is_alive() for kind in kinds.values())
            if not working and (not cluster.starting or time.monotonic() - begun > START_WAIT_S):
                break
            time.sleep(_LOOK_S)
    except cluster.ray.exceptions.RayError as error:
        stop.requested = True
        what = f"the cluster does not answer ({_words(error)})"
        raise TuneError(f"{what}: what was measured is stored, run the same command again") from error
    except BaseException:
        stop.requested = True  # a second Ctrl-C: the threads must not go on alone
        raise
    finally:
        for kind in kinds.values():
            kind.thread.join()
    return list(kinds.values())


def _report(cluster: Cluster, kinds: Sequence[_Kind], stop: StopSignal, seconds: float) -> FleetReport:
    left_out = list(cluster.left_out)
    left_out += [f"{kind.executor.device.name}: {_words(kind.error)}" for kind in kinds if kind.error is not None]
    if cluster.starting and not stop.requested:
        left_out.append(f"{cluster.starting} nodes had no free device within {START_WAIT_S:.0f} s")
    reports = tuple(kind.report for kind in kinds if kind.report is not None)
    if not reports and not stop.requested:
        others = f"; it has {', '.join(sorted(cluster.other))}" if cluster.other else ""
        raise TuneError(f"nothing could be tuned on the cluster{others}: {'; '.join(left_out) or 'no such device'}")
    lost = sum(kind.executor.lost for kind in kinds)
    interrupted = stop.requested or any(report.interrupted for report in reports)
    return FleetReport(
        reports=reports, left_out=tuple(left_out), lost=lost, interrupted=interrupted, seconds=seconds
    )  # fmt: skip


def _words(error: Exception) -> str:
    """An error in one line."""
    return check.first_line(error) if isinstance(error, TuneError) else check.class_and_line(error)


def _key(member: Member) -> tuple[Any, ...]:
    """Equal for devices whose times compare."""
    from pagegen.db import keys

    found = member.found
    environment = tuple(found.environment.get(name, "") for name in SAME_ENVIRONMENT)
    return keys.device_identity(member.device), found.regime, environment


def _name(executor: RayExecutor) -> str:
    lost = f", {executor.lost} lost" if executor.lost else ""
    return f"{executor.device.name} ({executor.stations} measuring{lost})"


def _left(start: float, budget_s: float | None) -> float:
    return float("inf") if budget_s is None else start + budget_s - time.monotonic()
