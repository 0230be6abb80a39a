"""The model against whole grids of this project's CPU kernels (bench/tuning_bench/recorded): the error of coefficients
on batches and on kernels that they did not see, and what choosing by them loses. One factor on all times changes no
choice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagegen_autotune import fitting
from tuning_bench.replay import Recording

from pagegen import costs

RECORDED = Path(__file__).parents[1] / "tuning_bench" / "recorded"


def recorded() -> list[Recording]:
    """Every recording there is."""
    return [Recording.load(path) for path in sorted(RECORDED.glob("*.json"))]


def cases(recording: Recording) -> list[fitting.Case]:
    """A case a variant and batch, the batch its group, by every other round."""
    made = []
    half = {workload: range(1, len(us), 2) for workload, us in recording.default_us.items()}
    for (variant, workload), us in recording.times(half).items():
        parts = costs.parts(recording.spec, recording.layout, variant, recording.device, workload)
        question = (recording.name, workload)
        made.append(fitting.Case(parts=parts, variant=variant, measured_us=us, group=question, question=question))
    return made


def errors(recordings: list[Recording]) -> Iterator[dict[str, Any]]:
    """A row for batches, and one for kernels, that were not fitted to."""
    found = [case for recording in recordings for case in cases(recording)]
    kernels = [replace(case, group=case.group[0]) for case in found]
    unfitted_us = [case.parts.total_us for case in found]
    for unseen, judged in (("batches", found), ("kernels", kernels)):
        left = fitting.residuals(judged)
        fitted_us = [case.measured_us / math.exp(value) for case, value in zip(judged, left, strict=True)]
        yield {
            "what": "fitted to recorded grids of this project's CPU kernels", "device": recordings[0].device.name,
            "judged_on_other": unseen, "kernels": len(recordings), "groups": len({case.group for case in judged}),
            "cases": len(judged),
            "median_error_unfitted": round(fitting.median_error([case.logarithm for case in judged]), 3),
            "median_error_fitted": round(fitting.median_error(left), 3),
            "choice_regret_unfitted": round(fitting.choice_regret(judged, unfitted_us), 3),
            "choice_regret_fitted": round(fitting.choice_regret(judged, fitted_us), 3),
            "median_error_of_one_factor": round(fitting.median_error(fitting.residuals(judged, fitting.LEVEL)), 3),
        }  # fmt: skip
