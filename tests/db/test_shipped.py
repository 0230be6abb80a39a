"""Records that ship with pagegen: a layer under the user's own, read and never written."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import processes
import pytest
from database_fakes import CPU, DECODE, H100, LAYOUT, MIXED, PROFILE, SM_90, SPEC, TUNED, rule, trial

from pagegen import paths, selection, targets
from pagegen.db import MissingDatabase, open_db, shipped
from pagegen.spec import CacheLayout, Measurement

CODE = targets.code_hash(SM_90)
SHIPPED = [trial(code_hash=CODE), trial(code_hash=CODE, layout=CacheLayout(block_size=64), samples_us=(80.0,))]
OWN = trial(code_hash=CODE, samples_us=(95.0,), created_at="2026-05-01")


@pytest.fixture
def records(tmp_path, monkeypatch) -> Path:
    """A folder of shipped records for an H100, in place of the real one."""
    folder = tmp_path / "cache_db" / "records"
    folder.mkdir(parents=True)
    with open_db(tmp_path / "measured.db", shipped=False) as db:
        for measurement in SHIPPED:
            db.record(measurement)
        db.save_portfolio(
            spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=rule(), code_hash=CODE, created_at="2026-01-01"
        )
        db.export(folder / "h100.jsonl")
    monkeypatch.setattr(paths, "data", lambda name: tmp_path / name)
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    shipped._opened.cache_clear()
    shipped._own_folder.cache_clear()
    yield folder
    shipped._opened.cache_clear()
    shipped._own_folder.cache_clear()


def test_questions_see_both_layers_and_each_trial_once(records, place):
    with open_db(place("own")) as db:
        assert db.trials() == SHIPPED
        assert db.record(OWN)
        assert db.record(SHIPPED[0])  # the user's own copy of what ships
        assert db.trials() == [*SHIPPED, OWN]
        assert db.trials(layout=SHIPPED[1].layout) == [SHIPPED[1]]
        assert db.measured_layouts(SPEC, SM_90, CODE) == [LAYOUT, CacheLayout(block_size=64)]
        assert [d.name for d in db.measured_devices(SPEC, SM_90, CODE)] == [H100.name]
        assert db.portfolio(SPEC, LAYOUT, SM_90, CODE) == rule()
        assert [profile.name for profile in db.profiles()] == [PROFILE.name]


def test_a_trial_that_the_user_has_of_what_ships_counts_once_when_devices_are_ranked(records, place):
    other = replace(H100, name="Other GPU", units=100)
    with open_db(place("own")) as db:
        for i in range(3):
            db.record(trial(code_hash=CODE, device=other, samples_us=(50.0 + i,)))
        assert [d.name for d in db.measured_devices(SPEC, SM_90, CODE)] == ["Other GPU", H100.name]
        for shipped_trial in SHIPPED:  # 2 of the H100 in both layers: still fewer than 3
            db.record(shipped_trial)
        assert [d.name for d in db.measured_devices(SPEC, SM_90, CODE)] == ["Other GPU", H100.name]
        for i in range(2):
            db.record(trial(code_hash=CODE, samples_us=(70.0 + i,)))
        assert [d.name for d in db.measured_devices(SPEC, SM_90, CODE)] == [H100.name, "Other GPU"]


def test_writing_stats_verifying_exporting_and_pruning_are_about_the_users_own(records, place, tmp_path):
    with open_db(place("own")) as db:
        db.record(OWN)
        assert db.stats()["rows"]["trials"] == 1
        assert db.export(tmp_path / "own.jsonl") == 6
        assert db.verify() == []
        db.record(trial(code_hash="other"))
        assert db.prune(target=SM_90, keep=["other"])["trials"] == 1
        assert db.prune(target=SM_90, keep=["other"])["trials"] == 0
        assert len(db.own.trials()) == 1
        assert set(SHIPPED) < set(db.trials())


def test_the_users_newer_rule_goes_before_the_one_that_ships(records, place):
    mine = rule(replace(TUNED, num_splits=8))
    with open_db(place("own")) as db:
        saved = {"spec": SPEC, "layout": LAYOUT, "device": H100, "profile": PROFILE, "code_hash": CODE}
        assert db.save_portfolio(rule=rule(), **saved)  # the same as the shipped one, yet the user's
        assert db.save_portfolio(rule=mine, **saved)
        assert db.portfolio(SPEC, LAYOUT, SM_90, CODE) == mine


def test_selection_and_block_sizes_rest_on_what_ships_where_the_user_has_nothing(records, tmp_path):
    absent = str(tmp_path / "none.db")
    found = selection.select(SPEC, LAYOUT, SM_90, DECODE, absent)
    assert found.variant == TUNED
    assert found.evidence["kind"] == "measured"
    assert not (tmp_path / "none.db").exists()
    rows = selection.best_block_size(SPEC, SM_90, PROFILE, db=absent)
    assert {row.block_size for row in rows} == {16, 64}
    with open_db(tmp_path / "own.db") as db:
        db.record(trial(code_hash=CODE, layout=CacheLayout(block_size=128), workload=MIXED))
        assert {row.block_size for row in db.best_block_size(SPEC, SM_90, PROFILE)} == {16, 64, 128}


def test_without_its_own_file_a_database_opened_for_reading_is_what_ships(records, tmp_path):
    with open_db(tmp_path / "none.db", read_only=True) as db:
        assert db.trials() == SHIPPED
        assert db.read_only
    with pytest.raises(MissingDatabase):
        open_db(tmp_path / "none.db", read_only=True, shipped=False)


def test_the_layer_is_made_once_and_anew_when_the_records_change(records, tmp_path, monkeypatch):
    open_db(tmp_path / "one.db").close()
    (made,) = (tmp_path / "cache" / "records").glob("*.db")
    stamp = made.stat().st_mtime_ns
    shipped._opened.cache_clear()  # as in another process
    monkeypatch.setattr(shipped, "_build", None)  # would fail
    with open_db(tmp_path / "two.db") as db:
        assert db.trials() == SHIPPED
    assert made.stat().st_mtime_ns == stamp
    monkeypatch.undo()
    monkeypatch.setattr(paths, "data", lambda name: tmp_path / name)
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    (records / "cpu.jsonl").write_text(_exported(tmp_path, trial(device=replace(CPU, target=SM_90), code_hash=CODE)))
    with open_db(tmp_path / "two.db") as db:
        assert len(db.trials()) == 3


def _exported(folder: Path, *trials: Measurement) -> str:
    with open_db(folder / "scratch.db", shipped=False) as db:
        for measurement in trials:
            db.record(measurement)
        db.export(folder / "scratch.jsonl")
    return (folder / "scratch.jsonl").read_text(encoding="utf-8")


def test_processes_that_make_the_layer_at_once_all_see_it(records, tmp_path):
    def read(tell) -> None:
        with open_db(tmp_path / "none.db", read_only=True) as db:
            assert db.trials() == SHIPPED

    assert processes.together([read] * 8) == []
    assert [p.suffix for p in (tmp_path / "cache" / "records").iterdir()] == [".db"]


def test_a_cache_folder_that_cannot_be_written_is_no_obstacle(records, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with open_db(tmp_path / "own.db") as db:
        assert db.trials() == SHIPPED


def test_a_damaged_layer_in_the_cache_is_made_anew(records, tmp_path):
    open_db(tmp_path / "one.db").close()
    (made,) = (tmp_path / "cache" / "records").glob("*.db")
    made.chmod(0o644)
    made.write_bytes(b"garbage" * 1000)
    shipped._opened.cache_clear()
    with open_db(tmp_path / "one.db") as db:
        assert db.trials() == SHIPPED


def test_lines_that_cannot_be_read_are_named_and_left_out(records, tmp_path, caplog):
    with (records / "h100.jsonl").open("a") as file:
        file.write("{broken\n")
    with caplog.at_level(logging.WARNING), open_db(tmp_path / "own.db") as db:
        assert db.trials() == SHIPPED
    assert "h100.jsonl: line" in caplog.text


def test_where_nothing_ships_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data", lambda name: tmp_path / name)
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert shipped.files() == ()
    with open_db(tmp_path / "own.db") as db:
        assert len(db.stores) == 1
    assert not (tmp_path / "cache").exists()


ROOT = Path(__file__).parents[2]


def test_every_shipped_file_is_what_an_export_of_it_would_be_and_about_one_device(tmp_path):
    for path in sorted((ROOT / "cache_db" / "records").glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        devices = {json.loads(line)["device"]["name"] for line in lines if json.loads(line)["record"] == "device"}
        assert len(devices) == 1, path.name
        with open_db(tmp_path / f"{path.stem}.db", shipped=False) as db:
            report = db.import_(path)
            assert (report.malformed, report.ignored) == ((), ()), path.name
            assert db.verify() == [], path.name
            db.export(tmp_path / "again.jsonl")
        assert (tmp_path / "again.jsonl").read_text(encoding="utf-8").splitlines() == lines, path.name


def test_a_child_after_a_fork_reads_the_layer_through_its_own_connection(records, tmp_path):
    with open_db(tmp_path / "own.db") as db:
        assert db.trials() == SHIPPED
        child = processes.started(lambda tell: tell(b"%d" % len(db.trials())))
        assert child.finish() == ""
        assert child.told == b"2"
