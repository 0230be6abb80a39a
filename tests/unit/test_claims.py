"""Tuners that share a database: each trial is measured once, and who dies or is cut off costs nobody anything."""

from __future__ import annotations

import threading
import time

import pytest
from fleet_fakes import PROFILE, SIZES, SPEC, FleetBench, answer, ended, fake_device
from pagegen_autotune import claims, queueing
from pagegen_autotune.claims import Heartbeat
from pagegen_autotune.executor import LocalExecutor
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.job import Job
from pagegen_autotune.ledger import Ledger
from pagegen_autotune.measured import Run, measured
from pagegen_autotune.patience import Patience
from pagegen_autotune.report import Report

from pagegen import costs, targets
from pagegen.db import DatabaseError, ReadOnlyDatabase, leases, open_db
from pagegen.spec import CacheLayout, CppVariant
from pagegen.spec.result import SEARCH

DEVICE = fake_device("fake CPU")
LAYOUTS = [CacheLayout(block_size=size) for size in SIZES]
# few variants, or most of the time goes into the database
NAMED = [CppVariant(streams=8), CppVariant(streams=4, tile_kv=32), CppVariant(streams=2), CppVariant(streams=1)]
ONLY = {layout: {"decode": NAMED, "mixed": NAMED} for layout in LAYOUTS}


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    monkeypatch.setattr(targets, "code_hash", lambda target: "hash-1")
    monkeypatch.setattr(targets, "default_variant", lambda spec, layout, target, *, decode: CppVariant())
    monkeypatch.setattr(costs, "predict_us", lambda *args, **options: 1000.0)
    monkeypatch.setattr("pagegen_autotune.trials.POLL_S", 0.005)


def tune(db, bench=None, *, heartbeat=None, stop=None) -> Report:
    """A whole run as a fleet makes it, on a bench in this process."""
    stop = stop or StopSignal()
    asking = Patience(stop)
    job = asking(lambda: Job(SPEC, PROFILE, DEVICE, db, LAYOUTS, "guided", "mean", ONLY))
    executor = LocalExecutor(bench or FleetBench(SPEC, None, DEVICE, PROFILE, seed=0), time.monotonic, stop)
    run = Run(executor, time.monotonic, stop, heartbeat=heartbeat, asking=asking)
    return Report(profile=PROFILE.name, device=DEVICE, **measured(job, run))


@pytest.fixture
def alone(tmp_path):
    """The answer and the trials of one tuner that nobody disturbs."""
    with open_db(str(tmp_path / "alone.db")) as db:
        return answer(tune(db)), ended(db)


@pytest.fixture
def file(tmp_path) -> str:
    """Where the kind of database makes no difference."""
    return str(tmp_path / "tuning.db")


def in_threads(url: str, works) -> list[Exception]:
    """Runs each with a database of its own, all at once."""
    failures = []

    def run(work) -> None:
        try:
            with open_db(url) as db:
                work(db)
        except Exception as error:  # noqa: BLE001  shown by the caller
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_two_tuners_at_once_share_the_work_and_each_trial_ends_once(place, alone, monkeypatch):
    monkeypatch.setenv("FLEET_SAMPLE_S", "0.001")
    url, reports, benches = place("shared"), [], []
    open_db(url).close()
    gate = threading.Barrier(2)

    def work(db) -> None:
        bench = FleetBench(SPEC, None, DEVICE, PROFILE, seed=0)
        benches.append(bench)
        gate.wait()
        with Heartbeat(db) as heartbeat:
            reports.append(tune(db, bench, heartbeat=heartbeat))

    assert in_threads(url, [work, work]) == []
    with open_db(url) as db:
        assert [answer(report) for report in reports] == [alone[0]] * 2
        assert ended(db) == alone[1]
        assert leases.held(db.store) == [] and db.verify() == []
    assert all(bench.samples > 20 for bench in benches)  # neither waited for the other to do it all


def test_a_dead_tuners_lease_is_waited_for_and_then_its_race_is_measured(place, alone, monkeypatch):
    with open_db(place("dead")) as db:
        ledger = Ledger(db, SPEC, DEVICE, "hash-1", FleetBench(SPEC, None, DEVICE, PROFILE, seed=0))
        names = [ledger.question(layout, workload) for layout in LAYOUTS for workload in PROFILE.workloads]
        assert db.lease(names, holder="dead", seconds=0.5, what="everything") == set()
        start = time.monotonic()
        with Heartbeat(db) as heartbeat:
            report = tune(db, heartbeat=heartbeat)
        assert time.monotonic() - start > 0.4
        assert answer(report) == alone[0] and ended(db) == alone[1]


def test_what_was_measured_on_a_lease_that_another_took_over_is_left_to_that_one(place):
    with open_db(place("late")) as db:
        conditions = FleetBench(SPEC, None, DEVICE, PROFILE, seed=0)
        ledger = Ledger(db, SPEC, DEVICE, "hash-1", conditions)
        heartbeat = Heartbeat(db)
        heartbeat.seconds = 0.01
        mine = claims.Claims(heartbeat, ledger.question, lambda act: act())
        race = _race()
        assert mine.take(race) == set()
        time.sleep(0.02)
        names = mine.of(race).names
        assert db.lease(names, holder="other", seconds=60, what="the same") == set(names)
        other = Ledger(db, SPEC, DEVICE, "hash-1", conditions)
        other.add([_trial(other, race, 80.0)])
        ledger.add([_trial(ledger, race, 99.0)], mine.of(race))
        assert [t.samples_us for t in db.trials()] == [(80.0,)] == [t.samples_us for t in ledger.trials(LAYOUTS[0])]
        assert ledger.added.total() == 0 and leases.held(db.store)[0]["holder"] == "other"


