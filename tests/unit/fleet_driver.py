"""A run on a cluster in a process of its own, to be killed or to work beside another.

python fleet_driver.py ADDRESS DATABASE [LEASE_S]

Exits with 3 where a signal ended the run early.
"""

from __future__ import annotations

import json
import sys

from fleet_fakes import KIT, PROFILE, SPEC, answer
from pagegen_autotune import claims
from pagegen_autotune.fleet import tune_fleet

if __name__ == "__main__":
    if len(sys.argv) > 3:
        claims.LEASE_S = float(sys.argv[3])
    report = tune_fleet(SPEC, PROFILE, address=sys.argv[1], db=sys.argv[2], block_sizes=(16,), kit=KIT, progress=False)
    resumed = sum(one.resumed for one in report.reports)
    answers = {one.device.name: answer(one) for one in report.reports}
    if report.interrupted:
        sys.exit(3)
    print(json.dumps({"answers": answers, "resumed": resumed, "lost": report.lost, "left_out": report.left_out}))
