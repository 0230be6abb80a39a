"""A server that is lost at any moment: nothing is lost with it and nothing is there twice; its connections are few."""

from __future__ import annotations

import os
import signal
import threading
import time

import processes
import pytest
from database_fakes import DECODE, H100, LAYOUT, PROFILE, SPEC, cpu_trial, rule, trial
from database_places import private_server
from wire import wire

from pagegen.db import DatabaseError, Unreachable, open_db, server


@pytest.fixture
def cut(postgres):
    with wire(postgres) as made:
        yield made


@pytest.mark.parametrize("after", [False, True], ids=["before it reaches the server", "before the answer comes"])
@pytest.mark.parametrize("at", [b"BEGIN", b"INSERT INTO trials", b"COMMIT\0"])
def test_a_trial_whose_connection_is_cut_is_there_once(postgres_place, cut, at, after):
    url = postgres_place("cut")
    with open_db(cut.url(url)) as db:
        cut.cut_at, cut.after = at, after
        assert db.record(trial())
        assert cut.cut_at is None
        assert cut.accepted == 2
        assert not db.record(trial())
    with open_db(url) as db:
        assert db.trials() == [trial()]
        assert db.verify() == []


@pytest.mark.parametrize("at", [b"INSERT INTO profiles", b"INSERT INTO trials", b"COMMIT\0"])
def test_all_that_a_transaction_did_is_done_again_in_its_order(postgres_place, cut, at):
    with open_db(cut.url(postgres_place("cut"))) as db:
        cut.cut_at, cut.after = at, True
        with db.atomic():
            assert db.record(trial())
            assert db.save_profile(PROFILE)
            assert db.trials() == [trial()]
            assert db.record(cpu_trial())
            db.save_portfolio(spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=rule(), code_hash="c0de")
        assert cut.accepted == 2
        assert len(db.trials()) == 2
        assert len(db.portfolios()) == len(db.profiles()) == 1


def test_a_transaction_with_statements_of_others_is_not_repeated_and_leaves_nothing(postgres_place, cut):
    with open_db(cut.url(postgres_place("cut"))) as db:
        with pytest.raises(Unreachable, match="does not answer"), db.atomic() as connection:
            db.record(trial())
            connection.exec_driver_sql("SELECT 1")
            cut.cut_at = b"INSERT INTO profiles"
            db.save_profile(PROFILE)
        assert db.trials() == db.profiles() == []
        assert db.record(trial())


def test_a_read_that_is_cut_is_asked_again(postgres_place, cut):
    with open_db(cut.url(postgres_place("cut"))) as db:
        db.record(trial())
        cut.cut_at = b"FROM trials"
        assert db.trials() == [trial()]
        assert cut.cut_at is None


def test_a_writer_waits_for_a_server_that_it_has_seen(postgres_place, cut):
    with open_db(cut.url(postgres_place("away"))) as db:
        db.record(trial())
        cut.down()
        back = threading.Timer(1.0, cut.up)
        back.start()
        began = time.monotonic()
        assert db.record(cpu_trial())
        assert time.monotonic() - began > 0.9
        back.join()
        assert len(db.trials()) == 2


def test_patience_ends_and_the_next_transaction_starts_afresh(postgres_place, cut, monkeypatch):
    monkeypatch.setattr(server, "PATIENCE_S", 0.3)
    with open_db(cut.url(postgres_place("away"))) as db:
        cut.down()
        with pytest.raises(Unreachable, match="does not answer .*start or reach the server"):
            db.record(trial())
        cut.up()
        assert db.record(trial())


def test_who_only_reads_gives_a_server_up_soon_and_what_is_refused_for_good_at_once(postgres_place, cut, monkeypatch):
    monkeypatch.setattr(server, "OPENING_S", 0.3)
    url = cut.url(postgres_place("away"))
    cut.down()
    began = time.monotonic()
    with pytest.raises(Unreachable, match="does not answer"):
        open_db(url, read_only=True)
    assert time.monotonic() - began < 5
    cut.up()
    monkeypatch.setattr(server, "OPENING_S", 3600.0)
    with pytest.raises(Unreachable, match='role "stranger" does not exist'):
        open_db(url.replace("pagegen@", "stranger@"))


