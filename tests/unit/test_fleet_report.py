"""What a run on a cluster says when it ends, with stand-ins for the cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fleet_fakes import fake_device
from pagegen_autotune.fleet import tuner
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.measured import TuneError
from pagegen_autotune.report import Report


class RayError(Exception):
    pass


def cluster(*, look=lambda: [], starting: int = 0, left_out=(), other=()):
    ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError))
    return SimpleNamespace(ray=ray, look=look, starting=starting, left_out=list(left_out), other=set(other))


def kind(name: str, *, report: Report | None = None, error: Exception | None = None, lost: int = 0):
    return SimpleNamespace(
        executor=SimpleNamespace(device=fake_device(name), lost=lost), report=report, error=error,
    )  # fmt: skip


def report(name: str, *, interrupted: bool = False) -> Report:
    return Report(kind="measured", profile="p", device=fake_device(name), rows=(), interrupted=interrupted)


def made(nodes, *kinds, stop: StopSignal | None = None) -> tuner.FleetReport:
    return tuner._report(nodes, kinds, stop or StopSignal(), 1.0)


def test_a_device_that_failed_is_named_and_the_others_are_reported():
    found = made(cluster(left_out=["b: no compiler"]), kind("one", report=report("one"), lost=2),
                 kind("two", error=TuneError("no default variant ran")))  # fmt: skip
    assert found.left_out == ("b: no compiler", "two: no default variant ran") and found.lost == 2
    assert "left out: two: no default variant ran" in str(found) and "2 stations were lost" in str(found)
    assert found.to_dict()["devices"][0]["device"]["name"] == "one" and not found.interrupted


def test_where_nothing_could_be_tuned_the_reasons_are_one_line():
    nodes = cluster(left_out=["a: its templates are not the tuner's"], other=["fake CPU (cpu)"])
    with pytest.raises(
        TuneError, match=r"nothing could be tuned .*it has fake CPU \(cpu\): a: its templates"
    ) as raised:
        made(nodes, kind("one", error=ValueError("first\nsecond")))
    assert "\n" not in str(raised.value) and "ValueError: first" in str(raised.value)


def test_a_run_that_was_stopped_is_a_report_and_no_error():
    stop = StopSignal()
    stop.requested = True
    assert made(cluster(starting=1), stop=stop).interrupted
    assert made(cluster(), kind("one", report=report("one", interrupted=True))).interrupted


def test_nodes_that_stayed_busy_are_told():
    found = made(cluster(starting=2), kind("one", report=report("one")))
    assert found.left_out == ("2 nodes had no free device within 120 s",)


def test_a_cluster_whose_head_dies_ends_the_run_with_what_to_do():
    def dead():
        raise RayError("GCS\nis gone")

    stop = StopSignal()
    with pytest.raises(TuneError, match=r"does not answer \(RayError: GCS\): what was measured is stored"):
        tuner._run(cluster(look=dead), stop, None)
    assert stop.requested


def test_a_run_with_no_node_to_wait_for_ends_at_once():
    assert tuner._run(cluster(), StopSignal(), None) == []
