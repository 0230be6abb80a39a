"""verify, stats and prune."""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import replace

import pytest
from database_fakes import CPU, H100, LAYOUT, MIXED, PROFILE, SM_90, SPEC, TUNED, cpu_trial, rule, trial

from pagegen.db import open_db
from pagegen.db.rows import Writer
from pagegen.db.schema import SCHEMA_VERSION, portfolios
from pagegen.spec import CacheLayout, CompileFacts, CppVariant, Prediction, Status, Workload


@pytest.fixture
def db(place):
    with open_db(place("kept")) as database:
        database.record(trial())
        database.record(trial(status=Status.TIMEOUT, samples_us=(), layout=CacheLayout(block_size=32)))
        database.record(cpu_trial())
        database.save_portfolio(spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=rule(), code_hash="c0de")
        yield database


def damage(db, statement: str) -> None:
    if db.store.path is None:
        with db.atomic() as connection:
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")  # foreign keys are not checked
            connection.exec_driver_sql(statement)
        return
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
    "UPDATE trials SET median_us = 3.0 WHERE id = 1": "trial 1: its median_us differ from",
    "UPDATE trials SET key = 'x' WHERE id = 1": "trial 1: its key differ from",
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


def test_damaged_pages_are_a_finding_and_not_an_exception(tmp_path):
    with open_db(tmp_path / "whole.db") as whole_db, whole_db.atomic():
        for i in range(300):
            whole_db.record(trial(samples_us=(1000.0 + i,), detail="x" * 300))
    whole = bytearray((tmp_path / "whole.db").read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 9000] = b"\xff" * 9000
    (tmp_path / "holed.db").write_bytes(whole)
    with open_db(tmp_path / "holed.db", read_only=True) as holed:
        assert any("damaged" in problem or "malformed" in problem for problem in holed.verify())


LONG = Workload(context_lens=(32768,) * 64)  # 8.6 GB of keys and values: 2.6 ms of an H100


ABSURD = [
    (trial(workload=LONG, samples_us=(2.6,)), "In milliseconds they would be likely"),
    (trial(workload=LONG, samples_us=(0.0026,)), "In seconds they would be likely"),
    (trial(workload=LONG, samples_us=(2.6e6 * 2,)), "In nanoseconds they would be likely"),
    (trial(samples_us=(5e9,)), "over an hour"),
    (cpu_trial(workload=LONG, samples_us=(1000.0,)), "the 2.15e+05 us that fake CPU takes"),
]


@pytest.mark.parametrize(("measurement", "words"), ABSURD)
def test_times_that_cannot_be_are_refused_with_the_reason(db, measurement, words):
    before = db.trials()
    with pytest.raises(ValueError, match="samples_us must be microseconds of one call") as refusal:
        db.record(measurement)
    assert words in str(refusal.value)
    assert "are these microseconds?" in str(refusal.value)
    assert db.trials() == before


@pytest.mark.parametrize(("measurement", "words"), ABSURD)
def test_times_that_cannot_be_and_came_another_way_are_found(db, measurement, words):
    with db.atomic() as connection:
        Writer(connection).add_trial(measurement)
    (problem,) = db.verify()
    assert words in problem


@pytest.mark.parametrize(
    "measurement",
    [
        trial(workload=LONG, samples_us=(2600.0,)),
        trial(workload=LONG, samples_us=(2.6,), regime="warm"),
        trial(workload=Workload(context_lens=(1,)), samples_us=(40.0,)),  # launches are all that a short batch takes
        cpu_trial(workload=LONG, samples_us=(1000.0,), device=replace(CPU, bandwidth_gb_s=0.0)),
        cpu_trial(workload=LONG, samples_us=(3e5,), device=replace(CPU, bandwidth_gb_s=1.0)),  # probed under load
        cpu_trial(workload=Workload(context_lens=(8192,), query_lens=(8192,)), samples_us=(3e6,)),
    ],
)
def test_times_that_can_be_are_no_problem(db, measurement):
    db.record(measurement)
    assert db.verify() == []


def test_a_portfolio_of_another_family_is_named(db):
    saved = {"spec": SPEC, "layout": LAYOUT, "device": H100, "profile": PROFILE, "code_hash": "c0de"}
    with pytest.raises(ValueError, match=r"rule must hold triton variants for sm_90, got cpp:"):
        db.save_portfolio(rule=rule(CppVariant()), **saved)
    with db.atomic() as connection:  # as an older pagegen took it
        connection.execute(portfolios.update().values(rule=json.dumps(rule(CppVariant()).to_dict())))
    assert any("rule must hold triton variants for sm_90" in problem for problem in db.verify())


