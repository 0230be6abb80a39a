"""Every trial of the run as cache_db/records holds them: by pagegen's own export, what an earlier run left included."""

from __future__ import annotations

import functools
from pathlib import Path

from gpu_check_bench.context import Context
from gpu_check_bench.worker import Cases, Row

EXPORTED = "records.jsonl"


def add_cases(context: Context, cases: Cases) -> None:
    cases.add("export", functools.partial(export, context))


def export(context: Context) -> Row:
    """Writes the run's database; the trials by status."""
    from pagegen.db import open_db

    with open_db(context.database, shipped=False) as store:
        if context.records and Path(context.records).exists():
            store.import_(context.records)
        problems = store.verify()
        lines = store.export(context.folder / EXPORTED)
        trials = [trial.status.value for trial in store.own.trials()]
    row: Row = {"lines": lines, "trials": {status: trials.count(status) for status in sorted(set(trials))}}
    row["bytes"] = (context.folder / EXPORTED).stat().st_size
    if problems:
        row["error"] = f"the database is not sound: {problems[0]}"
    return row