def test_a_commit_whose_answer_was_lost_is_not_stored_twice(file, monkeypatch):
    with open_db(file) as db:
        stop = StopSignal()
        ledger = Ledger(
            db, SPEC, DEVICE, "hash-1", FleetBench(SPEC, None, DEVICE, PROFILE, seed=0), asking=Patience(stop)
        )
        mine = claims.Claims(Heartbeat(db), ledger.question, Patience(stop))
        race = _race()
        mine.take(race)
        written = ledger._written
        lost = iter([True])

        def answer_lost(*arguments) -> bool:
            done = written(*arguments)
            if next(lost, False):
                raise DatabaseError("the connection was cut after the commit")
            return done

        monkeypatch.setattr(ledger, "_written", answer_lost)
        ledger.add([_trial(ledger, race, 80.0)], mine.of(race))
        assert len(db.trials()) == 1 == len(ledger.trials(LAYOUTS[0]))


def _race(purpose: str = SEARCH):
    from pagegen_autotune.executor import Race

    entries = ((LAYOUTS[0], CppVariant()), (LAYOUTS[0], CppVariant(streams=8)))
    return Race(
        entries=entries, workload=PROFILE.workloads[0], purpose=purpose, rounds=1, until=1e9, seed=0,
        essential=entries[:1],
    )  # fmt: skip


def _trial(ledger, race, us: float):
    layout, variant = race.entries[1]
    return ledger.success(
        layout, variant, race.workload, [us], session=f"s{us}", purpose=race.purpose, max_error=0.0
    )  # fmt: skip


def test_a_living_tuner_keeps_its_leases_however_long_a_race_takes(place, monkeypatch):
    monkeypatch.setattr(claims, "LEASE_S", 0.2)
    with open_db(place("long")) as db, Heartbeat(db) as heartbeat:
        mine = claims.Claims(heartbeat, lambda layout, workload: f"{layout.block_size}", lambda act: act())
        mine.take(_race())
        for _ in range(6):
            time.sleep(0.1)
            assert db.lease(["16"], holder="other", seconds=1, what="the same") is None


class Flickering:
    """A database that is out of reach now and then."""

    def __init__(self, db, out: set[int], error: Exception):
        self._db, self._out, self._error, self.calls = db, out, error, 0

    def __getattr__(self, name: str):
        verb = getattr(self._db, name)

        def asked(*arguments, **options):
            self.calls += 1
            if self.calls in self._out:
                raise self._error
            return verb(*arguments, **options)

        return asked


def test_a_database_that_is_out_of_reach_now_and_then_costs_time_and_nothing_else(file, alone):
    with open_db(file) as db:
        flickering = Flickering(db, set(range(3, 500, 7)), DatabaseError("it does not answer"))
        heartbeat = Heartbeat(flickering)  # never entered: its thread would count calls, too
        pauses = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pagegen_autotune.patience.time.sleep", pauses.append)
            report = tune(flickering, heartbeat=heartbeat)
        assert answer(report) == alone[0] and ended(db) == alone[1] and len(pauses) > 5


def test_what_waiting_cannot_mend_is_raised_at_once(file):
    with open_db(file) as db:
        refusing = Flickering(db, set(range(1000)), ReadOnlyDatabase("it cannot be written"))
        with pytest.raises(ReadOnlyDatabase):
            tune(refusing)
        assert refusing.calls == 1


def test_a_stop_ends_the_waiting_for_a_database():
    stop = StopSignal()
    stop.requested = True

    def act() -> None:
        raise DatabaseError("it does not answer")

    with pytest.raises(KeyboardInterrupt):
        Patience(stop)(act)


def test_patience_ends():
    def act() -> None:
        raise DatabaseError("it does not answer")

    with pytest.raises(DatabaseError, match="does not answer"):
        Patience(StopSignal(), limit_s=0.05)(act)


def test_a_tuner_that_stops_gives_its_leases_back(file):
    class Stopping(FleetBench):
        def sample(self, layout, variant, workload):
            if self.samples == 20:
                raise KeyboardInterrupt
            return super().sample(layout, variant, workload)

    with open_db(file) as db:
        with Heartbeat(db) as heartbeat:
            report = tune(db, Stopping(SPEC, None, DEVICE, PROFILE, seed=0), heartbeat=heartbeat)
        assert report.interrupted and leases.held(db.store) == [] and db.trials()


def test_a_race_waits_behind_all_before_it_where_it_is_told_to():
    asked = []

    def races():
        for race in ("one", "two", None, "three"):
            asked.append(race)
            yield race

    queue = queueing.Queue(races(), None, None)  # type: ignore[arg-type]
    queue._ledger = type("Nothing", (), {"arrivals": 0})()
    assert queue.next(0) == "one" and asked == ["one"]  # nothing is asked for before it can be started
    assert queue.next(1) == "two" and queue.next(2) is None and asked == ["one", "two", None]
    assert queue.next(1) is None and not queue.ended
    assert queue.next(0) == "three" and queue.next(1) is None and queue.ended
