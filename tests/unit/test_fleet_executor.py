"""Races and checks on stations that are lost, faulty or slow, with stand-ins for Ray and its actors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fleet_fakes import KIT, PROFILE, SPEC
from pagegen_autotune.executor import Race
from pagegen_autotune.fleet import executor as fleet_executor
from pagegen_autotune.fleet.cluster import Member
from pagegen_autotune.fleet.executor import RayExecutor
from pagegen_autotune.fleet.libraries import Library
from pagegen_autotune.fleet.station import Built, Station, Unsound
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.measure import Verdict
from pagegen_autotune.measured import TuneError

from pagegen.spec import CacheLayout, CppVariant, Status
from pagegen.spec.result import CONFIRM

LAYOUT = CacheLayout(block_size=16)
DEFAULT, OTHER, THIRD = CppVariant(), CppVariant(streams=8), CppVariant(streams=2)


class RayError(Exception):
    pass


class FakeRay:
    """References are calls that are made when they are asked for, the earliest first."""

    exceptions = SimpleNamespace(RayError=RayError)

    def wait(self, references, *, num_returns, timeout):
        return references[:num_returns], references[num_returns:]

    def get(self, reference):
        return reference()

    def kill(self, actor):
        actor.killed = True


class Actor:
    """A station in this process. `fault(verb, arguments)` may raise what a call ends with."""

    def __init__(self, station, fault=None):
        self.calls: list = []
        for verb in ("check", "race", "facts", "build"):
            setattr(self, verb, SimpleNamespace(remote=self._remote(station, verb, fault)))

    def _remote(self, station, verb, fault):
        def remote(*arguments):
            self.calls.append((verb, arguments))

            def reference():
                if fault is not None:
                    fault(verb, arguments)
                return getattr(station, verb)(*arguments)

            return reference

        return remote


class FakeCluster:
    def __init__(self, builders=()):
        self.ray = FakeRay()
        self.ended: list = []
        self._builders = list(builders)

    def lost(self, member):
        self.ended.append((member, "lost"))

    def retire(self, member, why=""):
        self.ended.append((member, why or "retired"))

    def builders(self, device, toolchain):
        return self._builders


def member(fault=None) -> Member:
    station = Station(SPEC, PROFILE, gpu=False, seed=0, kit=KIT, expected={})
    return Member(Actor(station, fault), station.describe(), "node")


def executor(*members: Member, cluster: FakeCluster | None = None) -> RayExecutor:
    made = RayExecutor(cluster or FakeCluster(), SPEC, members[0], clock=lambda: 0.0, stop=StopSignal())
    for one in members[1:]:
        made.join(one)
    assert made.free == len(members)
    return made


def race(seed: int = 0) -> Race:
    entries = ((LAYOUT, DEFAULT), (LAYOUT, OTHER))
    return Race(
        entries=entries, workload=PROFILE.workloads[0], purpose=CONFIRM, rounds=3, until=9.0, seed=seed,
        essential=entries[:1],
    )  # fmt: skip


def lose(*verbs):
    def fault(verb, arguments):
        if verb in verbs:
            raise RayError("the actor died\nand more")

    return fault


def all_ended(made: RayExecutor) -> list:
    found = []
    while made.busy:
        found += made.ended(0.0)
    return found


def test_races_run_on_as_many_stations_as_there_are(monkeypatch):
    made = executor(member(), member())
    assert made.free == 2 and made.workers == 4
    made.start(race(1))
    made.start(race(2))
    assert (made.free, made.busy) == (0, 2)
    made.join(member())
    assert made.free == 1 and made.stations == 3
    assert {one.seed for one, _ in all_ended(made)} == {1, 2} and made.free == 3


def test_a_race_of_a_lost_station_is_run_by_another():
    cluster = FakeCluster()
    bad, good = member(lose("race")), member()
    made = executor(good, bad, cluster=cluster)  # the last one is taken first
    made.start(race())
    ((one, rounds),) = all_ended(made)
    assert one == race() and len(rounds.samples[LAYOUT, OTHER]) == 3
    assert cluster.ended == [(bad, "lost")] and made.lost == 1 and made.stations == 1


def test_work_that_loses_one_station_after_the_other_ends_the_run_and_is_named():
    made = executor(*[member(lose("race")) for _ in range(5)])
    made.start(race())
    with pytest.raises(TuneError, match=f"3 stations of fake CPU were lost timing .*{OTHER.name}: the actor died"):
        all_ended(made)
    assert made.stations == 2


@pytest.mark.parametrize("at", ["race", "check"])
def test_a_station_that_is_not_sound_is_not_begun_anew_and_does_not_count_against_its_work(at):
    def unsound(verb, arguments):
        if verb == at:
            raise Unsound("the default variant failed here and passed elsewhere: bits flip")

    cluster = FakeCluster()
    made = executor(member(), *[member(unsound) for _ in range(4)], cluster=cluster)
    if at == "race":
        made.start(race())
        assert len(all_ended(made)) == 1
    else:
        (verdict,) = made.check(LAYOUT, [DEFAULT]).values()
        assert verdict.status is Status.OK
    assert [why.split(":")[-1] for _, why in cluster.ended] == [" bits flip"] * 4


def test_a_variant_that_loses_stations_in_its_check_fails_and_the_others_do_not():
    def fault(verb, arguments):
        if verb == "check" and OTHER in arguments[1]:
            raise RayError("the actor died")

    made = executor(*[member(fault) for _ in range(4)])
    found = made.check(LAYOUT, [DEFAULT, OTHER, THIRD])
    assert list(found) == [DEFAULT, OTHER, THIRD]
    assert [verdict.status for verdict in found.values()] == [Status.OK, Status.RUNTIME_ERROR, Status.OK]
    assert found[OTHER].detail == "3 stations were lost with it: the actor died"


def test_a_kind_whose_stations_are_all_lost_waits_and_then_ends(monkeypatch):
    made = executor(member(lose("race")))
    made.start(race())
    assert made.ended(0.0) == [] and made.busy == 1
    made.join(member())
    assert len(all_ended(made)) == 1
    monkeypatch.setattr(fleet_executor, "WITHOUT_S", -1.0)
    made = executor(member(lose("race")))
    made.start(race())
    made.ended(0.0)
    with pytest.raises(TuneError, match="all stations of fake CPU were lost"):
        made.ended(0.0)


def test_a_stop_ends_the_waiting_for_a_check():
    made = executor(member())
    made._stop.requested = True
    with pytest.raises(KeyboardInterrupt):
        made.check(LAYOUT, [DEFAULT])


class FakeBuilder:
    def build(self, layout, variant):
        if variant == OTHER:
            return Built(verdict=Verdict(status=Status.COMPILE_ERROR, detail="no"))
        return Built(library=Library("a" * 32 + ".so", b"code"))


def test_what_does_not_compile_reaches_no_station_and_a_library_travels_once(monkeypatch):
    monkeypatch.setattr("pagegen_autotune.fleet.station.libraries.adopt", lambda given: None)
    builder, one = Actor(FakeBuilder()), member()
    made = executor(one, cluster=FakeCluster([builder]))
    found = made.check(LAYOUT, [DEFAULT, OTHER])
    assert found[OTHER].status is Status.COMPILE_ERROR and found[DEFAULT].status is Status.OK
    made.start(race())
    checks, races = one.actor.calls
    assert checks[1][1] == [DEFAULT] and [lib.content for lib in checks[1][2]] == [b"code"]
    assert races[0] == "race" and races[1][1:] == (9.0, [])


def test_a_lost_compiler_leaves_its_work_to_the_station():
    made = executor(member(), cluster=FakeCluster([Actor(FakeBuilder(), lose("build"))]))
    assert made.check(LAYOUT, [DEFAULT])[DEFAULT].status is Status.OK
    assert made._builders == []


def test_closing_ends_the_stations_also_those_that_had_not_begun():
    cluster = FakeCluster()
    made = executor(member(), cluster=cluster)
    late = member()
    made.join(late)
    made.close()
    assert [why for _, why in cluster.ended] == ["retired"] * 2
