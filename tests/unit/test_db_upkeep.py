"""verify, stats and prune."""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import replace

import pytest
from database_fakes import CPU, H100, LAYOUT, MIXED, PROFILE, SM_90, SPEC, TUNED, cpu_trial, rule, trial

from pagegen.db import open_db
from pagegen.spec import CacheLayout, CppVariant, Status, Workload


@pytest.fixture
def db(tmp_path):
    with open_db(tmp_path / "kept.db") as database:
        database.record(trial())
        database.record(trial(status=Status.TIMEOUT, samples_us=(), layout=CacheLayout(block_size=32)))
        database.record(cpu_trial())
        database.save_portfolio(spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=rule(), code_hash="c0de")
        yield database


def damage(db, statement: str) -> None:
    connection = sqlite3.connect(db.name)
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_sound_database_has_no_problems(db):
    assert db.verify() == []


DAMAGE = {
    "UPDATE trials SET samples_us = '[1.0' WHERE id = 1": "trial 1 cannot be read",
    "UPDATE trials SET samples_us = '[-1.0]' WHERE id = 1": "ValueError: samples_us must be positive",
    "UPDATE trials SET status = 'fine' WHERE id = 1": "trial 1 cannot be read",
    "UPDATE trials SET median_us = 3.0 WHERE id = 1": "trial 1: its key or median differs",
    "UPDATE trials SET key = 'x' WHERE id = 1": "trial 1: its key or median differs",
    "UPDATE trials SET variant_id = 99 WHERE id = 1": "trials row 1 refers to a row of variants that is not there",
    "UPDATE kernels SET head_dim = 64 WHERE id = 1": "kernel 1: head_dim differ from its data",
    "UPDATE kernels SET data = replace(data, ':128', ':96') WHERE id = 1": "kernel 1: digest, head_dim, spec_digest",
    "UPDATE devices SET data = '{}' WHERE id = 1": "device 1 cannot be read",
    "UPDATE variants SET data = replace(data, 'tile_kv', 'tile_k') WHERE id = 1": "variant 1 cannot be read",
    "UPDATE workloads SET data = replace(data, '1000', '-5') WHERE id = 1": "workload 1 cannot be read",
    "UPDATE portfolios SET rule = '{\"clauses\": []}' WHERE id = 1": "portfolio 1 cannot be read",
}


@pytest.mark.parametrize("statement", DAMAGE, ids=range(len(DAMAGE)))
def test_damage_behind_our_back_is_found_and_named(db, statement):
    damage(db, statement)
    problems = db.verify()
    assert any(DAMAGE[statement] in problem for problem in problems), problems


def test_rows_that_cannot_be_read_are_left_out_of_answers_and_logged(db, caplog):
    damage(db, "UPDATE trials SET samples_us = 'oops' WHERE id = 1")
    with caplog.at_level(logging.WARNING):
        assert len(db.trials()) == 2
    assert "1 rows of" in caplog.text
    assert "trial 1" in caplog.text
    assert "pagegen db verify" in caplog.text


def test_damaged_pages_are_a_finding_and_not_an_exception(db, tmp_path):
    with db.atomic():
        for i in range(300):
            db.record(trial(samples_us=(1000.0 + i,), detail="x" * 300))
    db.close()
    with sqlite3.connect(db.name) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = bytearray(open(db.name, "rb").read())  # noqa: SIM115, PTH123
    whole[len(whole) // 2 : len(whole) // 2 + 9000] = b"\xff" * 9000
    (tmp_path / "holed.db").write_bytes(whole)
    with open_db(tmp_path / "holed.db", read_only=True) as holed:
        assert any("damaged" in problem or "malformed" in problem for problem in holed.verify())


LONG = Workload(context_lens=(32768,) * 64)  # 8.6 GB of keys and values: 2.6 ms of an H100


@pytest.mark.parametrize(
    ("measurement", "words"),
    [
        (trial(workload=LONG, samples_us=(2.6,)), "under a tenth of the"),  # milliseconds taken for microseconds
        (trial(samples_us=(5e9,)), "over an hour"),
        (cpu_trial(workload=LONG, samples_us=(1000.0,)), "under a tenth of the"),
    ],
)
def test_times_that_cannot_be_are_named(db, measurement, words):
    db.record(measurement)
    (problem,) = db.verify()
    assert words in problem
    assert "are these microseconds?" in problem


@pytest.mark.parametrize(
    "measurement",
    [
        trial(workload=LONG, samples_us=(2600.0,)),
        trial(workload=LONG, samples_us=(2.6,), regime="warm"),
        cpu_trial(workload=LONG, samples_us=(1000.0,), device=replace(CPU, bandwidth_gb_s=0.0)),
    ],
)
def test_times_that_can_be_are_no_problem(db, measurement):
    db.record(measurement)
    assert db.verify() == []


def test_a_portfolio_of_another_family_is_named(db):
    db.save_portfolio(
        spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=rule(CppVariant()), code_hash="c0de"
    )  # fmt: skip
    assert any("cpp:" in problem and "does not run on sm_90" in problem for problem in db.verify())


def test_stats_count_what_is_there(db):
    found = db.stats()
    json.dumps(found)
    assert found["rows"]["trials"] == 3
    assert found["rows"]["portfolios"] == 1
    assert found["trials_by_status"] == {"ok": 2, "timeout": 1}
    assert found["trials_by_target"] == {"cpu": 1, "sm_90": 2}
    assert found["trials_by_code_hash"] == {"c0de": 2, "cpp": 1}
    assert found["schema_version"] == 1
    assert found["bytes"] > 0


def test_stats_of_an_empty_database_are_zeros(tmp_path):
    with open_db(tmp_path / "none.db") as empty:
        found = empty.stats()
    assert set(found["rows"].values()) == {0}
    assert (found["first_trial"], found["trials_by_status"]) == (None, {})


def test_pruning_removes_old_code_of_one_target_and_only_that(db):
    new = trial(code_hash="new", variant=replace(TUNED, num_warps=8), workload=MIXED)
    db.record(new)
    planned = db.prune(target=SM_90, keep=["new"], dry_run=True)
    assert (planned["trials"], planned["portfolios"]) == (2, 1)
    assert len(db.trials()) == 4
    removed = db.prune(target=SM_90, keep=["new"])
    assert {name: removed[name] for name in planned} == planned
    assert sorted(db.trials(), key=lambda t: t.code_hash) == [cpu_trial(), new]
    assert db.portfolios() == []
    assert db.profiles() == [PROFILE]
    assert db.verify() == []
    assert db.stats()["rows"]["variants"] == 2
    assert db.prune(target=SM_90, keep=["new"])["trials"] == 0


def test_pruning_everything_by_naming_nothing_is_refused(db):
    with pytest.raises(ValueError, match="keep must name at least one code hash"):
        db.prune(target=SM_90, keep=[])
    assert len(db.trials()) == 3