def test_stats_count_what_is_there(db):
    found = db.stats()
    json.dumps(found)
    assert found["rows"]["trials"] == 3
    assert found["rows"]["portfolios"] == 1
    assert found["trials_by_status"] == {"ok": 2, "timeout": 1}
    assert found["trials_by_target"] == {"cpu": 1, "sm_90": 2}
    assert found["trials_by_code_hash"] == {"c0de": 2, "cpp": 1}
    assert found["schema_version"] == SCHEMA_VERSION
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


FACTS = CompileFacts(
    spec=SPEC, layout=LAYOUT, target=SM_90, variant=TUNED, form="decode", code_hash="c0de", registers=90, spills=0,
    shared_bytes=4096, num_warps=4, programs_per_unit=4, binary_bytes=9000, loop={"matrix": 16},
    environment={"compiler": "triton 3.7.1"}, created_at="2026-01-01",
)  # fmt: skip
EXPECTED = Prediction(
    spec=SPEC, layout=LAYOUT, device=H100, variant=TUNED, workload=MIXED, predicted_us=12.5, model="a model",
    code_hash="c0de", created_at="2026-01-01",
)  # fmt: skip


def test_compile_facts_and_predictions_come_back_and_are_no_trials(db):
    assert db.record_facts(FACTS)
    assert not db.record_facts(FACTS)
    assert db.record_prediction(EXPECTED)
    assert not db.record_prediction(EXPECTED)
    assert db.compile_facts(variant=TUNED, spec=SPEC) == [FACTS]
    assert db.compile_facts(code_hash="other") == []
    assert db.predictions(workload=MIXED, device=H100) == [EXPECTED]
    assert db.predictions(layout=CacheLayout(block_size=512)) == []
    assert len(db.trials()) == 3
    assert db.verify() == []


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE compile_facts SET registers = 91", "compile facts 1: its digest differ from its data"),
        ("UPDATE compile_facts SET form = 'odd'", "compile facts 1 cannot be read"),
        ("UPDATE predictions SET predicted_us = 1.0", "prediction 1: its digest differ from its data"),
        ("UPDATE predictions SET predicted_us = -1.0", "prediction 1 cannot be read"),
        ("UPDATE trials SET detail = 'x' WHERE id = 1", "trial 1: its digest differ from its data"),
        ("UPDATE portfolios SET kind = 'x'", "portfolio 1: its kind differ from its data"),
    ],
)
def test_a_changed_fact_prediction_trial_or_rule_is_named(db, statement, words):
    db.record_facts(FACTS)
    db.record_prediction(EXPECTED)
    damage(db, statement)
    assert any(words in problem for problem in db.verify()), db.verify()


def test_pruning_takes_facts_predictions_and_what_a_newer_pagegen_wrote_along(db):
    db.record_facts(FACTS)
    db.record_prediction(EXPECTED)
    with db.atomic() as connection:
        owner = connection.exec_driver_sql("SELECT digest FROM trials WHERE regime = 'cold' ORDER BY id").scalar()
        Writer(connection).add_extra("trial", owner, "power_watts", 700)
        Writer(connection).add_extra("weather", "", "", {"record": "weather", "sky": "blue"})
    db.record(trial(code_hash="new", variant=replace(TUNED, num_splits=8)))
    planned = db.prune(target=SM_90, keep=["new"], dry_run=True)
    assert (planned["compile_facts"], planned["predictions"]) == (1, 1)
    removed = db.prune(target=SM_90, keep=["new"])
    assert (removed["compile_facts"], removed["predictions"], removed["extras"]) == (1, 1, 1)
    rows = db.stats()["rows"]
    assert (rows["compile_facts"], rows["predictions"], rows["extras"], rows["trials"]) == (0, 0, 1, 2)
    assert (rows["environments"], rows["variants"], rows["devices"]) == (1, 2, 2)
    assert db.verify() == []


def test_one_device_under_two_names_meets_itself_or_is_named(db):
    db.record(trial(device=replace(H100, name="H100 80gb HBM3"), samples_us=(1000.0,)))  # only decoration differs
    assert len(db.trials(device=H100)) == 3
    assert db.verify() == []
    db.record(trial(device=replace(H100, name="our big card"), samples_us=(1001.0,)))
    (problem,) = db.verify()
    assert "'our big card'" in problem
    assert "are alike in every feature: if they are one device, name it alike" in problem
