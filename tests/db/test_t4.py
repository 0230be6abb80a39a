"""T4 results: what Kernel Tuner and its hub read, and back again as it was."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner
from database_fakes import MIXED, TUNED, cpu_trial, trial

from pagegen.cli.main import main
from pagegen.db import open_db, t4
from pagegen.spec import Profile, Status, Workload

TRIALS = [
    trial(),
    trial(samples_us=(0.1 + 98.2, 99.0), environment={"torch": "2.13.0", "driver": "999"}),
    trial(workload=MIXED, regime="warm"),
    trial(status=Status.COMPILE_ERROR, samples_us=(), detail="too many registers"),
    trial(status=Status.WRONG_RESULT, samples_us=(), max_error=math.inf),
    trial(status=Status.TIMEOUT, samples_us=(), max_error=None, created_at=""),
    trial(status=Status.RESOURCE_LIMIT, samples_us=()),
    trial(status=Status.RUNTIME_ERROR, samples_us=()),
    cpu_trial(),
]


def test_every_trial_comes_back_exactly_as_it_went_out(place, tmp_path):
    with open_db(place("one"), shipped=False) as one, open_db(place("other"), shipped=False) as other:
        for measurement in TRIALS:
            one.record(measurement)
        paths = t4.export(one.trials(), tmp_path / "t4")
        assert len(paths) == 3  # two batches of one kernel, and the CPU's
        report = other.import_(tmp_path / "t4")
        assert (report.malformed, report.added) == ((), len(TRIALS))
        assert other.trials() == one.trials()
        assert other.import_(paths[0]).added == 0


def test_a_file_has_what_the_schema_demands(tmp_path):
    """Required by results-schema.json 1.0.0: configuration, times, invalidity and correctness, of these types."""
    for path in t4.export(TRIALS, tmp_path):
        found = json.loads(path.read_text())
        assert found["schema_version"] == "1.0.0"
        assert isinstance(found["metadata"]["hardware"]["hardware_description"], list)
        for result in found["results"]:
            assert isinstance(result["configuration"], dict)
            assert all(isinstance(ms, float) for ms in result["times"]["runtimes"])
            assert result["invalidity"] in ("timeout", "compile", "runtime", "correctness", "constraints", "correct")
            assert result["correctness"] in (0, 1)
            assert isinstance(result["timestamp"], str)
            assert result["objectives"] == ["time"]
            for measurement in result["measurements"]:
                assert set(measurement) == {"name", "value", "unit"}
                assert isinstance(measurement["value"], (int, float, str, list))


def test_runtimes_are_milliseconds(tmp_path):
    (path,) = t4.export([trial(samples_us=(100.0, 300.0))], tmp_path)
    (result,) = json.loads(path.read_text())["results"]
    assert result["times"]["runtimes"] == [0.1, 0.3]
    assert {"name": "time", "value": 0.2, "unit": "ms"} in result["measurements"]
    assert result["configuration"]["tile_kv"] == TUNED.tile_kv


def test_results_of_others_that_know_no_samples_are_read_by_their_runtimes(tmp_path):
    (path,) = t4.export([trial(samples_us=(100.0, 300.0))], tmp_path / "t4")
    found = json.loads(path.read_text())
    found["results"][0]["measurements"] = []
    path.write_text(json.dumps(found))
    with open_db(tmp_path / "one.db", shipped=False) as db:
        assert db.import_(path).added == 1
        assert db.trials()[0].samples_us == (100.0, 300.0)


def test_files_are_the_same_bytes_whatever_the_order_of_the_trials(tmp_path):
    one, other = t4.export(TRIALS, tmp_path / "one"), t4.export(TRIALS[::-1], tmp_path / "other")
    assert [p.name for p in one] == [p.name for p in other]
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in other]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{\n"schema_version": "1.0.0", "results": []}',
            "must be T4 results that name a pagegen problem .* 'metadata'",
        ),
        ('{\n"schema_version": "9.0.0", "metadata": {"pagegen": {}}, "results": []}', "schema_version must be 1.0.0"),
        ("{\n broken", "must be T4 results"),
    ],
)
def test_files_of_other_tuners_kernels_and_broken_ones_are_refused_by_name(tmp_path, text, words):
    (tmp_path / "foreign.json").write_text(text)
    with open_db(tmp_path / "one.db") as db, pytest.raises(ValueError, match=words) as refusal:
        db.import_(tmp_path / "foreign.json")
    assert "foreign.json" in str(refusal.value)


def test_a_file_of_one_line_is_known_and_an_export_of_long_lines_is_no_t4(tmp_path):
    (path,) = t4.export([trial()], tmp_path / "t4")
    (tmp_path / "line.json").write_text(json.dumps(json.loads(path.read_text())))
    long = Workload(context_lens=(1000,) * 5000)
    with open_db(tmp_path / "one.db", shipped=False) as db, open_db(tmp_path / "other.db", shipped=False) as other:
        assert db.import_(tmp_path / "line.json").added == 1
        db.save_profile(Profile(name="long", workloads=(long,), weights=(1,)))
        db.export(tmp_path / "all.json")
        assert other.import_(tmp_path / "all.json").added == 2


def test_a_bad_result_is_named_and_the_others_come_in(tmp_path):
    (path,) = t4.export([trial(), trial(samples_us=(97.0,))], tmp_path / "t4")
    found = json.loads(path.read_text())
    found["results"][0]["invalidity"] = "splendid"
    path.write_text(json.dumps(found, indent=1))
    with open_db(tmp_path / "one.db", shipped=False) as db:
        report = db.import_(path)
        assert report.added == 1
        (problem,) = report.malformed
        assert problem.startswith(f"{path.name}, result 0: no T4 result: KeyError('splendid')")


def test_the_commands_export_and_import_both_formats(tmp_path):
    url, other = str(tmp_path / "one.db"), str(tmp_path / "other.db")
    with open_db(url) as db:
        for measurement in TRIALS:
            db.record(measurement)

    def run(*words, code=0):
        result = CliRunner().invoke(main, ["db", *map(str, words)])
        assert result.exit_code == code, result.output
        return result.output

    assert "3 files in" in run("export", tmp_path / "t4", "--as", "t4", "--db", url)
    assert f"{len(TRIALS)} records added" in run("import", tmp_path / "t4", "--db", other)
    assert "records in" in run("export", tmp_path / "all.jsonl", "--db", url)
    assert "0 records added" in run("import", tmp_path / "all.jsonl", "--db", other)
    assert "must name a file" in run("export", tmp_path / "t4", "--db", url, code=2)
