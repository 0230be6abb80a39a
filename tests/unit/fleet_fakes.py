"""Devices that are not there, for the fleet's tests: times are arithmetic, the same in every process."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from pathlib import Path

from pagegen_autotune.fleet.station import Kit
from pagegen_autotune.measure import Verdict
from tuning_fakes import PROFILE, SPEC

from pagegen.spec import CppVariant, Device, Status, Target
from pagegen.spec.result import AFTER, PURPOSE

ROOT = Path(__file__).parents[2]
SIZES = (16, 32)


def fake_device(name: str) -> Device:
    return Device(name=name, target=Target("cpu"), units=2, bandwidth_gb_s=30.0)


class FleetBench:
    """A variant's time is decided by its fields, the layout, the batch and the device, without noise. FLEET_SAMPLE_S is
    what a sample takes in truth; FLEET_PIDS a folder for the numbers of the processes that measure."""

    regime = "cold"
    workers = 2

    def __init__(self, spec, target, device, profile, *, seed):
        self.environment = {"threads": "2", "compiler": "c++ 1.0"}
        self.samples = 0
        self._name = device.name
        self._seconds = float(os.environ.get("FLEET_SAMPLE_S", "0"))
        self._checked: set = set()
        folder = os.environ.get("FLEET_PIDS")
        if folder:
            (Path(folder) / str(os.getpid())).touch()

    def check(self, layout, variants):
        assert len(variants) <= self.workers
        self._checked.update((layout, v) for v in variants)
        bad = {v: Verdict(status=Status.WRONG_RESULT, detail="off by one") for v in variants if v.streams == 1}
        return {v: bad.get(v, Verdict(status=Status.OK, max_error=0.001)) for v in variants}

    def sample(self, layout, variant, workload):
        assert (layout, variant) in self._checked, "timed before it was checked here"
        self.samples += 1
        if self._seconds:
            time.sleep(self._seconds)
        told = f"{self._name} {layout} {variant.name} {workload.is_decode}"
        share = int.from_bytes(hashlib.sha256(told.encode()).digest()[:4], "big") / 2**32
        best = 8 if workload.is_decode else 4
        return (1000.0 + workload.total_context) * (0.9 + 0.3 * share) * (0.8 if variant.streams == best else 1.0)

    def gauge(self):
        return None

    def facts(self, layout, variant, *, decode):
        return None


def look(gpu: bool) -> Device:
    return fake_device(os.environ.get("FLEET_DEVICE", "fake CPU"))


def share_nothing(spec, layout, variants):
    return {}


KIT = Kit(look=look, make=FleetBench, share=share_nothing)


def answer(report) -> list:
    """What was chosen, by block size and class of batches."""
    return [
        (row.layout.block_size, d.batches, d.chosen.name, sorted((w.num_seqs, v) for w, v in _served(d).items()))
        for row in report.rows
        for d in row.decisions
    ]


def _served(decision) -> dict:
    from pagegen_autotune.tree import leaves

    return {w: leaf.variant.name for leaf in leaves(decision.tree) for w in leaf.part}


def ended(db, device: Device | None = None) -> Counter:
    """How often each trial ended. The repeats at the end of a search are about that run and are left out: one that is
    started again does not repeat what it has not searched."""
    return Counter(
        (t.device.name, t.layout, t.variant.name, t.workload, t.status, t.environment.get(PURPOSE, ""))
        for t in db.trials(spec=SPEC, device=device)
        if t.environment.get(PURPOSE) != AFTER
    )


__all__ = ["KIT", "PROFILE", "SIZES", "SPEC", "CppVariant", "FleetBench", "answer", "ended", "fake_device"]
