"""Kills, full disks, and files that are damaged: nothing committed is lost, and nothing blocks a model.

`python tests/db/crashes.py --kills 500` and `--every-write` do at length what the first tests here do briefly.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import sqlite3
import subprocess
from pathlib import Path

import crashes
import processes
import pytest
from database_fakes import LAYOUT, SM_90, SPEC, trial

from pagegen import selection
from pagegen.db import DamagedDatabase, DatabaseError, ForeignDatabase, MissingDatabase, open_db, sqlite

KILLS = 30
EVERY = 40


@pytest.fixture(autouse=True)
def _as_in_use(monkeypatch):
    """The product's own setting, which other tests do without."""
    monkeypatch.setattr(sqlite, "SYNCHRONOUS", "FULL")


def test_writers_killed_at_random_moments_lose_nothing_that_was_committed(tmp_path):
    counts = crashes.crash(KILLS, 7, tmp_path, longest_s=0.2)
    assert counts["kills"] == KILLS
    assert counts["killed while writing"]
    assert counts["left a log"]


@pytest.mark.skipif(shutil.which("strace") is None, reason="kills at a chosen system call need strace")
def test_writers_killed_at_chosen_writes_leave_a_sound_file(tmp_path):
    try:
        counts = crashes.crash_at_every_write(tmp_path, every=EVERY)
    except OSError as error:
        pytest.skip(f"strace may not attach here: {error}")
    assert counts["pwrite64"] >= 4
    assert counts["unlink"] >= 1


def test_a_killed_client_of_a_server_loses_nothing_that_was_committed(postgres_place):
    name, expected = postgres_place("killed"), set()
    for number in range(6):
        first = 1000 + 10_000 * number
        told, ended = crashes.kill_once(name, first, 0.2 + 0.1 * number)
        assert not ended
        expected |= crashes.told_numbers(told, first)
    with open_db(name) as db:
        stored = {int(m.detail) for m in db.trials()}
        assert expected <= stored
        assert db.verify() == []
    assert expected


# --- full disks ---------------------------------------------------------------------------------------------------


def fill(db) -> None:
    for i in range(1500):
        db.record(trial(samples_us=(200.0 + i,), detail="x" * 400))


def sound(path: Path) -> int:
    with open_db(path) as db:
        assert db.verify() == []
        assert db.record(trial(samples_us=(151.0,)))
        return len(db.trials())


def test_a_file_that_may_not_grow_is_one_clear_error_and_keeps_what_was_committed(tmp_path):
    """As on a full disk, whoever runs the tests: a limit on the size of files."""
    path = tmp_path / "limited.db"
    with open_db(path) as db:
        db.record(trial())

    def limited(tell) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        with open_db(path) as db:
            with pytest.raises(DatabaseError, match=r"limited\.db cannot be used \(.*\): check the place and the disk"):
                fill(db)
            tell(b"%d" % len(db.trials()))

    child = processes.started(limited)
    assert child.finish() == ""
    told = int(child.told)
    assert told > 10
    assert sound(path) == told + 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_one_clear_error_and_no_corruption(small_disk):
    path = small_disk / "full.db"
    with open_db(path) as db:
        with pytest.raises(DatabaseError, match=r"full\.db cannot be used \(.*full.*\): check the place and the disk"):
            fill(db)
        with pytest.raises(DatabaseError, match=r"full\.db cannot be used"), db.atomic():
            fill(db)
        kept = len(db.trials())
        assert kept > 10
    with open_db(path, read_only=True) as db:
        assert len(db.trials()) == kept
        assert db.verify() == []


def test_a_disk_that_is_full_at_the_first_opening_leaves_nothing_in_the_way(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (1020 * 1024))
    with pytest.raises(DatabaseError, match=r"new\.db cannot be used"):
        open_db(small_disk / "new.db")
    ballast.unlink()
    assert sound(small_disk / "new.db") == 1


# --- damaged files ------------------------------------------------------------------------------------------------


