"""A server's local mirror: what it holds, how it is renewed, and that it answers while the server is down."""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import replace

import pytest
from click.testing import CliRunner
from database_fakes import CPU, DECODE, H100, LAYOUT, MIXED, PROFILE, SM_90, SPEC, TUNED, cpu_trial, rule, trial
from wire import wire

from pagegen import selection, settings, targets
from pagegen.cli.main import main
from pagegen.db import ReadOnlyDatabase, Unreachable, database, mirror, open_db, server
from pagegen.spec import CacheLayout, CompileFacts, Status, Target

CODE = targets.code_hash(SM_90)
OTHER = replace(TUNED, num_warps=8)
SAVED = {"spec": SPEC, "layout": LAYOUT, "device": H100, "profile": PROFILE, "code_hash": CODE}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "own_database", lambda: str(tmp_path / "home" / "tuning.db"))
    monkeypatch.setattr(targets, "current_device", lambda target: H100)
    monkeypatch.setattr(database, "_GIVEN_UP", {})
    monkeypatch.setattr(mirror, "_LOGGED", set())


@pytest.fixture
def fleet(postgres_place) -> str:
    """A server with a tuned kernel, and much that serving does not read."""
    url = postgres_place("fleet")
    with open_db(url, shipped=False) as db:
        for us in (90.0, 91.0):
            db.record(trial(code_hash=CODE, samples_us=(us,)))
        db.record(trial(code_hash=CODE, samples_us=(40.0,), workload=MIXED))
        db.record(trial(code_hash=CODE, samples_us=(120.0,), variant=OTHER))
        db.record(trial(code_hash=CODE, samples_us=(), status=Status.TIMEOUT))
        db.record(trial(code_hash=CODE, device=replace(H100, name="Other GPU")))
        db.record(cpu_trial())
        db.record_facts(
            CompileFacts(spec=SPEC, layout=LAYOUT, target=SM_90, variant=TUNED, form="decode", code_hash=CODE)
        )
        assert db.save_portfolio(rule=rule(), **SAVED)
    return url


