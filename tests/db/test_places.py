"""One place decides what a path or URL means; what is written never lies over a database."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from database_fakes import H100, LAYOUT, PROFILE, SM_90, SPEC, TUNED, rule, trial
from test_db_files import as_nobody

from pagegen import paths, selection, targets
from pagegen.cli.main import main
from pagegen.db import (
    DamagedDatabase,
    DatabaseError,
    ForeignDatabase,
    MissingDatabase,
    open_db,
    shipped,
    statements,
    t4,
)
from pagegen.db.errors import BadPlace
from pagegen.db.places import masked, place_of
from pagegen.spec import CompileFacts

BAD = {
    "no such user": "~nosuchuser/x.db",
    "no such driver": "postgresql+foo://user:s3cret@host/db",
    "an asynchronous driver": "postgresql+asyncpg://user:s3cret@host/db",
    "another server": "mysql://user:s3cret@host/db",
    "a port in words": "postgresql://user:s3cret@host:notaport/db",
    "a URL without its slashes": "postgresql:/host/db",
    "a file's URL without its slashes": "sqlite:foo.db",
    "SQLite's own URL": "file:mem?mode=memory",
    "memory by options": "sqlite:///file:mem?mode=memory&uri=true",
    "options of a file": "sqlite:////tmp/q.db?mode=ro",
    "a blank": " ",
    "a surrogate": "u\ud800.db",
    "a NUL": "a\0b",
}


@pytest.mark.parametrize("url", BAD.values(), ids=BAD)
def test_what_names_no_database_is_a_bad_place_without_its_password_and_makes_no_file(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadPlace, match="url must be") as refusal:
        open_db(url)
    assert isinstance(refusal.value, ValueError)
    assert "s3cret" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []
    assert selection.rule_for(SPEC, LAYOUT, SM_90, url).evidence["missed"]
    assert "unreadable" in selection.choice_digest(SPEC, LAYOUT, SM_90, url).fields["trials"]
    assert selection.best_block_size(SPEC, SM_90, PROFILE, db=url)[0].kind == "predicted"


@pytest.mark.parametrize("url", [5, True, b"x.db", ["x"]])
def test_what_is_no_path_is_a_type_error(url):
    with pytest.raises(TypeError, match="url must be a path"):
        open_db(url)


@pytest.mark.parametrize("name", ["x" * 300, "/dev/null", "fifo"])
def test_a_place_that_cannot_hold_a_database_is_an_error_of_ours_at_once(name, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    start = time.monotonic()
    with pytest.raises(DatabaseError):
        open_db(tmp_path / name)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:///?host=/x&password=s3cret",
        "postgresql://u:s3@cret@h/d",
        "postgresql://u:s3cret@h:x/d?sslkey=s3cret",
    ],
)
def test_no_password_is_ever_told(url):
    assert "cret" not in masked(url)
    assert "cret" not in repr(place_of("postgresql:///?host=/x&password=s3cret"))


def test_a_link_is_the_file_that_it_leads_to(tmp_path):
    with open_db(tmp_path / "real.db") as db:
        db.record(trial())
        (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
        assert db.merge(tmp_path / "link.db").present == 0  # itself
    assert open_db(tmp_path / "link.db").name == str(tmp_path / "real.db")


def test_a_link_into_a_read_only_folder_is_read(tmp_path):
    with open_db(tmp_path / "warm.db") as warm:
        warm.verify()
    with tempfile.TemporaryDirectory() as closed, tempfile.TemporaryDirectory() as writable:
        with open_db(Path(closed) / "real.db") as db:
            db.record(trial())
        Path(closed).chmod(0o555)
        Path(writable).chmod(0o777)
        (Path(writable) / "link.db").symlink_to(Path(closed) / "real.db")

        def check():
            with open_db(Path(writable) / "link.db") as db:
                assert db.read_only
                assert len(db.trials()) == 1

        as_nobody(check)
        Path(closed).chmod(0o755)


# --- writing


@pytest.mark.parametrize("name", ["own.db", "own.db-wal", "own.db-shm", "link", "other.db"])
def test_nothing_is_exported_over_a_database(name, tmp_path):
    with open_db(tmp_path / "other.db") as other:
        other.record(trial())
    with open_db(tmp_path / "own.db") as db:
        db.record(trial())
        (tmp_path / "link").symlink_to(tmp_path / "own.db")
        with pytest.raises(ValueError, match="is a database, or belongs to one"):
            db.export(tmp_path / name)
        run = CliRunner().invoke(main, ["report", "-o", str(tmp_path / name), "--db", str(tmp_path / "own.db")])
        assert run.exit_code == 1, run.output
        assert "is a database, or belongs to one" in run.output
        assert len(db.trials()) == 1
        assert db.verify() == []


def test_a_pipe_or_a_link_stays_what_it_is_and_the_umask_holds(tmp_path):
    with open_db(tmp_path / "own.db") as db:
        db.record(trial())
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "link").symlink_to(tmp_path / "target.jsonl")
        (tmp_path / "null").symlink_to("/dev/null")
        read: list[str] = []
        reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
        reader.start()
        before = os.umask(0o077)
        try:
            for name in ("pipe", "link", "null"):
                assert db.export(tmp_path / name) == 6
        finally:
            os.umask(before)
        reader.join()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "null").is_symlink()
    assert (tmp_path / "target.jsonl").read_text() == read[0]
    assert (tmp_path / "target.jsonl").stat().st_mode & 0o777 == 0o600


# --- damage


def edited(path: Path, *statements_: str) -> Path:
    with open_db(path) as db:
        db.record(trial())
        db.record(trial(samples_us=(90.0,)))
    connection = sqlite3.connect(path)
    for statement in statements_:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


@pytest.mark.parametrize(
    ("column", "value"),
    [("regime", "CAST(X'22ff22' AS TEXT)"), ("created_at", "X'00'"), ("created_at", "CAST(X'22ff22' AS TEXT)"),
     ("samples_us", "replace(hex(zeroblob(50000)), '00', '[')")],
)  # fmt: skip
def test_one_damaged_row_does_not_hide_the_others(column, value, tmp_path):
    path = edited(tmp_path / "one.db", f"UPDATE trials SET {column} = {value} WHERE id = 1")
    with open_db(path) as db, open_db(tmp_path / "other.db") as other:
        assert db.trials() == [trial(samples_us=(90.0,))]
        assert any(problem.startswith("trial 1 cannot be read") for problem in db.verify())
        db.export(tmp_path / "out.jsonl")
        assert len(other.import_(tmp_path / "out.jsonl").malformed) == 1
        assert other.merge(db).added == 0
        assert len(other.trials()) == 1


def test_a_device_with_nan_is_named_by_verify(tmp_path):
    path = edited(tmp_path / "one.db", "UPDATE devices SET data = replace(data, '80.0', 'NaN')")
    assert any("memory_gib must be finite" in problem for problem in open_db(path).verify())


def test_a_schema_whose_text_is_damaged_is_set_aside_when_written(tmp_path, caplog):
    path = edited(
        tmp_path / "one.db", "PRAGMA writable_schema=1", "UPDATE sqlite_master SET sql = 'CREATE TABLE \xff('"
    )
    data = path.read_bytes().replace("CREATE TABLE \xff(".encode(), b"CREATE TABLE \xfe\xff(")
    path.write_bytes(data)
    with pytest.raises(DamagedDatabase):
        open_db(path, read_only=True)
    with open_db(path) as db:
        assert db.trials() == []
    assert len(list(tmp_path.glob("one.db.damaged-*Z"))) == 1


def test_a_layout_that_cannot_be_is_passed_over(tmp_path):
    path = edited(tmp_path / "one.db", "UPDATE kernels SET block_size = 0")
    with open_db(path) as db:
        assert db.measured_layouts(SPEC, SM_90, "c0de") == []
        assert selection.best_block_size(SPEC, SM_90, PROFILE, db=db)


def test_going_down_says_what_would_be_lost_and_loses_nothing_unasked(tmp_path):
    with open_db(tmp_path / "one.db") as db:
        db.record_facts(
            CompileFacts(spec=SPEC, layout=LAYOUT, target=SM_90, variant=TUNED, form="decode", code_hash="c0de")
        )
        with pytest.raises(ValueError, match="has no place for 1 compile facts"):
            db.store.migrate(1)
        assert len(db.compile_facts()) == 1
        assert db.verify() == []
    run = CliRunner().invoke(main, ["db", "migrate", "--to", "1", "--lossy", "--db", str(tmp_path / "one.db")])
    assert run.exit_code == 0, run.output


# --- forks and tasks


def test_forks_between_readers_are_quick_and_the_child_can_write(tmp_path):
    with open_db(tmp_path / "one.db") as db:
        with db.atomic():
            for number in range(100):
                db.record(trial(detail=str(number)))
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                db.trials()

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            start = time.monotonic()
            child = os.fork()
            if child == 0:
                try:
                    db.record(trial(detail="child"))
                    os._exit(0)
                finally:
                    os._exit(1)
            assert time.monotonic() - start < 5
            assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            for reader in readers:
                reader.join()
        assert len(db.trials()) == 101


def test_another_tasks_record_does_not_join_a_transaction(tmp_path):
    async def both(db) -> None:
        entered, done = asyncio.Event(), asyncio.Event()

        async def one() -> None:
            with db.atomic():
                db.record(trial())
                entered.set()
                await done.wait()

        async def other() -> None:
            await entered.wait()
            try:
                assert db.trials() == []
                with pytest.raises(DatabaseError, match="another task of this thread"):
                    db.record(trial(detail="other"))
            finally:
                done.set()

        await asyncio.gather(one(), other())

    with open_db(tmp_path / "one.db") as db:
        asyncio.run(both(db))
        assert db.trials() == [trial()]


def test_inside_a_transaction_errors_are_ours_too(tmp_path):
    with open_db(tmp_path / "one.db") as db, db.atomic(), pytest.raises(DatabaseError), db.atomic() as connection:
        connection.exec_driver_sql("INSERT INTO trials (id) VALUES (1)")


# --- what ships


@pytest.fixture
def records(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache_db" / "records"
    folder.mkdir(parents=True)
    with open_db(tmp_path / "made.db", shipped=False) as db:
        db.record(trial(code_hash=targets.code_hash(SM_90)))
        db.record(trial(code_hash=targets.code_hash(SM_90), samples_us=(80.0,)))
        db.export(folder / "h100.jsonl")
    monkeypatch.setattr(paths, "data", lambda name: tmp_path / name)
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    shipped._opened.cache_clear()
    yield folder
    shipped._opened.cache_clear()


def test_without_an_own_database_what_is_about_it_says_that_it_is_missing(records, tmp_path):
    missing = str(tmp_path / "typo.db")
    with open_db(tmp_path / "own.db") as own, open_db(missing, read_only=True) as absent:
        assert len(absent.trials()) == 2  # a question, which what ships answers
        for verb in (lambda: own.merge(missing), lambda: own.merge(absent), lambda: absent.export(tmp_path / "x"),
                     absent.stats):  # fmt: skip
            with pytest.raises(MissingDatabase, match=r"typo\.db"):
                verb()
        assert own.stats()["rows"]["trials"] == 0
        assert "no tuning database" in absent.verify()[0]
    for words in (["export", str(tmp_path / "x.jsonl")], ["verify"], ["stats"]):
        assert CliRunner().invoke(main, ["db", *words, "--db", missing]).exit_code == 1


def test_an_emptied_cache_is_filled_again_under_an_open_database(records, tmp_path):
    with open_db(tmp_path / "own.db") as db:
        assert len(db.trials()) == 2
        for file in (tmp_path / "cache" / "records").iterdir():
            file.unlink()
        assert len(db.trials()) == 2
        assert len(open_db(tmp_path / "own.db").trials()) == 2


def test_a_trial_in_both_layers_counts_once_and_only_the_own_are_written(records, tmp_path):
    code = targets.code_hash(SM_90)
    with open_db(tmp_path / "own.db") as db:
        db.record(trial(code_hash=code))  # ships, too
        found, matching = statements.newest(db, 20)
        assert (len(found), matching) == (2, 2)
        before = selection.select(SPEC, LAYOUT, SM_90, trial().workload, db).predicted_us
        db.record(trial(code_hash=code, samples_us=(80.0,)))
        assert selection.select(SPEC, LAYOUT, SM_90, trial().workload, db).predicted_us == before
    run = CliRunner().invoke(main, ["db", "export", str(tmp_path / "t4"), "--as", "t4", "--db", str(tmp_path / "e.db")])
    assert run.exit_code == 1
    with open_db(tmp_path / "e.db") as empty:
        assert t4.export(empty.own.trials(), tmp_path / "t4") == []


def test_pooled_trials_are_all_of_the_shown_questions(tmp_path):
    with open_db(tmp_path / "own.db") as db:
        for number in range(5):
            db.record(trial(samples_us=(100.0 + number,), created_at=f"2026-01-0{1 + number}"))
    run = CliRunner().invoke(
        main, ["db", "trials", "--pooled", "--limit", "2", "--json", "--db", str(tmp_path / "own.db")]
    )
    assert run.output.count('"created_at"') == 5


def test_dollar_signs_in_names_are_drawn_as_they_are(tmp_path):
    device = replace(H100, name="$\\frac{$")
    with open_db(tmp_path / "own.db") as db:
        for number in range(2):
            db.record(trial(device=device, code_hash=targets.code_hash(SM_90), samples_us=(100.0 + number,)))
        saved = replace(rule(), evidence={"kind": "measured", "decode": {"regret": 0.1, "speedup": None}})
        db.save_portfolio(
            spec=SPEC, layout=LAYOUT, device=device, profile=PROFILE, rule=saved, code_hash=targets.code_hash(SM_90)
        )
    run = CliRunner().invoke(main, ["report", "-o", str(tmp_path / "r.html"), "--db", str(tmp_path / "own.db")])
    assert run.exit_code == 0, run.output
    assert "$\\frac{$" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    "words", [["db", "trials", "--limit", "1" + "0" * 20], ["db", "trials", "--block-size", "1" + "0" * 30]]
)
def test_absurd_numbers_are_bad_usage(words, tmp_path):
    open_db(tmp_path / "own.db").close()
    assert CliRunner().invoke(main, [*words, "--db", str(tmp_path / "own.db")]).exit_code == 2


def test_another_programs_pipe_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ForeignDatabase, match="is a pipe or device"):
        open_db(tmp_path / "pipe", read_only=True)
