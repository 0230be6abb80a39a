"""Three states of what was tuned, and measuring the best few again in place of a search."""

from __future__ import annotations

import contextlib
import json

import pytest
from click.testing import CliRunner
from pagegen_autotune import revalidate as revalidation
from pagegen_autotune import tuner
from pagegen_autotune.revalidate import revalidate, top_variants
from pagegen_autotune.tuner import TuneError, tune
from tuning_fakes import DEFAULT, DEVICE, PROFILE, SPEC, FakeBench, table

from pagegen import targets
from pagegen.cli.main import main
from pagegen.db import open_db
from pagegen.db.staleness import staleness

# streams 8 is best, 4 next; the order turns with the new compiler
OLD, NEW = table(s8=0.8, s4=0.9), table(s8=0.95, s4=0.7)


@pytest.fixture(autouse=True)
def _fake_cpu(monkeypatch):
    monkeypatch.setattr(targets, "current_device", lambda target: DEVICE)
    monkeypatch.setattr(targets, "code_hash", lambda target: "hash-1")
    monkeypatch.setattr(targets, "unsupported", lambda spec, target: None)
    monkeypatch.setattr(targets, "default_variant", lambda spec, layout, target, *, decode: DEFAULT)


@pytest.fixture
def db(tmp_path):
    with open_db(tmp_path / "tuned.db", shipped=False) as database:
        yield database


def bench(times, **environment):
    found = FakeBench(times)
    found.environment = {**found.environment, **environment}
    return found


def tuned(db, *sizes):
    before = bench(OLD, driver="570")
    tune(SPEC, PROFILE, block_sizes=sizes or (16,), target="cpu", db=db, bench=before, progress=False)
    return before


def states(db, environment, code="hash-1"):
    found = staleness(db, code_hash=lambda target: code, environment=lambda target: environment)
    return [(s.state, dict(s.changed)) for s in found]


def test_what_was_tuned_is_valid_until_the_toolchain_or_the_templates_change(db):
    now = tuned(db).environment
    assert states(db, now) == [("valid", {})]
    assert states(db, {**now, "torch": "9", "python": "9"}) == [("valid", {})]
    assert states(db, {**now, "compiler": "c++ 2.0"}) == [("revalidate", {"compiler": ("c++ 1.0", "c++ 2.0")})]
    assert states(db, {**now, "driver": "999"}) == [("revalidate", {"driver": ("570", "999")})]
    assert states(db, {**now, "driver": ""}) == [("valid", {})]  # not known is no change
    assert states(db, {**now, "driver": "999"}, code="hash-2") == [("invalid", {"templates": ("hash-1", "hash-2")})]
    assert states(db, None) == [("valid", {})]
    assert states(db, None, code="hash-2")[0][0] == "invalid"


def test_measuring_again_takes_the_best_few_and_nothing_else(db):
    searched = {v for _, v in tuned(db).checked}
    again = bench(NEW, driver="999")
    report = revalidate(SPEC, PROFILE, target="cpu", db=db, k=2, progress=False, bench=again)
    measured = {v for _, v, _ in again.sampled}
    assert DEFAULT in measured
    assert 1 + 2 <= len(measured) <= 1 + 2 * 2  # the default, and k of decode and of mixed batches
    assert measured < searched
    assert len(searched) > 6
    assert states(db, again.environment) == [("valid", {})]
    (row,) = report.rows
    assert {v.streams for v in row.rule.variants} == {4}  # what is best now, not what was


def test_only_stale_layouts_are_measured_again(db):
    tuned(db, 16, 32)
    first = bench(NEW, driver="999")
    revalidate(SPEC, PROFILE, target="cpu", db=db, progress=False, bench=first)
    assert {layout.block_size for layout, _, _ in first.sampled} == {16, 32}
    second = bench(NEW, driver="999")
    with pytest.raises(TuneError, match="nothing to measure again: all 2 portfolios of this spec on cpu are valid"):
        revalidate(SPEC, PROFILE, target="cpu", db=db, progress=False, bench=second)
    assert second.sampled == []


