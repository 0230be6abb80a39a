"""Does the search find what an exhaustive one would, and at which cost?

    python bench/tuning.py [--seeds 60] [--output bench/results/tuning-efficiency.json]

Replays the tuner's search on recorded exhaustive data: six kernels on a CPU, 192 variants on four batches each, every
one timed in rounds beside the default (`bench/tuning_bench/record.py` made them; `recorded/` holds them). A replay
draws half of the rounds: the search sees them, its choice is judged on the other half. The target: within 3 % of the
exhaustive optimum on the profile's step time with at most a tenth of the exhaustive measurements; every search has a
budget of a tenth of the trials beside the default's first and last ones. Cells are variants on batches that were
measured at all, samples all that were taken, trials the rows that a database would hold: those of the default and of
confirmations included. The exhaustive optimum is what a search chooses that knows all rounds of the half that may be
seen. It is not the best of the other half either: `noise_floor` is what it loses to that, which is what the noise of
the recording costs one that knows all it may know. For comparison: the search around the default along the axes, as
many variants drawn at random as the search may try, and no search at all.

How the search spends its trials was thought out with these recordings in view. To see what that is worth, the share of
the variants that it may try (0.12, 0.2, 0.3), how far behind a variant is left out after one batch (15 %, 25 %) and the
rounds of a look (5, 7) were chosen on five recordings and held against the sixth, 24 replays with other seeds each: all
reach the target on five of the six. Without llama-3.2-1b the other five cannot tell a share of 0.12 from more, and 0.12
reaches it there in 79 % of the replays, 0.2 in 92 % and more.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from cpu_bench import machine
from pagegen_autotune.search import STRATEGIES, Search, Strategy
from pagegen_autotune.session import ROUNDS
from pagegen_autotune.space import Space
from tuning_bench.replay import Outcome, Recording, replay

HERE = Path(__file__).parent
TARGET_REGRET, TARGET_COST = 0.03, 0.10
BUDGET = 0.10  # of the trials, as the tuner counts them: rows of a database, with the confirmations
LIMIT = 38  # variants that a random search draws: as many as the guided search tries at most, budget permitting


def drawn(seed: int) -> Strategy:
    """Variants at random, in one batch."""

    def search(space: Space) -> Search:
        others = [v for v in space.grid() if v != space.start]
        yield random.Random(seed).sample(others, LIMIT)

    return search


def measure(recording: Recording, name: str, seeds: int) -> dict[str, Any]:
    """The figures of one strategy on one recording, over seeds."""
    found = [replay(recording, STRATEGIES.get(name) or drawn(seed), seed, budget=BUDGET) for seed in range(seeds)]
    return {
        "runs": seeds,
        **{
            key: spread([getattr(o, key) for o in found])
            for key in ("regret", "against_search", "cells", "samples", "trials")
        },
        "compiled": spread([o.compiled for o in found]),
        "speedup": spread([o.speedup for o in found]),
        "variants": spread([o.variants for o in found]),
        "within_3_percent": sum(o.against_search <= TARGET_REGRET for o in found) / len(found),
        "within_target": share(found),
        "slower_than_default": sum(o.speedup < 0.98 for o in found),
        "stated_bound_held": share_held(found),
    }


def share(found: list[Outcome]) -> float:
    """Of the runs, those within the target of the exhaustive search's choice at no more than its cost."""
    return sum(o.against_search <= TARGET_REGRET and max(o.cells, o.samples) <= TARGET_COST for o in found) / len(found)


def share_held(found: list[Outcome]) -> float | None:
    """Of the runs that state a bound of their regret, those whose regret lies within it on the judging rounds; None
    where none does. A run states what it loses against the variants that it measured, here it is held against all."""
    told = [o.regret <= o.stated_at_most for o in found if o.stated_at_most is not None]
    return sum(told) / len(told) if told else None


