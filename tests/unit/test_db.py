"""The tuning database: what goes in comes out, once, and what was measured is found again."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import database_fakes as fakes
import pytest
from database_fakes import CPU, H100, LAYOUT, MIXED, PROFILE, SM_90, SPEC, TUNED, cpu_trial, rule, trial

from pagegen.db import ReadOnlyDatabase, codec, open_db
from pagegen.spec import CacheLayout, Status, Workload

ROOT = Path(__file__).parents[2]

FAILED = trial(status=Status.WRONG_RESULT, samples_us=(), max_error=0.5, detail="max error 0.5 at [3, 1]")
ODD = [
    trial(),
    cpu_trial(),
    FAILED,
    trial(status=Status.WRONG_RESULT, samples_us=(), max_error=math.inf),
    trial(
        samples_us=(0.1 + 0.2, 1e-9, 12345678.901234567), regime="warm", max_error=None, environment={}, created_at=""
    ),
    trial(spec=SPEC.replace(q_dtype="float16", kv_dtype="int4", kv_scale_granularity="token_head", window=4095)),
    trial(
        spec=SPEC.replace(scale=0.1, logit_softcap=30, sinks=True, alibi=True, score_mod="a.b", batch_invariant=True)
    ),
    trial(layout=CacheLayout(block_size=24, order="HND"), workload=MIXED, regime="warm"),
    trial(
        detail="Zeile 1\nZeile 2 'quoted' \"twice\"; DROP TABLE trials; -- ☃",
        status=Status.COMPILE_ERROR,
        samples_us=(),
    ),
    trial(workload=Workload(context_lens=(0, 131072) * 200, query_lens=(0, 1) * 200), samples_us=(40000.25,)),
]


@pytest.fixture
def db(place):
    with open_db(place("trials")) as database:
        yield database


@pytest.mark.parametrize("measurement", ODD, ids=range(len(ODD)))
def test_a_trial_comes_back_exactly_as_it_was_recorded(db, measurement):
    assert db.record(measurement)
    (found,) = db.trials()
    assert found == measurement
    assert found.samples_us == measurement.samples_us
    assert found.environment == measurement.environment


def test_a_wrong_result_that_is_not_a_number_comes_back_as_such(db):
    db.record(trial(status=Status.WRONG_RESULT, samples_us=(), max_error=math.nan))
    assert math.isnan(db.trials()[0].max_error)


def test_bytes_that_no_database_takes_as_text_are_escaped_in_a_detail(db):
    odd = trial(status=Status.COMPILE_ERROR, samples_us=(), detail="nul \0 and a lone \udce4")
    assert db.record(odd)
    assert db.trials()[0].detail == r"nul \x00 and a lone \udce4"
    assert not db.record(odd)


def test_recording_the_identical_trial_again_changes_nothing(db):
    assert db.record(trial())
    assert not db.record(trial())
    assert not db.record(trial(device=replace(H100, memory_gib=80)))  # 80 and 80.0 are one device
    assert len(db.trials()) == 1


def test_another_sample_is_another_trial_of_the_same_question(db):
    assert db.record(trial())
    assert db.record(trial(samples_us=(98.0,)))
    assert {codec.trial_key(found) for found in db.trials()} == {codec.trial_key(trial())}


def test_a_device_is_the_same_when_only_its_measured_rates_differ(db):
    """A CPU's bandwidth is measured anew in every process; resuming must not depend on it."""
    db.record(cpu_trial())
    slower = replace(CPU, bandwidth_gb_s=23.9, memory_gib=15.5)
    assert codec.trial_key(cpu_trial(device=slower)) == codec.trial_key(cpu_trial())
    assert db.trials(device=slower)[0].device == CPU


def test_the_key_is_readable_versioned_json_in_the_database(db):
    db.record(trial())
    with db.atomic() as connection:
        row = connection.exec_driver_sql("SELECT * FROM kernels").one()
    data = json.loads(row.data)
    assert data["v"] == 1
    assert data["spec"]["head_dim"] == 128
    assert (row.head_dim, row.kv_dtype, row.block_size, row.target, row.code_hash) == (
        128,
        "bfloat16",
        16,
        "sm_90",
        "c0de",
    )


def test_trials_are_found_by_every_filter(db):
    other = trial(
        layout=CacheLayout(block_size=64), workload=MIXED, variant=replace(TUNED, num_warps=8), code_hash="new"
    )
    for measurement in (trial(), other, FAILED, cpu_trial()):
        db.record(measurement)
    assert db.trials(layout=other.layout) == [other]
    assert db.trials(workload=MIXED, variant=other.variant) == [other]
    assert db.trials(status=Status.WRONG_RESULT) == [FAILED]
    assert db.trials(code_hash="new") == [other]
    assert db.trials(target=CPU.target) == [cpu_trial()]
    assert db.trials(regime="warm") == []
    assert db.trials(spec=SPEC.replace(head_dim=64)) == []
    assert len(db.trials(spec=SPEC, status=Status.OK)) == 3


def test_several_verbs_in_one_transaction_happen_all_or_not_at_all(db):
    with pytest.raises(RuntimeError, match="half way"), db.atomic():
        db.record(trial())
        assert db.trials() == [trial()]  # its own writes are seen inside
        raise RuntimeError("half way")
    assert db.trials() == []
    with db.atomic():
        db.record(trial())
        db.save_profile(PROFILE)
    assert db.trials() == [trial()]
    assert db.profiles() == [PROFILE]


