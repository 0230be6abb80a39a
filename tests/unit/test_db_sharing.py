"""Export, import and merge: a union by content, readable line by line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from database_fakes import CPU, DECODE, H100, LAYOUT, MIXED, PROFILE, SM_90, SPEC, TUNED, cpu_trial, rule, trial

from pagegen.db import MissingDatabase, open_db
from pagegen.spec import CacheLayout, Profile, Status

FAILED = trial(status=Status.TIMEOUT, samples_us=(), detail="no answer in 30 s")
TRIALS = [
    trial(),
    trial(samples_us=(98.0,)),
    cpu_trial(),
    FAILED,
    trial(layout=CacheLayout(block_size=64), variant=replace(TUNED, num_warps=8), workload=MIXED),
    trial(device=replace(H100, bandwidth_gb_s=3300.0), environment={}),
]
PORTFOLIOS = [
    {"spec": SPEC, "layout": LAYOUT, "device": H100, "rule": rule(), "code_hash": "c0de"},
    {
        "spec": SPEC,
        "layout": CacheLayout(block_size=64),
        "device": H100,
        "rule": rule(kind="predicted"),
        "code_hash": "x",
    },
]


def fill(db, trials=range(6), portfolios=range(2)):
    """Records the numbered trials and portfolios in the given order."""
    with db.atomic():
        for i in trials:
            db.record(TRIALS[i])
        for i in portfolios:
            db.save_portfolio(profile=PROFILE, created_at=f"2026-01-0{i + 1}", **PORTFOLIOS[i])


def exported(db, folder) -> str:
    db.export(folder / "out.jsonl")
    return (folder / "out.jsonl").read_text()


@pytest.fixture
def db(place):
    with open_db(place("one")) as database:
        yield database


@pytest.fixture
def other(place):
    with open_db(place("other")) as database:
        yield database


def test_what_was_exported_is_imported_exactly(db, other, tmp_path):
    fill(db)
    db.save_profile(Profile(name="alone", workloads=(DECODE,), weights=(1,)))
    count = db.export(tmp_path / "all.jsonl")
    assert count == len((tmp_path / "all.jsonl").read_text().splitlines())
    report = other.import_(tmp_path / "all.jsonl")
    assert (report.malformed, report.ignored) == ((), ())
    assert report.added == len(TRIALS) + len(PORTFOLIOS) + 2
    assert other.trials() == db.trials()
    assert other.portfolios() == db.portfolios()
    assert other.profiles() == db.profiles()
    assert exported(other, tmp_path) == exported(db, tmp_path)


def test_importing_again_adds_nothing(db, other, tmp_path):
    fill(db)
    db.export(tmp_path / "all.jsonl")
    first = other.import_(tmp_path / "all.jsonl")
    second = other.import_(tmp_path / "all.jsonl")
    assert (second.added, second.present) == (0, first.added)


def test_merging_a_database_with_itself_changes_nothing(db, tmp_path):
    fill(db)
    before = exported(db, tmp_path)
    assert db.merge(db).added == 0
    assert db.merge(db.name).added == 0
    assert exported(db, tmp_path) == before


def test_merging_with_what_is_not_there_fails_and_makes_no_file(db, tmp_path):
    with pytest.raises(MissingDatabase, match="nowhere"):
        db.merge(tmp_path / "nowhere.db")
    assert not (tmp_path / "nowhere.db").exists()


def test_a_new_trial_is_one_new_line(db, tmp_path):
    fill(db)
    before = exported(db, tmp_path).splitlines()
    db.record(trial(samples_us=(55.0,)))
    after = exported(db, tmp_path).splitlines()
    assert len(after) == len(before) + 1
    assert [line for line in after if line in before] == before


def test_an_export_appears_whole_or_not_at_all(db, tmp_path, monkeypatch):
    fill(db)
    target = tmp_path / "kept.jsonl"
    target.write_text("before")

    def interrupted(store):
        yield "trial 1", {"record": "trial"}
        raise KeyboardInterrupt

    monkeypatch.setattr("pagegen.db.transfer.records", interrupted)
    with pytest.raises(KeyboardInterrupt):
        db.export(target)
    assert target.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir() if "kept" in p.name) == ["kept.jsonl"]


def lines_of(db, tmp_path) -> list[dict]:
    return [json.loads(line) for line in exported(db, tmp_path).splitlines()]


def write(path, records) -> None:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def test_malformed_lines_are_named_by_their_number_and_the_others_imported(db, other, tmp_path):
    fill(db, [0, 1], [])
    records = lines_of(db, tmp_path)
    trials = [r for r in records if r["record"] == "trial"]
    bad = {
        "no json": "{ this is not JSON",
        "no object": "[1, 2]",
        "nothing": "null",
        "no record": {"v": 1},
        "other version": {**trials[0], "v": 0},
        "version in words": {**trials[0], "v": "2"},
        "negative": {**trials[0], "samples_us": [-1.0]},
        "zero": {**trials[0], "samples_us": [0]},
        "not a number": json.dumps({**trials[0], "samples_us": [float("nan")]}),
        "text for samples": {**trials[0], "samples_us": "123"},
        "true for a sample": {**trials[0], "samples_us": [True]},
        "samples of a failure": {**trials[0], "status": "timeout"},
        "unknown status": {**trials[0], "status": "splendid"},
        "missing field": {k: v for k, v in trials[0].items() if k != "regime"},
        "unknown kernel": {**trials[0], "kernel": "feedfeedfeedfeed"},
        "deep": "[" * 100_000,
        "odd device": {"record": "device", "v": 1, "id": "d", "device": {**H100.to_dict(), "units": "many"}},
        "huge": {"record": "workload", "v": 1, "id": "w",
                 "workload": {"context_lens": [10**30], "query_lens": [1]}},
        "huge trial": {**trials[0], "workload": "w"},
        "cut": json.dumps(trials[0])[:-10],
    }  # fmt: skip
    write(tmp_path / "bad.jsonl", [*records, "", *bad.values()])
    report = other.import_(tmp_path / "bad.jsonl")
    assert other.trials() == db.trials()
    expected = [len(records) + 2 + i for i in range(len(bad))]
    assert [p.split(":")[0] for p in report.malformed] == [f"line {number}" for number in expected]
    said = dict(zip(bad, report.malformed, strict=True))
    assert "has no 'regime'" in said["missing field"]
    assert "names kernel feedfeedfeedfeed" in said["unknown kernel"]
    assert "version 1, got 0" in said["other version"]
    assert other.verify() == []


def test_records_of_a_newer_version_are_kept_reported_and_come_out_so_that_it_could_read_them(db, other, tmp_path):
    fill(db, [0], [])
    of = {r["record"]: r for r in lines_of(db, tmp_path)}
    odd = [
        {**of["device"], "id": "dev", "v": 1},  # only a newer record names it, under an id of the file's own
        {**of["kernel"], "id": "k2", "v": 2, "colour": "red"},
        {**of["trial"], "kernel": "k2", "device": "dev"},
        {**of["trial"], "v": 2, "device": "dev", "phase": 7},
        {"record": "weather", "v": 3, "sky": ["blue"]},
    ]
    write(tmp_path / "newer.jsonl", [*[r for k, r in of.items() if k not in ("trial", "device")], *odd])
    report = other.import_(tmp_path / "newer.jsonl")
    first = len(of) - 2
    assert (report.added, report.malformed) == (0, ())
    assert report.ignored == (
        f"line {first + 2}: 'kernel' of version 2",
        f"line {first + 3}: 'trial' that names what a newer version defines",
        f"line {first + 4}: 'trial' of version 2",
        f"line {first + 5}: 'weather' of version 3",
    )
    assert other.trials() == []
    assert other.verify() == []
    out = lines_of(other, tmp_path)
    defined = {}
    for record in out:  # whatever is named was defined before it
        for kind in ("kernel", "device", "environment", "variant", "workload"):
            assert not isinstance(record.get(kind), str) or record[kind] in defined[kind]
        defined.setdefault(record["record"], set()).add(record.get("id"))
    assert sorted((r["record"], r["v"]) for r in out if r["v"] > 1 or r["record"] == "trial") == [
        ("kernel", 2), ("trial", 1), ("trial", 2), ("weather", 3)
    ]  # fmt: skip
    assert not other.import_(tmp_path / "newer.jsonl").malformed
    assert lines_of(other, tmp_path) == out  # once


def test_a_newer_record_with_what_no_database_keeps_is_malformed(other, tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"record": "trial", "v": 2, "x": NaN}\n{"record": "trial", "v": true}\n')
    assert len(other.import_(tmp_path / "odd.jsonl").malformed) == 2


def test_what_a_newer_pagegen_wrote_beside_is_ignored_and_reported(db, other, tmp_path):
    fill(db, [0], [])
    records = lines_of(db, tmp_path)
    records[-1]["power_watts"] = 700
    write(tmp_path / "newer.jsonl", [{"record": "weather", "v": 1, "sky": "blue"}, *records])
    report = other.import_(tmp_path / "newer.jsonl")
    assert report.malformed == ()
    assert report.ignored == ("line 1: unknown record 'weather'", f"line {len(records) + 1}: unknown field power_watts")
    assert other.trials() == [trial()]


def test_an_unknown_field_inside_a_spec_is_malformed_since_its_meaning_is_unknown(db, other, tmp_path):
    fill(db, [0], [])
    records = lines_of(db, tmp_path)
    next(r for r in records if r["record"] == "kernel")["spec"]["rotary"] = True
    write(tmp_path / "spec.jsonl", records)
    report = other.import_(tmp_path / "spec.jsonl")
    assert "no field rotary" in report.malformed[0]
    assert other.trials() == []


def test_an_id_defined_twice_differently_is_malformed(db, other, tmp_path):
    fill(db, [0], [])
    records = lines_of(db, tmp_path)
    device = next(r for r in records if r["record"] == "device")
    write(tmp_path / "twice.jsonl", [device, {**device, "device": {**device["device"], "units": 1}}, *records])
    report = other.import_(tmp_path / "twice.jsonl")
    assert report.malformed == (f"line 2: device {device['id']} is defined twice, differently",)
    assert other.trials() == [trial()]


def test_two_exports_joined_line_by_line_import_as_their_union(db, other, tmp_path):
    fill(db, [0, 2, 4], [0])
    fill(other, [1, 2, 3], [0, 1])
    joined = exported(db, tmp_path) + exported(other, tmp_path)
    (tmp_path / "joined.jsonl").write_text(joined)
    with open_db(tmp_path / "union.db") as union:
        assert union.import_(tmp_path / "joined.jsonl").malformed == ()
        db.merge(other)
        assert exported(union, tmp_path) == exported(db, tmp_path)


def test_a_trial_of_each_target_keeps_its_own_device(db, other, tmp_path):
    fill(db)
    other.merge(db)
    assert {m.device.name for m in other.trials(target=SM_90)} == {H100.name}
    assert {m.device.name for m in other.trials(target=CPU.target)} == {CPU.name}
