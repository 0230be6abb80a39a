"""Recording: every variant of a case's grid on every batch, measured for real on this machine.

    python -m tuning_bench.record [CASE ...]     in bench/, alone on the machine

Variants are timed in rounds, in an order shuffled anew each round, every one beside a call of the default variant:
the machine's read bandwidth changes within seconds, and only neighbours in time compare. What is kept of a variant's
sample is its ratio to the default's call beside it; of the default, the median of its calls in the round. Variants are
checked against the float64 reference first, as the tuner does.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from pagegen_autotune.measure import KernelBench

from pagegen import targets
from pagegen.spec import Status, Variant, Workload
from tuning_bench.cases import CASES, CPU, Case

FOLDER = Path(__file__).parent / "recorded"
ROUNDS = 20


def record(case: Case, rounds: int = ROUNDS, alone: AbstractContextManager[object] | None = None) -> dict[str, object]:
    """The recording of a case as a plain document. A variant that fails its check is left out and named. `alone` is
    entered while times are taken."""
    device = targets.current_device(CPU)
    bench = KernelBench(case.spec, CPU, device, case.profile, seed=0)
    grid = case.grid
    verdicts = bench.check(case.layout, grid)
    sound = [v for v in grid if verdicts[v].status is Status.OK]
    if sound[0] != case.default:
        raise RuntimeError(f"the default variant of {case.name} failed: {verdicts[case.default].detail}")
    with alone or contextlib.nullcontext():
        start = time.monotonic()
        loads = enumerate(case.profile.workloads)
        cells = [_cell(bench, case, workload, sound, rounds, seed) for seed, workload in loads]
        seconds = time.monotonic() - start
    return {
        "case": case.name,
        "spec": case.spec.to_dict(),
        "layout": case.layout.to_dict(),
        "profile": case.profile.to_dict(),
        "device": device.to_dict(),
        "environment": bench.environment,
        "regime": bench.regime,
        "code_hash": targets.code_hash(CPU),
        "recorded_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "failed": {v.name: verdicts[v].detail for v in grid if v not in sound},
        "variants": [v.to_dict() for v in sound],
        "cells": cells,
    }


def _cell(
    bench: KernelBench, case: Case, workload: Workload, variants: Sequence[Variant], rounds: int, seed: int
) -> dict[str, object]:
    """One batch: the default's median microseconds in each round, and by variant its ratios in 1/10,000."""
    rng = random.Random(seed)

    def sample(variant: Variant) -> float:
        return bench.sample(case.layout, variant, workload)

    for variant in variants:
        sample(variant)  # the first call of a kernel allocates
    defaults, ratios = [], [[] for _ in variants]  # type: ignore[var-annotated]
    for _ in range(rounds):
        order = list(range(1, len(variants)))
        rng.shuffle(order)
        beside = []
        for pair in zip(order[::2], [*order[1::2], None], strict=False):  # variant, default, variant
            first = sample(variants[pair[0]])
            base = sample(variants[0])
            beside.append(base)
            ratios[pair[0]].append(round(1e4 * first / base))
            if pair[1] is not None:
                ratios[pair[1]].append(round(1e4 * sample(variants[pair[1]]) / base))
        defaults.append(round(statistics.median(beside), 2))
        ratios[0].append(10_000)
    return {"default_us": defaults, "ratios": ratios}


def write(document: dict[str, object], path: Path) -> None:
    """JSON with one line for each variant of each batch."""
    text = json.dumps({k: v for k, v in document.items() if k != "cells"}, indent=1)
    cells = [
        '{"default_us": ' + json.dumps(cell["default_us"]) + ', "ratios": [\n'
        + ",\n".join(json.dumps(row, separators=(",", ":")) for row in cell["ratios"]) + "\n]}"
        for cell in document["cells"]  # type: ignore[attr-defined]
    ]  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text(text[:-2] + ',\n "cells": [\n' + ",\n".join(cells) + "\n]}\n", encoding="utf-8")


def main() -> None:
    wanted = sys.argv[1:] or [case.name for case in CASES]
    for case in CASES:
        if case.name in wanted:
            document = record(case)
            write(document, FOLDER / f"{case.name}.json")
            print(f"{case.name}: {len(document['variants'])} variants, {document['seconds']} s", flush=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
