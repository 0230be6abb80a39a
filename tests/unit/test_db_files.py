"""Files that are broken, foreign, newer or not writable: clear errors for whoever opens them."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from database_fakes import trial

from pagegen.db import (
    DamagedDatabase,
    DatabaseError,
    ForeignDatabase,
    MissingDatabase,
    NewerSchema,
    ReadOnlyDatabase,
    open_db,
)
from pagegen.db.schema import SCHEMA_VERSION
from pagegen.spec import Status

REMEDY = "--db or PAGEGEN_DB"


def filled(path: Path, trials: int = 1) -> Path:
    """A database with so many trials at `path`."""
    with open_db(path) as db, db.atomic():
        for i in range(trials):
            db.record(trial(samples_us=(1.0 + i,), detail="x" * 200))
    return path


def sql(path: Path, *statements: str) -> None:
    """Runs statements behind pagegen's back."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA foreign_keys=OFF")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


GARBAGE = {
    "text": b"this is no database\n" * 100,
    "header only": b"SQLite format 3\0",
    "header and noise": b"SQLite format 3\0" + bytes(range(256)) * 64,
    "zeros": b"\0" * 8192,
}


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_with_the_file_and_the_remedy_and_left_as_it_is(tmp_path, content, read_only):
    path = tmp_path / "garbage.db"
    path.write_bytes(content)
    with pytest.raises(ForeignDatabase, match=rf"garbage\.db.*{REMEDY}"):
        open_db(path, read_only=read_only)
    assert path.read_bytes() == content


def test_every_truncation_of_a_database_is_an_error_of_ours_or_still_reads(tmp_path):
    whole = filled(tmp_path / "whole.db", 200).read_bytes()
    assert len(whole) > 40 * 1024
    path = tmp_path / "cut.db"
    outcomes = set()
    for size in range(0, len(whole), 5000):
        path.write_bytes(whole[:size])
        try:
            with open_db(path, read_only=True) as db:
                db.trials()
                outcomes.add("read")
        except DatabaseError as error:
            assert "cut.db" in str(error)
            outcomes.add(type(error).__name__)
        for leftover in tmp_path.glob("cut.db-*"):
            leftover.unlink()
    assert outcomes == {"DamagedDatabase", "MissingDatabase"}


def test_another_programs_database_is_left_alone(tmp_path):
    path = tmp_path / "browser.db"
    sql(path, "CREATE TABLE cookies (id INTEGER)")
    with pytest.raises(ForeignDatabase, match=rf"another program's database \(tables cookies\).*{REMEDY}"):
        open_db(path)


def test_a_newer_schema_asks_for_an_upgrade(tmp_path):
    path = filled(tmp_path / "newer.db")
    sql(path, "UPDATE pagegen_schema SET version = 99", "DROP TABLE portfolios")
    with pytest.raises(NewerSchema, match=rf"newer\.db has schema version 99, .* up to {SCHEMA_VERSION}: upgrade"):
        open_db(path)


@pytest.mark.parametrize(
    "damage", ["DROP TABLE variants", "DELETE FROM pagegen_schema", "UPDATE pagegen_schema SET version = 'x'"]
)
def test_a_database_that_lost_tables_or_its_version_is_refused(tmp_path, damage):
    path = filled(tmp_path / "lost.db")
    sql(path, damage)
    with pytest.raises(DamagedDatabase, match="lost part of its tables"):
        open_db(path, read_only=True)


def test_a_missing_file_is_made_for_writing_and_not_for_reading(tmp_path):
    path = tmp_path / "new" / "trials.db"
    with pytest.raises(MissingDatabase, match="run pagegen tune"):
        open_db(path, read_only=True)
    assert not path.parent.exists()
    with open_db(path) as db:
        assert db.trials() == []


