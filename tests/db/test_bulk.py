"""Bulk import writes what recording one by one writes, and refuses the same."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from database_fakes import CPU, DECODE, MIXED, TUNED, cpu_trial, trial

from pagegen.db import bulk, open_db
from pagegen.spec import CacheLayout, Status

TRIALS = [
    trial(),
    trial(samples_us=(98.0, 99.0)),
    trial(status=Status.TIMEOUT, samples_us=(), detail="no answer\0 in 30 s"),
    trial(status=Status.WRONG_RESULT, samples_us=(), max_error=math.inf),
    trial(max_error=None, environment={"tuning_session": "s", "tuning_purpose": "search"}, created_at=""),
    trial(layout=CacheLayout(block_size=64), variant=replace(TUNED, num_warps=8), workload=MIXED, regime="warm"),
    cpu_trial(device=replace(CPU, bandwidth_gb_s=39.0)),
]


def rows(db) -> list[dict]:
    """Every trial as stored, references by digest."""
    from sqlalchemy import select

    from pagegen.db.schema import metadata, trials

    with db.store.reading() as connection:
        digests = {
            kind: {r.id: r.digest for r in connection.execute(select(table.c.id, table.c.digest))}
            for kind in bulk.PARENTS
            for table in [metadata.tables[f"{kind}s"]]
        }
        found = [dict(row._mapping) for row in connection.execute(select(trials).order_by(trials.c.digest))]
    for row in found:
        del row["id"]
        row |= {f"{kind}_id": digests[kind][row[f"{kind}_id"]] for kind in bulk.PARENTS}
    return found


def test_an_import_stores_the_same_rows_as_recording_one_by_one(place, tmp_path):
    with open_db(place("one")) as one, open_db(place("other")) as other:
        for measurement in TRIALS:
            one.record(measurement)
        one.export(tmp_path / "all.jsonl")
        report = other.import_(tmp_path / "all.jsonl")
        assert (report.added, report.present, report.malformed) == (len(TRIALS), 0, ())
        assert rows(other) == rows(one)
        assert other.trials() == one.trials()
        assert other.verify() == []
        again = other.import_(tmp_path / "all.jsonl")
        assert (again.added, again.present, again.conflicts) == (0, len(TRIALS), ())


def test_batches_that_end_anywhere_lose_and_repeat_nothing(tmp_path, monkeypatch):
    with open_db(tmp_path / "one.db") as one:
        with one.atomic():
            for number in range(23):
                one.record(trial(samples_us=(90.0 + number,)))
        one.export(tmp_path / "all.jsonl")
        for size in (1, 5, 23, 24):
            monkeypatch.setattr(bulk, "BATCH", size)
            with open_db(tmp_path / f"{size}.db") as other:
                assert other.import_(tmp_path / "all.jsonl").added == 23
                assert len(other.trials()) == 23


ABSURD = {
    "nan": float("nan"),
    "infinite": math.inf,
    "negative": -3.0,
    "zero": 0,
    "in milliseconds": 0.1,
    "in nanoseconds": 1e5 * 1e3,
}


@pytest.mark.parametrize("what", ABSURD)
def test_absurd_times_are_refused_with_the_line_and_the_reason_and_the_rest_comes_in(tmp_path, what):
    with open_db(tmp_path / "one.db") as one, open_db(tmp_path / "other.db") as other:
        one.record(trial())
        one.export(tmp_path / "all.jsonl")
        lines = (tmp_path / "all.jsonl").read_text().splitlines()
        bad = json.dumps({**json.loads(lines[-1]), "samples_us": [ABSURD[what]]})
        (tmp_path / "all.jsonl").write_text("\n".join([*lines, bad]) + "\n")
        report = other.import_(tmp_path / "all.jsonl")
        (problem,) = report.malformed
        assert problem.startswith(f"line {len(lines) + 1}: ")
        assert "are these microseconds?" in problem or "must be positive and finite" in problem
        assert (report.added, other.trials()) == (1, [trial()])
        if what.startswith("in "):
            with pytest.raises(ValueError, match="are these microseconds"):
                other.record(trial(samples_us=(ABSURD[what],)))


def test_a_thousand_trials_take_far_less_than_recording_them(tmp_path):
    import time

    with open_db(tmp_path / "one.db") as one, open_db(tmp_path / "other.db") as other:
        many = [trial(samples_us=(90.0 + n / 100,), workload=(DECODE, MIXED)[n % 2]) for n in range(1000)]
        start = time.process_time()
        with one.atomic():
            for measurement in many:
                one.record(measurement)
        recording = time.process_time() - start
        one.export(tmp_path / "all.jsonl")
        start = time.process_time()
        assert other.import_(tmp_path / "all.jsonl").added == 1000
        assert time.process_time() - start < recording / 2