def test_a_portfolio_comes_back_and_the_newest_measured_one_is_used(db):
    def save(saved, at):
        return db.save_portfolio(
            spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=saved, code_hash="c0de", created_at=at
        )

    newest = rule(replace(TUNED, num_splits=8))
    assert save(newest, "2026-02-01T00:00:00")
    assert save(rule(), "2026-01-01T00:00:00")
    assert save(rule(kind="predicted"), "2026-03-01T00:00:00")
    assert db.portfolio(SPEC, LAYOUT, SM_90, "c0de") == newest
    assert db.portfolio(SPEC, LAYOUT, SM_90, "other code") is None
    assert db.portfolio(SPEC, LAYOUT, SM_90, "c0de", replace(H100, units=1)) is None
    stored = db.portfolios()[0]
    assert (stored.profile, stored.device, stored.layout) == (PROFILE, H100, LAYOUT)
    assert stored.profile.figures == PROFILE.figures


def test_saving_the_newest_portfolio_again_adds_nothing(db):
    saved = {"spec": SPEC, "layout": LAYOUT, "device": H100, "profile": PROFILE, "code_hash": "c0de"}
    assert db.save_portfolio(rule=rule(), **saved)
    assert not db.save_portfolio(rule=rule(), **saved)
    assert db.save_portfolio(rule=rule(replace(TUNED, num_splits=8)), **saved)
    assert db.save_portfolio(rule=rule(), **saved)  # back again is news
    assert len(db.portfolios()) == 3


def test_layouts_and_devices_with_ok_trials_are_told_most_trials_first(db):
    h200 = replace(H100, name="NVIDIA H200", memory_gib=141.0)
    for measurement in (
        trial(),
        trial(device=h200),
        trial(device=replace(h200, bandwidth_gb_s=4700.0), layout=CacheLayout(block_size=64)),
        replace(FAILED, layout=CacheLayout(block_size=8)),
    ):
        db.record(measurement)
    assert db.measured_layouts(SPEC, SM_90, "c0de") == [LAYOUT, CacheLayout(block_size=64)]
    assert [d.name for d in db.measured_devices(SPEC, SM_90, "c0de")] == [h200.name, H100.name]


def test_threads_share_one_database_object(db):
    def work(number):
        for i in range(5):
            db.record(trial(samples_us=(float(1 + number * 100 + i),)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(db.trials()) == 20


def test_a_child_after_a_fork_writes_its_own_trials_even_from_inside_a_transaction(db):
    with db.atomic():
        db.record(trial())
        child = os.fork()
        if child == 0:  # the parent holds the write lock: the child must wait for it, not write through its connection
            code = 1
            try:
                with db.store.reading() as connection:
                    code = len(connection.exec_driver_sql("SELECT id FROM trials").all())  # sees nothing uncommitted
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert db.trials() == [trial()]


def test_a_child_after_a_fork_records_beside_its_parent(db):
    db.record(trial())
    child = os.fork()
    if child == 0:
        try:
            db.record(trial(samples_us=(2.0,)))
        finally:
            os._exit(0)
    db.record(trial(samples_us=(3.0,)))
    os.waitpid(child, 0)
    assert sorted(m.samples_us[0] for m in db.trials()) == [2.0, 3.0, 101.5]
    assert db.verify() == []


def test_a_closed_database_is_one_file(tmp_path):
    db = open_db(tmp_path / "trials.db")
    db.record(trial())
    assert (tmp_path / "trials.db-wal").exists()
    db.close()
    assert [p.name for p in tmp_path.iterdir()] == ["trials.db"]
    assert db.trials() == [trial()]  # using it again opens it again


def writer(path, count, first) -> tuple[int, int]:
    """A child process that opens the file and records so many trials, writing a byte for each one that is stored.
    Returns its id and the pipe to read from."""
    reader, told = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open_db(path) as db:
                for i in range(count):
                    db.record(trial(samples_us=(float(first + i),)))
                    os.write(told, b".")
            code = 0
        finally:
            os._exit(code)
    os.close(told)
    return child, reader


def test_a_killed_process_loses_at_most_the_trial_it_was_writing(tmp_path):
    child, reader = writer(tmp_path / "killed.db", 100_000, 1)
    told = 0
    while told < 30:
        told += len(os.read(reader, 1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told += len(b"".join(iter(lambda: os.read(reader, 4096), b"")))
    os.close(reader)
    with open_db(tmp_path / "killed.db") as db:
        assert told <= len(db.trials()) <= told + 1
        assert db.verify() == []


def test_processes_that_open_a_new_file_at_once_lose_and_duplicate_nothing(tmp_path):
    path = tmp_path / "shared.db"
    children = [writer(path, 10, first) for first in (1, 101, 201, 301, 1)]  # the last writes what the first does
    for child, reader in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(reader)
    with open_db(path) as db:
        stored = sorted(m.samples_us[0] for m in db.trials())
        assert stored == [float(b + i) for b in (1, 101, 201, 301) for i in range(10)]


def test_a_database_opened_for_reading_refuses_to_write_and_says_so(db):
    db.record(trial())
    with open_db(db.name, read_only=True) as reader:
        assert reader.trials() == [trial()]
        with pytest.raises(ReadOnlyDatabase, match=r"\S+ was opened for reading.*--db or PAGEGEN_DB"):
            reader.record(FAILED)


def test_the_default_database_is_the_one_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEGEN_DB", str(tmp_path / "deep" / "er" / "own.db"))
    with open_db() as db:
        db.record(fakes.trial())
        assert db.name == str(tmp_path / "deep" / "er" / "own.db")
    with open_db(f"sqlite:///{tmp_path}/deep/er/own.db") as again:
        assert again.trials() == [fakes.trial()]