def spread(values: list[float]) -> dict[str, float]:
    """Median, 90th and 95th percentile (the nearest value above) and largest."""
    ordered = sorted(values)
    shares = {f"p{percent}": ordered[-(-percent * len(ordered) // 100) - 1] for percent in (90, 95)}
    found = {"median": statistics.median(ordered), **shares, "largest": ordered[-1]}
    return {name: round(value, 4) for name, value in found.items()}


def case(recording: Recording, seeds: int) -> dict[str, Any]:
    """Everything about one recording."""
    whole = {w: range(len(us)) for w, us in recording.default_us.items()}
    times, all_by = recording.times(whole), recording.all_by
    best = recording.best(times)
    step_us = {name: recording.step_us(times, all_by(v)) for name, v in
               {"default": recording.default, "best": best}.items()}  # fmt: skip
    each = {w: min(recording.variants, key=lambda v: times[v, w]) for w in recording.profile.workloads}
    ties = sum(recording.step_us(times, all_by(v)) <= 1.03 * step_us["best"] for v in recording.variants)
    floor = [floor_of(recording, seed) for seed in range(seeds)]
    return {
        "case": recording.name,
        "spec": recording.spec.to_dict(),
        "layout": recording.layout.to_dict(),
        "batches": [{"num_seqs": w.num_seqs, "total_context": w.total_context, "weight": round(weight, 4)}
                    for w, weight in recording.profile],
        "variants": len(recording.variants),
        "cells": len(recording.variants) * len(recording.profile.workloads),
        "exhaustive_samples": len(recording.variants) * len(recording.profile.workloads) * ROUNDS,
        "step_us": {name: round(us, 2) for name, us in step_us.items()},
        "default_regret": round(step_us["default"] / step_us["best"] - 1, 4),
        "noise_floor": {**spread(floor), "within_3_percent": sum(f <= TARGET_REGRET for f in floor) / seeds},
        "each_batch_its_best": round(recording.step_us(times, each) / step_us["best"] - 1, 4),
        "within_3_percent_of_best": ties,
        "strategies": {name: measure(recording, name, seeds) for name in ("guided", "coordinate", "random")},
    }  # fmt: skip


def floor_of(recording: Recording, seed: int) -> float:
    """What the exhaustive choice on the half that a seed's search may see loses to the best of the other half."""
    seen, judged = map(recording.times, recording.halves(seed))
    chosen, best = (recording.step_us(judged, recording.all_by(recording.best(times))) for times in (seen, judged))
    return chosen / best - 1


def sentence(figures: dict[str, Any]) -> str:
    """The figures of a strategy, for people: medians, 95th percentiles in brackets."""

    def of(name: str) -> str:
        return f"{figures[name]['median']:.1%} ({figures[name]['p95']:.1%})"

    return (
        f"regret {of('regret')}, against exhaustive {of('against_search')}, trials {of('cells')}, samples "
        f"{of('samples')}, within the target {figures['within_target']:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "tuning-efficiency.json")
    options = parser.parse_args()
    start = time.monotonic()
    rows = []
    files = sorted((HERE / "tuning_bench" / "recorded").glob("*.json"))
    for file in files:
        recording = Recording.load(file)
        rows.append(row := case(recording, options.seeds))
        for name, figures in row["strategies"].items():
            print(f"{row['case']:18} {name:10} {sentence(figures)}", flush=True)
        floor = row["noise_floor"]
        print(f"{row['case']:18} {'exhaustive':10} regret {floor['median']:.1%} ({floor['p95']:.1%})", flush=True)
        print(f"{row['case']:18} {'no search':10} regret {row['default_regret']:.1%}", flush=True)
    document = {
        "question": "what a tenth of the exhaustive measurements finds of the exhaustive optimum",
        "target": {"regret": TARGET_REGRET, "cost": TARGET_COST},
        "method": __doc__,
        "environment": {"date": machine.date()},
        "recorded_on": json.loads(files[0].read_text(encoding="utf-8"))["device"],
        "seconds": round(time.monotonic() - start, 1),
        "cases": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