def test_a_server_that_accepts_and_never_answers_is_given_up(postgres_place, tmp_path, monkeypatch):
    import socket

    monkeypatch.setattr(server, "OPENING_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"postgresql://pagegen@127.0.0.1:{mute.getsockname()[1]}/x?connect_timeout=2"
        with pytest.raises(Unreachable, match="timeout"):
            open_db(url)


def test_one_connection_serves_transaction_after_transaction(postgres_place, cut):
    with open_db(cut.url(postgres_place("kept"))) as db:
        for i in range(10):  # to read and to write, in turn: what one sets is not left for the next
            assert db.record(trial(samples_us=(50.0 + i,)))
            assert len(db.trials()) == i + 1
        assert cut.accepted == 1


def test_threads_have_connections_of_their_own_and_leave_one(postgres, postgres_place):
    url = postgres_place("threads")
    failures = []
    with open_db(url) as db:

        def work(number: int) -> None:
            try:
                for i in range(5):
                    assert db.record(trial(samples_us=(50.0 + 10 * number + i,)))
            except BaseException as error:  # noqa: BLE001  shown below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(db.trials()) == 40
        database = url.split("@/")[1].split("?")[0]
        left = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{database}'"
        end = time.monotonic() + 10
        while postgres.execute(left) != [(1,)] and time.monotonic() < end:  # a server notices an end a little later
            time.sleep(0.02)
        assert postgres.execute(left) == [(1,)]
    while postgres.execute(left) != [(0,)] and time.monotonic() < end:
        time.sleep(0.02)
    assert postgres.execute(left) == [(0,)]


def test_a_child_leaves_its_parents_connection_as_it_is(postgres_place, cut):
    with open_db(cut.url(postgres_place("fork"))) as db:
        db.record(trial())

        def in_child(tell) -> None:
            assert db.record(cpu_trial())
            assert len(db.trials()) == 3
            db.close()

        with db.atomic():
            db.record(trial(samples_us=(55.0,)))
            child = processes.started(lambda tell: tell(b"%d" % len(db.trials())))  # beside the open transaction
            assert child.finish() == ""
            assert child.told == b"1"
        assert processes.started(in_child).finish() == ""
        assert len(db.trials()) == 3
        assert cut.accepted == 3  # the parent kept its own


def test_a_writer_that_falls_silent_inside_a_transaction_does_not_hold_up_the_others(postgres_place, monkeypatch):
    url = postgres_place("silent")
    monkeypatch.setattr(server, "SILENCE_S", 0.5)

    def frozen(tell) -> None:
        with open_db(url) as db, db.atomic():
            db.record(trial())
            os.kill(os.getpid(), signal.SIGSTOP)

    child = processes.started(frozen)
    os.waitpid(child.pid, os.WUNTRACED)
    try:
        with open_db(url) as db:
            assert db.record(cpu_trial())
            assert db.trials() == [cpu_trial()]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.finish()


@pytest.fixture
def own_server():
    """A server of this test's own, which it may kill."""
    with private_server() as made:
        yield made


def test_writers_outlive_a_server_that_is_killed_and_every_trial_is_there_once(own_server):
    own_server.execute("CREATE DATABASE fleet")
    url = own_server.url("fleet")
    open_db(url).close()

    def writer(number: int):
        def work(tell) -> None:
            with open_db(url) as db:
                for i in range(30):
                    with db.atomic():  # as the tuner stores a round
                        assert db.record(trial(samples_us=(50.0 + number, 60.0 + i)))
                        db.record(trial(samples_us=(70.0 + number, 60.0 + i), workload=DECODE, regime="warm"))
                    tell(b".")

        return work

    children = [processes.started(writer(number)) for number in range(4)]
    for _ in range(2):
        time.sleep(0.7)
        own_server.crash()
        time.sleep(0.5)
        own_server.start()
    assert [child.finish() for child in children] == [""] * 4
    assert [len(child.told) for child in children] == [30] * 4
    with open_db(url) as db:
        assert len({t.samples_us for t in db.trials()}) == len(db.trials()) == 240
        assert db.verify() == []


def test_a_server_that_is_down_costs_no_answer(postgres_place, cut, monkeypatch):
    from pagegen import selection

    monkeypatch.setattr(server, "OPENING_S", 0.1)
    url = cut.url(postgres_place("down"))
    cut.down()
    found = selection.select(SPEC, LAYOUT, H100.target, DECODE, url)
    assert found.grade in ("predicted", "default")
    assert "does not answer" in found.reason
    with pytest.raises(DatabaseError):
        open_db(url)
