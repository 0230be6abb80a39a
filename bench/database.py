"""How quickly does a tuning database of a million trials answer, and how large is it?

    python bench/database.py [--quick] [--trials 1000000] [--output bench/results/database.json]

The trials are made up, the same on every machine: specs of known models at four block sizes on five GPUs, the legal
variants of the tuner's search space, a profile's batches, in sessions as the tuner takes them, with times that scatter
about a multiple of the roofline. They are written as an export's lines and imported, which is timed as well. First
answers are timed in fresh processes: from an open of the file to the answer, after the imports of pagegen, whose time
is told apart; the file lies in the operating system's page cache. Nothing is measured on any device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy
from cache_bench.document import as_text
from cpu_bench import machine
from database_bench import bulk, dispatch, made
from database_bench.first import fresh

from pagegen import __version__
from pagegen.db import open_db
from pagegen.spec import CacheLayout, Workload
from pagegen.targets import cpu_device

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def measure(trials: int, runs: int, folder: Path) -> Iterator[Row]:
    """Every question about a database of so many trials, made in `folder`; `runs` fresh processes a first answer."""
    lines, file = folder / "made.jsonl", folder / "trials.db"
    maker = made.Maker(trials)
    maker.write(lines)
    yield from bulk.imported(lines, file)

    spec, layout, device, workload = made.specs()[0], CacheLayout(block_size=16), made.devices()[2], maker.measured
    question = {
        "url": str(file), "spec": spec.to_dict(), "layout": layout.to_dict(), "target": str(device.target),
        "profile": maker.profile.to_dict(), "workload": workload.to_dict(), "verb": "select",
    }  # fmt: skip
    near = Workload(context_lens=tuple(n + 5 for n in workload.context_lens))
    for what, limit, changed in (
        ("first select of a process, a batch that was measured", "at most 20 ms", {}),
        ("first select of a process, a batch near a measured one (loads the cost model)", "",
         {"workload": near.to_dict()}),
        ("best_block_size, first of a process", "at most 100 ms", {"verb": "block size"}),
    ):  # fmt: skip
        yield {"what": what, "asked_for": limit, **fresh({**question, **changed}, runs)}
    with open_db(file, read_only=True) as db:
        yield {
            "what": "select from the prepared rule", "asked_for": "at most 2 us",
            **dispatch.chosen(db, spec, layout, device),
        }  # fmt: skip
        yield bulk.exported(db, folder / "out.jsonl")
        start = time.perf_counter()
        found = len(db.trials(spec=spec, layout=layout, device=device))
        yield {
            "what": "trials of one kernel on one device, decoded", "asked_for": "", "trials": found,
            "ms": round(1e3 * (time.perf_counter() - start), 1),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a database of 50,000 trials; writes nothing by default")
    parser.add_argument("--trials", type=int, help="how many (default: 1,000,000)")
    parser.add_argument("--runs", type=int, help="fresh processes a question (default: 9, quick: 3)")
    parser.add_argument("--output", type=Path, help="default: bench/results/database.json, where not --quick")
    options = parser.parse_args()
    trials = options.trials or (50_000 if options.quick else 1_000_000)
    started, load = time.perf_counter(), os.getloadavg()[0]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="pagegen-bench-") as folder:
        for row in measure(trials, options.runs or (3 if options.quick else 9), Path(folder)):
            print(json.dumps(row), flush=True)
            rows.append(row)
    document = {
        "question": (__doc__ or "").partition("\n")[0],
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "environment": {
            "date": machine.date(), "cpu": cpu_device.current_device().name, "cores": os.cpu_count(),
            "load_average": round(load, 2), "pagegen": __version__, "python": platform.python_version(),
            "sqlalchemy": sqlalchemy.__version__, "sqlite": sqlite3.sqlite_version,
            "system": f"{platform.system()} {platform.release()}",
        },
        "trials": trials,
        "quick": options.quick,
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }  # fmt: skip
    output = options.output or (None if options.quick or options.trials else RESULTS / "database.json")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(as_text(document), encoding="utf-8")
    print(f"{document['seconds']:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
