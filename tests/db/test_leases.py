"""Leases: one holder at a time, on every kind of database, and none that outlives its holder."""

from __future__ import annotations

import math
import threading
import time

import processes
import pytest
import sqlalchemy as sa
from database_fakes import trial

from pagegen.db import leases, open_db
from pagegen.db.schema import leases as table


@pytest.fixture
def db(place):
    with open_db(place("leased")) as database:
        yield database


def take(db, *names, holder="one", seconds=60.0):
    return db.lease(names, holder=holder, seconds=seconds, what="a race")


def later(monkeypatch, seconds):
    """The database's clock goes forward."""
    monkeypatch.setattr(leases, "_now", lambda connection, clock=leases._now: clock(connection) + seconds)


def test_what_one_holds_another_cannot_take_and_both_see_who_has_it(db):
    assert take(db, "a", "b") == set()
    assert take(db, "b", "c", holder="two") is None
    assert take(db, "c", holder="two") == set()  # nothing of the refused one stayed
    assert db.holds(["a", "b"], holder="one") and not db.holds(["a"], holder="two")
    found = leases.held(db.store)
    assert [(one["name"], one["holder"], one["what"]) for one in found] == [
        ("a", "one", "a race"), ("b", "one", "a race"), ("c", "two", "a race"),
    ]  # fmt: skip
    assert all(50 < one["seconds_left"] <= 60 for one in found)


def test_who_comes_next_is_told_that_another_was_there(db):
    take(db, "a", "b")
    assert db.release(["a"], holder="one") == 1
    assert take(db, "a", "fresh", holder="two") == {"a"}
    assert take(db, "a", holder="two") == set()  # its own before
    assert take(db, "b", holder="two") is None


def test_a_dead_holders_lease_ends_and_is_taken_over_and_it_knows_that_it_lost_it(db, monkeypatch):
    assert take(db, "a") == set()
    assert take(db, "a", holder="two") is None
    later(monkeypatch, 61)
    assert db.holds(["a"], holder="one")  # nobody took it yet: what was measured is good
    assert take(db, "a", holder="two") == {"a"}
    assert not db.holds(["a"], holder="one")
    assert db.renew(holder="one", seconds=60) == 0


def test_a_lease_that_ended_and_that_nobody_took_is_renewed_and_one_given_back_is_not(db, monkeypatch):
    take(db, "a")
    take(db, "b")
    db.release(["b"], holder="one")
    later(monkeypatch, 61)
    assert db.renew(holder="one", seconds=60) == 1
    assert take(db, "a", holder="two") is None
    assert take(db, "b", holder="two") == {"b"}
    assert db.release(holder="one") == 1 and leases.held(db.store)[0]["name"] == "b"


def test_giving_back_and_storing_are_one_transaction(db):
    take(db, "a")
    with pytest.raises(RuntimeError), db.atomic():
        db.record(trial())
        db.release(["a"], holder="one")
        raise RuntimeError
    assert db.trials() == [] and take(db, "a", holder="two") is None
    with db.atomic():
        assert db.holds(["a"], holder="one")
        db.record(trial())
        db.release(["a"], holder="one")
    assert len(db.trials()) == 1 and take(db, "a", holder="two") == {"a"}


def test_rows_of_leases_that_ended_long_ago_go(db):
    take(db, "a", "b")
    with db.atomic() as connection:
        connection.execute(table.update().where(table.c.name == "a").values(expires_at=1e9))
    db.renew(holder="two", seconds=1)
    with db.atomic() as connection:
        assert connection.execute(sa.select(table.c.name)).scalars().all() == ["b"]


def test_the_databases_clock_tells_and_not_the_hosts(db, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    take(db, "a", seconds=60)
    (found,) = leases.held(db.store)
    assert 50 < found["seconds_left"] <= 60


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, "60", None, True])
def test_a_length_that_is_none_is_refused(db, seconds):
    with pytest.raises((ValueError, TypeError), match="seconds"):
        take(db, "a", seconds=seconds)
    assert leases.held(db.store) == []


@pytest.mark.parametrize("name", ["", "x" * 65, 7])
def test_a_name_or_a_holder_that_is_none_is_refused(db, name):
    with pytest.raises(ValueError, match="name of a lease must be text"):
        take(db, name)
    with pytest.raises(ValueError, match="holder of a lease must be text"):
        take(db, "a", holder=name)


def test_of_many_processes_that_want_a_lease_at_once_one_gets_it(place):
    url = place("wanted")
    open_db(url).close()

    def worker(number: int):
        def work(tell) -> None:
            with open_db(url) as db:
                for name in ("a", "b", "c"):
                    got = db.lease([name, "x" + name], holder=f"worker {number}", seconds=60, what="a race")
                    if got is not None:
                        tell(f"{name} ".encode())

        return work

    children = [processes.started(worker(number)) for number in range(6)]
    assert [child.finish() for child in children] == [""] * 6
    told = b"".join(child.told for child in children).split()
    assert sorted(told) == [b"a", b"b", b"c"]


def test_threads_of_one_tuner_take_different_things_at_once(db):
    got = []
    threads = [threading.Thread(target=lambda n=n: got.append(take(db, f"race {n}"))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [set()] * 8
    assert db.release(holder="one") == 8


def test_leases_are_no_records_and_are_neither_exported_nor_merged(db, tmp_path):
    take(db, "a")
    db.export(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == ""
    with open_db(tmp_path / "other.db") as other:
        other.merge(db)
        assert leases.held(other.store) == []
    assert db.verify() == []