def test_what_was_chosen_by_an_objective_is_measured_again_by_it(db):
    for size, objective in ((16, "p99"), (32, "p99")):
        tune(
            SPEC, PROFILE, block_sizes=(size,), target="cpu", db=db, bench=bench(OLD, driver="570"), progress=False,
            objective=objective,
        )  # fmt: skip
    found = revalidate(SPEC, PROFILE, target="cpu", db=db, bench=bench(NEW, driver="580"), progress=False)
    assert {row.rule.evidence["objective"] for row in found.rows} == {"p99"}


def test_portfolios_of_several_objectives_ask_for_one(db):
    for size, objective in ((16, "mean"), (32, "cvar")):
        tune(
            SPEC, PROFILE, block_sizes=(size,), target="cpu", db=db, bench=bench(OLD, driver="570"), progress=False,
            objective=objective,
        )  # fmt: skip
    new = bench(NEW, driver="580")
    with pytest.raises(TuneError, match="chosen by cvar and mean: name one with --objective"):
        revalidate(SPEC, PROFILE, target="cpu", db=db, bench=new, progress=False)
    found = revalidate(SPEC, PROFILE, target="cpu", db=db, bench=new, progress=False, objective="cvar")
    assert {row.rule.evidence["objective"] for row in found.rows} == {"cvar"}


def test_old_samples_play_no_part_in_the_new_decision(db):
    tuned(db)
    equal = bench(table(), driver="999")
    report = revalidate(SPEC, PROFILE, target="cpu", db=db, progress=False, bench=equal)
    assert report.rows[0].rule.variants == (DEFAULT,)


def test_the_variants_measured_again_are_the_choice_first_and_then_the_best(db):
    tuned(db)
    stale = staleness(db, code_hash=lambda t: "hash-1", environment=lambda t: {"driver": "999"})[0]
    found = top_variants(db, stale, PROFILE, 3)
    assert set(found) == {"decode", "mixed"}
    for variants in found.values():
        assert variants[0].streams == 8
        assert len(variants) == 3
        assert DEFAULT not in variants


def test_changed_templates_call_for_a_search(db, monkeypatch):
    tuned(db)
    monkeypatch.setattr(targets, "code_hash", lambda target: "hash-2")
    with pytest.raises(TuneError, match="templates changed"):
        revalidate(SPEC, PROFILE, target="cpu", db=db, progress=False, bench=bench(NEW))


def test_an_untuned_spec_and_an_absent_target_are_refused(db):
    with pytest.raises(TuneError, match="no portfolio of this spec on fake CPU"):
        revalidate(SPEC, PROFILE, target="cpu", db=db, progress=False, bench=bench(NEW))
    with pytest.raises(TuneError, match="target must be here to measure again, got sm_90"):
        revalidate(SPEC, PROFILE, target="sm_90", db=db, progress=False)
    with pytest.raises(ValueError, match="k must be at least 1"):
        revalidate(SPEC, PROFILE, target="cpu", db=db, k=0)


def test_the_commands_say_what_is_stale_and_measure_it_again(tmp_path, monkeypatch):
    url = str(tmp_path / "cli.db")
    PROFILE.save(tmp_path / "traffic.json")
    command = [
        "tune", "--model", "llama-3.1-8b", "--profile", str(tmp_path / "traffic.json"), "--target", "cpu", "--db", url
    ]  # fmt: skip
    now = bench(OLD, driver="570")
    monkeypatch.setattr(tuner, "IsolatedBench", lambda *args, **options: contextlib.nullcontext(now))

    def verify():
        monkeypatch.setattr("pagegen_autotune.measure.environment_of", lambda target: now.environment)
        monkeypatch.setattr(revalidation, "environment_of", lambda target: now.environment)
        result = CliRunner().invoke(main, ["db", "verify", "--db", url, "--json"])
        assert result.exit_code == 0, result.output
        return [(s["state"], s["why"]) for s in json.loads(result.stdout)["stale"]]

    assert CliRunner().invoke(main, [*command, "--block-sizes", "16"]).exit_code == 0
    assert verify() == []
    now = bench(NEW, driver="999")
    assert verify() == [("revalidate", "driver was 570, is 999: run pagegen tune --revalidate")]
    done = CliRunner().invoke(main, [*command, "--revalidate", "--top", "1"])
    assert done.exit_code == 0, done.output
    assert verify() == []
    again = CliRunner().invoke(main, [*command, "--revalidate"])
    assert again.exit_code == 1
    assert "nothing to measure again" in again.output
