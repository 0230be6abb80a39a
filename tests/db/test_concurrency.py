"""Many processes and threads at once: nothing lost, nothing twice, nobody turned away."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from functools import partial
from pathlib import Path

import processes
import pytest
from database_fakes import H100, LAYOUT, PROFILE, SPEC, cpu_trial, rule, trial

from pagegen.db import DatabaseError, filesystem, open_db, sqlite

PROCESSES = 32


def tune(place: str, number: int, trials: int, tell) -> None:
    """What a tuner does: trials of its own, some that all make, a rule; the database opened anew half way."""
    for part in range(2):
        with open_db(place) as db:
            for i in range(trials):
                own = 1000.0 * (number + 1) + part * 100 + i
                assert db.record(trial(samples_us=(own,)))
                db.record(cpu_trial(samples_us=(700.0 + i,)))
                db.trials(code_hash="cpp")
            db.save_portfolio(
                spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=rule(), code_hash="c0de", created_at="2026"
            )


def test_32_processes_tuning_into_one_new_database_lose_and_duplicate_nothing(place):
    name = place("shared", empty=True)
    trials = 1 if "://" in name else 2  # a server's connection takes longer
    assert processes.together([partial(tune, name, number, trials) for number in range(PROCESSES)]) == []
    with open_db(name) as db:
        stored = sorted(m.samples_us[0] for m in db.trials(code_hash="c0de"))
        expected = [1000.0 * (n + 1) + p * 100 + i for n in range(PROCESSES) for p in (0, 1) for i in range(trials)]
        assert stored == sorted(expected)
        assert len(db.trials(code_hash="cpp")) == trials
        assert len(db.portfolios()) == 1
        assert db.verify() == []
        rows = db.stats()["rows"]
        assert (rows["kernels"], rows["devices"], rows["environments"], rows["variants"]) == (2, 2, 1, 2)


def test_first_opening_by_32_processes_at_once_is_safe_and_leaves_a_wal(tmp_path):
    path = tmp_path / "new.db"

    def first(tell) -> None:
        with open_db(path) as db:
            assert db.trials() == []

    assert processes.together([first] * PROCESSES) == []
    assert path.read_bytes()[18:20] == b"\x02\x02"  # the header's mark of a write-ahead log
    with open_db(path) as db:
        assert db.verify() == []
    assert [p.name for p in tmp_path.iterdir()] == ["new.db"]


def test_readers_that_poll_a_file_in_the_making_do_not_keep_it_from_its_wal(tmp_path):
    path = tmp_path / "new.db"
    path.touch()
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            connection = sqlite3.connect(path)
            connection.execute("SELECT * FROM sqlite_master").fetchall()
            connection.close()

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        open_db(path).close()
    finally:
        ended.set()
        reader.join()
    assert path.read_bytes()[18:20] == b"\x02\x02"


def test_processes_that_import_the_same_records_in_different_orders_do_not_block_each_other(place, tmp_path):
    name = place("imported")
    kinds = [trial(samples_us=(100.0 + i,), code_hash=f"code {i % 7}") for i in range(40)]

    def add(order: int, tell) -> None:
        with open_db(name) as db, db.atomic():
            for measurement in kinds if order % 2 else reversed(kinds):
                db.record(measurement)

    assert processes.together([partial(add, number) for number in range(8)]) == []
    with open_db(name) as db:
        assert len(db.trials()) == 40
        assert db.verify() == []


def test_threads_of_one_process_write_through_connections_of_their_own(place, monkeypatch):
    """A connection that another thread uses raises, for SQLite by itself; here for both by what each thread sees."""
    with open_db(place("threads")) as db:
        seen: dict[int, set[int]] = {}
        failures = []

        def work(number: int) -> None:
            try:
                for i in range(5):
                    with db.atomic() as connection:
                        seen.setdefault(number, set()).add(id(connection.connection.dbapi_connection))
                        db.record(trial(samples_us=(1000.0 + 10 * number + i,)))
                        time.sleep(0.001)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(db.trials()) == 40
        assert db.verify() == []


def test_a_fork_while_another_thread_is_in_a_transaction_harms_neither(place):
    with open_db(place("forked")) as db:
        inside = threading.Event()

        def hold() -> None:
            with db.atomic():
                db.record(trial(samples_us=(1111.0,)))
                inside.set()
                time.sleep(0.3)

        thread = threading.Thread(target=hold)
        thread.start()
        assert inside.wait(20)
        child = processes.started(lambda tell: db.record(trial(samples_us=(2222.0,))) and None)
        thread.join()
        assert child.finish() == ""
        assert sorted(m.samples_us[0] for m in db.trials()) == [1111.0, 2222.0]
        assert db.verify() == []


def test_a_child_that_was_forked_inside_a_transaction_is_told_at_once_that_it_cannot_write(tmp_path):
    def write(tell) -> None:
        with pytest.raises(DatabaseError, match="forked inside a transaction on it: fork before or after"):
            db.record(trial(samples_us=(2222.0,)))
        assert db.trials() == []  # reading goes on

    with open_db(tmp_path / "inside.db") as db:
        with db.atomic():
            child = processes.started(write)
            assert child.finish() == ""
            db.record(trial())
        later = processes.started(lambda tell: db.record(trial(samples_us=(2222.0,))) and None)
        assert later.finish() == ""
        assert len(db.trials()) == 2


def test_a_reader_sees_one_moment_however_many_statements_it_takes(place):
    with open_db(place("moment")) as db, open_db(db.name) as writer:
        db.record(trial())
        with db.store.reading() as connection:
            before = connection.exec_driver_sql("SELECT count(*) FROM trials").scalar()
            worker = threading.Thread(target=lambda: writer.record(trial(samples_us=(55.0,))))
            worker.start()
            worker.join()
            assert connection.exec_driver_sql("SELECT count(*) FROM trials").scalar() == before == 1
        assert len(db.trials()) == 2


def test_a_snapshot_of_a_file_is_one_moment_for_every_question_and_takes_no_writes(tmp_path):
    with open_db(tmp_path / "moment.db") as db, open_db(db.name) as writer:
        db.record(trial())
        with db.snapshot():
            with db.snapshot():
                assert len(db.trials()) == 1
            worker = threading.Thread(target=lambda: writer.record(trial(samples_us=(55.0,))))
            worker.start()
            worker.join()
            assert len(db.trials()) == 1
            with pytest.raises(DatabaseError, match=r"write nothing inside snapshot\(\)"):
                db.record(trial(samples_us=(66.0,)))
        assert len(db.trials()) == 2
        with db.atomic():  # what a write transaction has written is seen in it
            db.record(trial(samples_us=(66.0,)))
            with db.snapshot():
                assert len(db.trials()) == 3


def test_a_snapshot_of_a_server_leaves_each_question_a_transaction_that_can_be_done_again(place):
    with open_db(place("moment")) as db:
        db.record(trial())
        with db.snapshot():
            assert len(db.trials()) == 1
        assert db.record(trial(samples_us=(66.0,)))


# --- file systems that hosts share --------------------------------------------------------------------------------

MOUNTINFO = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:30 / /home rw - nfs4 server:/home rw,vers=4.2
31 22 0:31 / /home/local rw - xfs /dev/sdb rw
32 22 0:32 / /mnt/with\\040space rw - cifs //server/share rw
33 22 0:33 / /mnt/over rw - ext4 /dev/sdc rw
34 33 0:34 / /mnt/over rw - 9p host rw
35 22 0:35 / /mnt/ssh rw - fuse.sshfs me@host: rw
36 22 0:36 / /mnt/container rw - fuse.fuse-overlayfs overlay rw
37 22 0:37 / /mnt/bucket rw - fuse.something bucket rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/var/x.db", "ext4", False),
        ("/home/me/x.db", "nfs4", True),
        ("/home/local/x.db", "xfs", False),
        ("/homely/x.db", "ext4", False),
        ("/mnt/with space/x.db", "cifs", True),
        ("/mnt/over/x.db", "9p", True),
        ("/mnt/ssh/x.db", "fuse.sshfs", True),
        ("/mnt/container/x.db", "fuse.fuse-overlayfs", False),
        ("/mnt/bucket/x.db", "fuse.something", True),
    ],
)
def test_the_file_system_of_a_path_is_the_nearest_mount_above_it(path, kind, shared, tmp_path, monkeypatch):
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    monkeypatch.setattr(filesystem, "MOUNTS", tmp_path / "mountinfo")
    assert filesystem.type_of(Path(path)) == kind
    assert filesystem.is_shared(Path(path)) is shared


def test_where_mounts_are_not_told_the_file_system_is_taken_for_local(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "MOUNTS", tmp_path / "none")
    assert not filesystem.is_shared(tmp_path)


@pytest.fixture
def on_nfs(tmp_path, monkeypatch):
    """Makes pagegen take the test's folder for a network file system."""
    line = f"22 1 0:21 / {tmp_path} rw,relatime shared:1 - nfs4 server:/ rw\n"

    def mount() -> None:
        (tmp_path / "mountinfo").write_text("1 1 0:1 / / rw - ext4 /dev/root rw\n" + line)
        monkeypatch.setattr(filesystem, "MOUNTS", tmp_path / "mountinfo")

    return mount


