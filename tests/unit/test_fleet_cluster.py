"""The stations of a cluster as they begin, end and are begun again, with a stand-in for Ray."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace

import pytest
from fleet_fakes import KIT, PROFILE, SPEC
from pagegen_autotune.fleet.cluster import MAX_STARTS, Cluster, connect
from pagegen_autotune.fleet.station import Station
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.measured import TuneError


def test_ray_takes_no_signal_from_whom_it_is_connected_for(monkeypatch):
    """Its own handler of SIGTERM ends a driver before leases are given back."""
    taken = []

    def init(**options):
        taken.append(signal.signal(signal.SIGTERM, lambda number, frame: None))
        raise ConnectionError("refused")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    before = signal.getsignal(signal.SIGTERM)
    with (
        StopSignal() as stop,
        pytest.raises(TuneError, match=r"\(refused\): where .* a token it needs that of the head"),
    ):
        stop_handler = signal.getsignal(signal.SIGTERM)
        try:
            connect("auto")
        finally:
            assert taken == [stop_handler] == [signal.getsignal(signal.SIGTERM)] and not stop.requested
    assert signal.getsignal(signal.SIGTERM) == before


class RayError(Exception):
    pass


class FakeRay:
    """One node of two CPUs, on which the first `losses` stations end before they are ready."""

    def __init__(self, losses: int) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.losses = losses

    def nodes(self):
        return [{"NodeID": "a", "NodeManagerAddress": "a", "Alive": True, "Resources": {"CPU": 2.0}}]

    def remote(self, kind):
        def begin(*arguments, **options):
            station = Station(*arguments, **options)
            return SimpleNamespace(describe=SimpleNamespace(remote=lambda: (station, object())))

        return SimpleNamespace(options=lambda **asked: SimpleNamespace(remote=begin))

    def wait(self, references, *, num_returns, timeout):
        return references, []

    def get(self, reference):
        if self.losses:
            self.losses -= 1
            raise RayError("the actor died")
        return reference[0].describe()

    def kill(self, actor):
        pass


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(Cluster, "_on", lambda self, node: None)

    def make(losses: int) -> Cluster:
        made = Cluster("auto", SPEC, PROFILE, devices=(), seed=0, kit=KIT)
        made.ray = FakeRay(losses)
        return made

    return make


def test_a_station_that_ends_before_it_is_ready_is_begun_anew_at_once(cluster):
    nodes = cluster(1)
    assert nodes.look() == [] and nodes.starting == 1  # a run ends where nothing is starting
    (member,) = nodes.look()
    assert member.device.name == "fake CPU" and nodes.starting == 0 and nodes.left_out == []


def test_a_node_where_no_station_starts_is_given_up_and_named(cluster):
    nodes = cluster(MAX_STARTS)
    assert [nodes.look() for _ in range(MAX_STARTS)] == [[]] * MAX_STARTS
    assert nodes.starting == 0 and nodes.left_out == ["a: no station starts there (the actor died)"]