def pulled(*arguments: str) -> dict:
    done = CliRunner().invoke(main, ["db", "pull", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_mirror_holds_what_answers_rest_on_and_answers_as_the_server_does(fleet):
    found = pulled(fleet)
    assert found["path"] == str(mirror.place_for(fleet))
    assert (found["portfolios"], found["trials"], found["incremental"]) == (1, 3, False)
    with open_db(found["path"], shipped=False) as db, open_db(fleet, shipped=False) as there:
        assert {t.samples_us for t in db.trials()} == {(90.0,), (91.0,), (40.0,)}
        assert db.verify() == []
        for load in (DECODE, MIXED, replace(DECODE, context_lens=(900, 3500, 20))):
            assert db.select(SPEC, LAYOUT, SM_90, load) == there.select(SPEC, LAYOUT, SM_90, load)
        assert db.best_block_size(SPEC, SM_90, PROFILE) == there.best_block_size(SPEC, SM_90, PROFILE)


def test_a_mirror_is_read_only_and_one_file(fleet):
    path = mirror.pull(fleet).path
    with open_db(path) as db:
        assert db.read_only
        with pytest.raises(ReadOnlyDatabase, match="it is a mirror"):
            db.record(trial())
    assert [p.name for p in mirror.place_for(fleet).parent.iterdir()] == [mirror.place_for(fleet).name]


def test_a_second_pull_reads_what_came_since(fleet):
    mirror.pull(fleet)
    with open_db(fleet, shipped=False) as db:
        db.record(trial(code_hash=CODE, samples_us=(92.0,)))
        db.record(trial(code_hash=CODE, samples_us=(121.0,), variant=OTHER))
    second = mirror.pull(fleet)
    assert (second.incremental, second.added, second.trials) == (True, 1, 4)
    with open_db(fleet, shipped=False) as db:
        db.save_portfolio(rule=rule(OTHER), **SAVED)  # chooses what was not copied: its older trials come, too
        db.save_portfolio(rule=rule(), **{**SAVED, "layout": CacheLayout(block_size=64)})
    third = mirror.pull(fleet)
    assert (third.incremental, third.portfolios, third.trials) == (True, 3, 6)
    assert mirror.pull(fleet).added == 0
    whole = mirror.pull(fleet, anew=True)
    assert (whole.incremental, whole.portfolios, whole.trials) == (False, 3, 6)


def test_rows_that_the_server_removed_or_numbered_anew_are_noticed(fleet, postgres):
    mirror.pull(fleet)
    with open_db(fleet, shipped=False) as db:
        db.record(trial(code_hash="newer"))
        db.prune(target=SM_90, keep=["newer"])
    again = mirror.pull(fleet)
    assert (again.incremental, again.portfolios, again.trials) == (False, 0, 0)
    with open_db(fleet, shipped=False) as db:
        db.save_portfolio(rule=rule(), **SAVED)
    mirror.pull(fleet)
    postgres.execute("UPDATE portfolios SET digest = repeat('0', 64)", fleet.split("@/")[1].split("?")[0])
    assert not mirror.pull(fleet).incremental


def test_a_mirror_of_one_target_holds_no_other(fleet, tmp_path):
    with open_db(fleet, shipped=False) as db:
        db.save_portfolio(spec=SPEC, layout=LAYOUT, device=CPU, profile=PROFILE, rule=CPU_RULE, code_hash="cpp")
    found = pulled(fleet, "--target", "cpu", "--to", str(tmp_path / "cpu.db"))
    with open_db(found["path"], shipped=False) as db:
        assert [p.target for p in db.portfolios()] == [Target("cpu")]
        assert db.trials() == [cpu_trial()]
    assert not mirror.pull(fleet, tmp_path / "cpu.db").incremental  # of all targets now
    with open_db(tmp_path / "cpu.db", shipped=False) as db:
        assert len(db.portfolios()) == 2


CPU_RULE = rule(cpu_trial().variant)


def test_while_the_server_is_down_its_mirror_answers_and_says_so(fleet, postgres, monkeypatch, caplog):
    monkeypatch.setattr(server, "OPENING_S", 0.2)
    with wire(postgres) as cut:
        url = cut.url(fleet)
        before = selection.select(SPEC, LAYOUT, SM_90, DECODE, url)
        mirror.pull(url)
        cut.down()
        with caplog.at_level(logging.WARNING):
            found = selection.select(SPEC, LAYOUT, SM_90, DECODE, url)
        assert (found.variant, found.grade, found.predicted_us) == (before.variant, "exact", before.predicted_us)
        assert "does not answer" in found.reason
        assert "its mirror of 20" in found.reason
        assert caplog.text.count("its mirror of") == 1
        assert selection.best_block_size(SPEC, SM_90, PROFILE, db=url)[0].kind == "measured"
        rows = json.loads(CliRunner().invoke(main, ["db", "trials", "--db", url, "--json"]).stdout)
        assert rows["matching"] == 3
        with pytest.raises(Unreachable):  # what is to be written is not written to a copy
            open_db(url)
        kept = mirror.place_for(url).read_bytes()
        with pytest.raises(Unreachable):
            mirror.pull(url)
        assert mirror.place_for(url).read_bytes() == kept
        cut.up()
        monkeypatch.setattr(database, "REST_S", 0.0)
        with open_db(url, read_only=True) as db:
            assert len(db.trials()) > 3


def test_who_logs_in_and_how_makes_no_other_mirror():
    first = mirror.place_for("postgresql://a:b@host/fleet")
    assert first == mirror.place_for("postgresql+psycopg://c@host/fleet?sslmode=require")
    assert first != mirror.place_for("postgresql://a:b@host/other")
    with pytest.raises(ValueError, match="url must be of a server"):
        mirror.place_for("some.db")


@pytest.mark.parametrize("what", ["a database", "garbage", "text"])
def test_a_file_that_is_no_mirror_is_never_overwritten(what, fleet, tmp_path):
    path = tmp_path / "mine.db"
    if what == "a database":
        with open_db(path) as db:
            db.record(trial())
    else:
        path.write_bytes(b"\0garbage" * 999 if what == "garbage" else b"notes")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="is no mirror, and would be overwritten"):
        mirror.pull(fleet, path)
    assert path.read_bytes() == before
    failed = CliRunner().invoke(main, ["db", "pull", fleet, "--to", str(path)])
    assert failed.exit_code == 1


def test_an_empty_database_and_a_damaged_mirror_are_replaced(fleet, tmp_path):
    open_db(tmp_path / "empty.db").close()
    assert mirror.pull(fleet, tmp_path / "empty.db").trials == 3
    with (tmp_path / "empty.db").open("r+b") as file:
        file.truncate(5000)
    assert mirror.pull(fleet, tmp_path / "empty.db").trials == 3
    with open_db(tmp_path / "empty.db", shipped=False) as db:
        assert db.verify() == []


@pytest.mark.parametrize("version", [1, 99])
def test_a_mirror_of_another_schema_is_made_anew(version, fleet):
    path = mirror.pull(fleet).path
    connection = sqlite3.connect(path)
    connection.execute("UPDATE pagegen_schema SET version = ?", (version,))
    connection.commit()
    connection.close()
    assert not mirror.pull(fleet).incremental
    with open_db(path, shipped=False) as db:
        assert len(db.trials()) == 3


def test_a_pull_that_dies_leaves_the_mirror_and_no_litter(fleet, monkeypatch):
    path = mirror.place_for(fleet)
    mirror.pull(fleet)
    before = path.read_bytes()
    monkeypatch.setattr(mirror, "_settle", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        mirror.pull(fleet, anew=True)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