def test_a_database_on_a_network_file_system_has_a_rollback_journal(tmp_path, on_nfs):
    on_nfs()
    path = tmp_path / "shared.db"
    assert processes.together([partial(tune, str(path), number, 3) for number in range(8)]) == []
    assert path.read_bytes()[18:20] == b"\x01\x01"
    with open_db(path) as db:
        assert len(db.trials(code_hash="c0de")) == 8 * 6
        assert db.verify() == []
        assert not list(tmp_path.glob("*-wal"))


def test_a_file_with_a_wal_that_came_to_a_network_file_system_gets_a_rollback_journal(tmp_path, on_nfs):
    path = tmp_path / "came.db"
    with open_db(path) as db:
        db.record(trial())
    on_nfs()
    with open_db(path) as db:
        assert path.read_bytes()[18:20] == b"\x01\x01"
        assert db.trials() == [trial()]


def test_a_wal_that_cannot_be_left_on_a_network_file_system_is_an_error_that_says_why(tmp_path, on_nfs, monkeypatch):
    monkeypatch.setattr(sqlite, "_JOURNAL_SWITCH_S", 0.1)
    path = tmp_path / "held.db"
    with open_db(path) as db:
        db.record(trial())
        holder = sqlite3.connect(path)
        holder.execute("BEGIN")
        holder.execute("SELECT * FROM trials").fetchall()
        on_nfs()
        with pytest.raises(DatabaseError, match=r"write-ahead log, which loses data on nfs4, .*end what uses the file"):
            open_db(path)
        holder.close()


def test_opening_waits_for_another_that_repairs_or_makes_a_database_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.1)
    with sqlite.alone(tmp_path / "any.db"), pytest.raises(DatabaseError, match=r"the folder of .*new\.db was held"):
        open_db(tmp_path / "new.db")
    open_db(tmp_path / "new.db").close()


def test_a_child_forked_inside_the_lock_does_not_keep_it(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    with sqlite.alone(tmp_path / "any.db"):
        child = processes.started(lambda tell: os.close(writer) or os.read(reader, 1) and None)
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.5)
    with sqlite.alone(tmp_path / "any.db"):
        pass
    os.close(writer)
    assert child.finish() == ""
    os.close(reader)
