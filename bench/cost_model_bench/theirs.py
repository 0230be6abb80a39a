"""The model against what others measured: its floor, its predictions, and coefficients fitted to one GPU."""

from __future__ import annotations

import importlib.metadata
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pagegen_autotune import fitting

from cost_model_bench.data import LAYOUT, Shape
from pagegen import costs
from pagegen.spec import TritonVariant

Row = dict[str, Any]
# Times above which launches and latencies matter little: what the rates alone decide.
LONG_US = 200.0
# Fits are judged on shapes without a window, too: several of the engines read more than a window asks for.
KINDS: dict[str, Callable[[Shape], bool]] = {
    "all shapes": lambda shape: True,
    "shapes without a window": lambda shape: not shape.fastest.window,
}


def scikit_learn() -> str:
    """Its version."""
    return importlib.metadata.version("scikit-learn")


def by_system(shapes: Sequence[Shape]) -> dict[str, list[Shape]]:
    """The shapes of each GPU."""
    found: dict[str, list[Shape]] = defaultdict(list)
    for shape in shapes:
        found[shape.fastest.system].append(shape)
    return dict(sorted(found.items()))


def floors(shapes: Sequence[Shape]) -> Iterator[Row]:
    """The fastest measured time over the floor: below 1 the floor would be none."""
    for system, own in by_system(shapes).items():
        ratios = sorted(shape.ratio for shape in own)
        long = [shape.ratio for shape in own if shape.fastest.us >= LONG_US]
        lowest = min(own, key=lambda shape: shape.ratio).fastest
        yield {
            "what": "the fastest measured time over the model's floor (roofline)", "system": system,
            "device": lowest.device.name, "shapes": len(own), "below_the_floor": sum(ratio < 1 for ratio in ratios),
            "lowest": round(ratios[0], 3), "median": round(statistics.median(ratios), 3),
            "median_from_200_us_on": round(statistics.median(long), 3),
            "lowest_is": f"{lowest.backend}, batch {lowest.batch}, context {lowest.context}, heads "
            f"{lowest.num_q_heads}/{lowest.num_kv_heads} of {lowest.head_dim}, {lowest.kv_dtype}, {lowest.us:g} us",
        }  # fmt: skip


def cases(shapes: Sequence[Shape]) -> dict[str, list[tuple[Shape, fitting.Case]]]:
    """The model's prediction for the best of this project's candidates on every shape, with the fastest time of others,
    by GPU. Fits are to parts alone: others' kernels are none of our variants."""
    found: dict[str, list[tuple[Shape, fitting.Case]]] = {}
    for system, own in by_system(shapes).items():
        found[system] = [(shape, _case(shape)) for shape in own]
    return found


def _case(shape: Shape) -> fitting.Case:
    row = shape.fastest
    spec, device, workload = row.spec, row.device, row.workload
    offered = costs.candidates(spec, LAYOUT, device.target, decode=True)
    parts = [
        costs.parts(spec, LAYOUT, variant, device, workload)
        for variant in offered
        if not costs.legal(spec, LAYOUT, variant, device)
    ]
    best = min(parts, key=lambda made_of: made_of.total_us)
    return fitting.Case(parts=best, variant=TritonVariant(), measured_us=row.us, group=row.geometry)


def errors(found: dict[str, list[tuple[Shape, fitting.Case]]]) -> Iterator[Row]:
    """The error of the plain model, and of one fitted to the same GPU's other geometries."""
    for system, pairs in found.items():
        for kind, wanted in KINDS.items():
            own = [case for shape, case in pairs if wanted(shape)]
            ratios = [math.exp(case.logarithm) for case in own]
            row: Row = {
                "what": "the fastest measured time over the predicted time of the best candidate", "system": system,
                "over": kind, "shapes": len(own), "median": round(statistics.median(ratios), 3),
                "median_error_unfitted": round(fitting.median_error([case.logarithm for case in own]), 3),
            }  # fmt: skip
            if len({case.group for case in own}) > 1:
                left = fitting.median_error(fitting.residuals(own))
                row["median_error_fitted_to_other_geometries"] = round(left, 3)
                row["geometries"] = len({case.group for case in own})
            yield row


def left_out(found: dict[str, list[tuple[Shape, fitting.Case]]]) -> Iterator[Row]:
    """Leave one GPU out: the error on it of coefficients that were fitted to the others."""
    for system, pairs in found.items():
        for kind, wanted in KINDS.items():
            own = [case for shape, case in pairs if wanted(shape)]
            others = [case for name, rest in found.items() if name != system for shape, case in rest if wanted(shape)]
            corrected = fitting.correction(others)
            unfitted = fitting.median_error([case.logarithm for case in own])
            fitted = fitting.median_error([case.logarithm - corrected(case) for case in own])
            yield {
                "what": "leave one GPU out", "system": system, "over": kind, "shapes": len(own),
                "fitted_to_shapes_of_others": len(others), "median_error_unfitted": round(unfitted, 3),
                "median_error_fitted": round(fitted, 3), "fitted_is_better": fitted < unfitted,
            }  # fmt: skip
