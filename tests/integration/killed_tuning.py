"""A tuning run to be killed: a fake bench, slow enough to be caught in the middle, and a real database file.

python killed_tuning.py DATABASE SECONDS_A_SAMPLE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from pagegen_autotune import tune
from tuning_fakes import DEFAULT, DEVICE, PROFILE, SPEC, FakeBench, table

from pagegen import costs, targets


class Slow(FakeBench):
    """Every sample takes real time."""

    def __init__(self, seconds: float, **options):
        super().__init__(table(s8=0.8), noise=0.02, **options)
        self._seconds = seconds

    def sample(self, layout, variant, workload):
        time.sleep(self._seconds)
        return super().sample(layout, variant, workload)


def run(path: str, bench: FakeBench):
    """Tunes two block sizes on a machine of facts alone."""
    targets.current_device = lambda target: DEVICE
    targets.code_hash = lambda target: "hash-1"
    targets.unsupported = lambda spec, target: None
    targets.default_variant = lambda spec, layout, target, *, decode: DEFAULT
    costs.predict_us = lambda *args, **options: 1000.0
    return tune(SPEC, PROFILE, db=path, bench=bench, block_sizes=(16, 32), target="cpu", progress=False)


if __name__ == "__main__":
    report = run(sys.argv[1], bench := Slow(float(sys.argv[2])))
    print(len(bench.sampled), report.resumed, [d.chosen.streams for row in report.rows for d in row.decisions])