def filled(path: Path) -> Path:
    with open_db(path) as db, db.atomic():
        for i in range(100):
            db.record(trial(samples_us=(200.0 + i,), detail="x" * 200))
    return path


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lose_a_table(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA foreign_keys=OFF")
    connection.execute("DROP TABLE variants")
    connection.close()


def overwrite(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[100:4096] = b"\xff" * 3996
    path.write_bytes(whole)


DAMAGE = {"cut": cut, "lost table": lose_a_table, "overwritten": overwrite}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_of_ours_is_set_aside_when_written_and_a_new_one_begins(damage, tmp_path, caplog):
    path = filled(tmp_path / "ours.db")
    damage(path)
    remains = path.read_bytes()
    with pytest.raises(DamagedDatabase, match=r"ours\.db.*move it away"):
        open_db(path, read_only=True)
    assert path.read_bytes() == remains
    with caplog.at_level(logging.WARNING), open_db(path) as db:
        assert db.trials() == []
        assert db.record(trial())
    (aside,) = tmp_path.glob("ours.db.damaged-*Z")
    assert aside.read_bytes() == remains
    assert f"it is now {aside}, and a new database begins" in caplog.text


def test_what_lay_beside_a_damaged_file_goes_with_it(tmp_path):
    path = filled(tmp_path / "ours.db")
    cut(path)
    (tmp_path / "ours.db-shm").write_bytes(b"")
    open_db(path).close()
    assert len(list(tmp_path.glob("ours.db.damaged-*-shm"))) == 1


def test_garbage_at_the_default_place_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEGEN_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = tmp_path / "pagegen" / "tuning.db"
    path.parent.mkdir()
    path.write_bytes(b"no database at all\n" * 500)
    with open_db() as db:
        assert db.record(trial())
        assert db.name == str(path)
    assert len(list(path.parent.glob("tuning.db.damaged-*"))) == 1


def test_a_file_that_the_environment_names_by_mistake_is_never_moved(tmp_path, monkeypatch):
    path = tmp_path / "thesis.txt"
    path.write_text("ten years of work\n")
    monkeypatch.setenv("PAGEGEN_DB", str(path))
    with pytest.raises(ForeignDatabase, match=r"thesis\.txt"):
        open_db()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("thesis.txt", "ten years of work\n")]


@pytest.mark.parametrize("named", [True, False])
def test_another_programs_database_is_never_moved(named, tmp_path, monkeypatch):
    path = tmp_path / "browser.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE cookies (id INTEGER)")
    connection.close()
    monkeypatch.setenv("PAGEGEN_DB", str(path))
    with pytest.raises(ForeignDatabase, match="another program's database"):
        open_db(path if named else None)
    assert [p.name for p in tmp_path.iterdir()] == ["browser.db"]


def test_of_many_processes_that_find_a_damaged_file_one_sets_it_aside(tmp_path):
    path = filled(tmp_path / "ours.db")
    cut(path)

    def write(number: int):
        def work(tell) -> None:
            with open_db(path) as db:
                assert db.record(trial(samples_us=(300.0 + number,)))

        return work

    assert processes.together([write(number) for number in range(12)]) == []
    assert len(list(tmp_path.glob("ours.db.damaged-*Z"))) == 1
    with open_db(path) as db:
        assert len(db.trials()) == 12
        assert db.verify() == []


def make_bad(path: Path, kind: str) -> None:
    if kind == "garbage":
        path.write_bytes(b"garbage" * 1000)
    elif kind == "foreign":
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE cookies (id INTEGER)")
        connection.close()
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind == "newer":
        filled(path)
        connection = sqlite3.connect(path)
        connection.execute("UPDATE pagegen_schema SET version = 99")
        connection.commit()
        connection.close()
    elif kind == "older":
        crashes.restore_old(path)
    elif kind != "missing":
        DAMAGE[kind](filled(path))


@pytest.mark.parametrize("kind", ["garbage", "foreign", "folder", "empty", "newer", "older", "missing", *DAMAGE])
def test_no_file_blocks_a_model(kind, tmp_path):
    path = tmp_path / "bad.db"
    make_bad(path, kind)
    rule = selection.rule_for(SPEC, LAYOUT, SM_90, str(path))
    assert rule.evidence["kind"] in ("predicted", "default")
    assert "bad.db" in rule.reason
    with pytest.raises((DatabaseError, MissingDatabase)):
        open_db(path, read_only=True)


def test_a_server_that_does_not_answer_blocks_no_model():
    url = "postgresql://me:secret@127.0.0.1:1/tuning"
    rule = selection.rule_for(SPEC, LAYOUT, SM_90, url)
    assert rule.evidence["kind"] in ("predicted", "default")
    assert "does not answer" in rule.reason
    assert "secret" not in rule.reason
