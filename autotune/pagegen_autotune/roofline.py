"""How near what was found is to what memory and arithmetic allow."""

from __future__ import annotations

import statistics
from dataclasses import replace

from pagegen import costs
from pagegen.spec import AttentionSpec, Device
from pagegen_autotune.cells import Cell
from pagegen_autotune.evidence import Evidence


def share(spec: AttentionSpec, device: Device, cell: Cell, evidence: Evidence) -> float | None:
    """The roofline's time over that of the best so far, over the cell's loads; None where the device's rates are not
    known. On a CPU memory gives what the gauge said, not what it gave at the start."""
    readings = evidence.gauge_gb_s
    if readings:
        device = replace(device, bandwidth_gb_s=statistics.median(readings))
    if not device.bandwidth_gb_s > 0:
        return None
    known = evidence.ratios(cell.loads)
    least = ideal = 0.0
    for workload, weight in cell.loads:
        ratio = min([1.0, *(ratios[workload] for ratios in known.values() if workload in ratios)])
        least += weight * ratio * evidence.cost_us(workload)
        ideal += weight * costs.roofline_us(spec, cell.layout, device, workload)
    return ideal / least if least else None