def test_an_empty_file_becomes_a_database_when_written_and_is_missing_when_read(tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(MissingDatabase, match=r"empty\.db is empty"):
        open_db(path, read_only=True)
    with open_db(path) as db:
        assert db.record(trial())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "lives in a file"),
        (":memory:", "lives in a file"),
        ("sqlite://", "must name a file"),
        ("sqlite:///:memory:", "must name a file"),
        ("mysql://root:secret@host/db", "postgresql://"),
        ("what://", "postgresql://"),
    ],
)
def test_a_url_that_names_no_database_is_a_value_error_without_its_password(url, words):
    with pytest.raises(ValueError, match=words) as caught:
        open_db(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_cannot_be_reached_is_an_error_of_ours_without_its_password():
    with pytest.raises(DatabaseError) as caught:
        open_db("postgresql+psycopg://me:secret@127.0.0.1:1/db?connect_timeout=1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("place", ["", "file/trials.db"])
def test_a_place_that_cannot_hold_a_file_is_named(tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatabaseError, match=str(tmp_path)):
        open_db(tmp_path / place)


def test_names_with_characters_that_urls_reserve_are_plain_names(tmp_path):
    path = tmp_path / "a b?c=1#d%20e&mode=ro.db"
    filled(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with open_db(path, read_only=True) as db:
        assert len(db.trials()) == 1


def test_a_lock_that_nobody_gives_up_is_reported_with_the_remedy(tmp_path, monkeypatch):
    path = filled(tmp_path / "busy.db")
    monkeypatch.setattr("pagegen.db.sqlite.BUSY_TIMEOUT_S", 0.1)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with open_db(path) as db:
        assert len(db.trials()) == 1  # readers do not wait for writers
        with pytest.raises(DatabaseError, match=r"busy\.db was busy.*end what holds it"):
            db.record(trial(status=Status.TIMEOUT, samples_us=()))
    holder.close()


def test_a_full_disk_is_one_clear_error_and_the_database_stays_whole(tmp_path):
    path = filled(tmp_path / "full.db")
    with open_db(path) as db:
        with (
            pytest.raises(DatabaseError, match=r"full\.db cannot be used \(database or disk is full\)"),
            db.atomic() as c,
        ):
            pages = c.exec_driver_sql("PRAGMA page_count").scalar_one()
            c.exec_driver_sql(f"PRAGMA max_page_count={pages + 5}")
            for i in range(1000):
                db.record(trial(samples_us=(2.0 + i,), detail="x" * 500))
        assert len(db.trials()) == 1
        assert db.verify() == []


@pytest.fixture
def unwritable():
    """A folder with a filled database, neither of which may be written, for a process that is not root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        filled(folder / "shipped.db")
        (folder / "shipped.db").chmod(0o444)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)


def as_nobody(check) -> None:
    """Runs `check` in a child process without root's powers; its exception becomes this test's failure."""
    reader, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            check()
            os.write(told, b"ok")
        except BaseException as error:
            os.write(told, f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(told)
    said = b"".join(iter(lambda: os.read(reader, 4096), b"")).decode()
    os.close(reader)
    os.waitpid(child, 0)
    assert said == "ok"


def test_a_read_only_folder_is_read_without_lock_files_and_writing_says_why_not(unwritable, tmp_path):
    with open_db(tmp_path / "warm.db") as warm:
        assert warm.verify() == []  # loads what the child, who may not read our installation, needs

    def check():
        with open_db(unwritable / "shipped.db") as db:
            assert db.read_only
            assert len(db.trials()) == 1
            try:
                db.record(trial())
            except ReadOnlyDatabase as error:
                assert REMEDY in str(error), error
            else:
                raise AssertionError("wrote into a read-only folder")
        try:
            open_db(unwritable / "other.db")
        except DatabaseError as error:
            assert "other.db" in str(error), error
        else:
            raise AssertionError("made a file in a read-only folder")

    as_nobody(check)
    assert [p.name for p in unwritable.iterdir()] == ["shipped.db"]


@pytest.mark.parametrize("memory", [True, False], ids=["with its shared memory", "without"])
def test_commits_in_the_log_of_a_read_only_folder_are_read_or_the_copy_that_helps_is_named(tmp_path, memory):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open_db(tmp_path / "live.db") as db:
            db.record(trial())
            for companion in ("", "-wal", *(["-shm"] if memory else [])):
                shutil.copy(tmp_path / f"live.db{companion}", folder / f"live.db{companion}")
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)

        def check():
            if memory:
                with open_db(folder / "live.db") as db:
                    assert db.trials() == [trial()]
                return
            try:
                open_db(folder / "live.db")
            except DatabaseError as error:
                assert "copy it and live.db-wal to a folder that can be written" in str(error), error
            else:
                raise AssertionError("left out commits without a word")

        as_nobody(check)
        folder.chmod(0o755)
