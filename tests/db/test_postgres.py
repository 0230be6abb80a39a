"""What only a server can do: roles, locks, lost connections, an older schema, and URLs of every form."""

from __future__ import annotations

import math
import sqlite3
import sys
import threading

import processes
import pytest
import sqlalchemy as sa
from database_fakes import DECODE, H100, LAYOUT, PROFILE, SPEC, cpu_trial, rule, trial
from test_migrations import HERE

from pagegen.db import (
    DatabaseError,
    ForeignDatabase,
    MissingDatabase,
    NewerSchema,
    OlderSchema,
    ReadOnlyDatabase,
    migrations,
    open_db,
    server,
    sqlite,
)
from pagegen.db.places import place_of
from pagegen.db.schema import SCHEMA_VERSION, metadata
from pagegen.spec import Status, Workload


def test_first_opening_by_many_processes_at_once_makes_the_tables_once(postgres_place):
    url = postgres_place("new", empty=True)

    def first(tell) -> None:
        with open_db(url) as db:
            assert db.trials() == []

    assert processes.together([first] * 32) == []
    with open_db(url) as db:
        assert db.verify() == []
        assert db.stats()["schema_version"] == SCHEMA_VERSION


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_the_driver_need_not_be_named(postgres_place, scheme):
    url = postgres_place("scheme").replace("postgresql", scheme)
    with open_db(url) as db:
        assert db.record(trial())
        assert db.name.split("?")[0] == url.split("?")[0]


def test_a_missing_driver_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DatabaseError, match=r"needs the module psycopg.*pagegen-attention\[postgres\]"):
        open_db("postgresql://host/database")


def test_an_empty_database_is_missing_when_read_and_another_programs_is_refused(postgres, postgres_place):
    url = postgres_place("foreign", empty=True)
    with pytest.raises(MissingDatabase, match="is empty"):
        open_db(url, read_only=True)
    postgres.execute("CREATE TABLE cookies (id integer)", url.split("@/")[1].split("?")[0])
    with pytest.raises(ForeignDatabase, match=r"another program's database \(tables cookies\)"):
        open_db(url)


def test_a_database_that_is_not_there_is_an_error_of_ours(postgres):
    with pytest.raises(DatabaseError, match=r'does not answer.*database "nowhere" does not exist'):
        open_db(postgres.url("nowhere"))


def test_a_role_that_may_only_read_reads_and_is_told_that_it_cannot_write(postgres, postgres_place):
    url = postgres_place("shared")
    database = url.split("@/")[1].split("?")[0]
    with open_db(url) as db:
        db.record(trial())
    postgres.execute("DROP ROLE IF EXISTS guest")
    postgres.execute("CREATE ROLE guest LOGIN")
    postgres.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO guest", database)
    try:
        with open_db(url.replace("pagegen@", "guest@")) as db:
            assert db.trials() == [trial()]
            with pytest.raises(ReadOnlyDatabase, match="cannot be written.*permission denied"):
                db.record(cpu_trial())
        with open_db(url, read_only=True) as db, pytest.raises(ReadOnlyDatabase, match="opened for reading"):
            db.record(cpu_trial())
    finally:
        postgres.execute("DROP OWNED BY guest", database)
        postgres.execute("DROP ROLE guest")


def test_a_lock_that_nobody_gives_up_is_reported_with_the_remedy(postgres_place, monkeypatch):
    with open_db(postgres_place("held")) as db:
        monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.2)
        inside, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with db.atomic():
                inside.set()
                go_on.wait(20)

        holder = threading.Thread(target=hold)
        holder.start()
        inside.wait(20)
        try:
            assert db.trials() == []  # readers do not wait for writers
            with pytest.raises(DatabaseError, match=r"was busy for .*lock timeout.*end what holds it"):
                db.record(trial())
        finally:
            go_on.set()
            holder.join()
        assert db.record(trial())


def test_a_connection_that_is_cut_loses_its_transaction_and_the_next_one_works(postgres, postgres_place):
    url = postgres_place("cut")
    with open_db(url) as db:
        db.record(trial())
        with pytest.raises(DatabaseError, match="does not answer .*terminating connection"), db.atomic() as connection:
            db.record(cpu_trial())
            backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
            postgres.execute(f"SELECT pg_terminate_backend({backend})")
            db.record(trial(samples_us=(55.0,)))
        assert db.trials() == [trial()]
        assert db.record(cpu_trial())


def test_numbers_that_columns_do_not_hold_are_refused_alike_on_every_database(place):
    with open_db(place("numbers")) as db:
        with pytest.raises(ValueError, match="context_lens must be at most 2147483647"):
            Workload(context_lens=(2**31,))
        assert db.record(trial(status=Status.WRONG_RESULT, samples_us=(), max_error=math.nan))
        long = Workload(context_lens=(2**30,) * 5)  # more than 2^31 in all
        assert db.record(trial(workload=long, samples_us=(), status=Status.TIMEOUT))
        assert db.verify() == []
        assert db.trials(workload=long)[0].workload == long


def test_text_that_no_database_takes_is_escaped_in_every_named_column(place):
    odd = "nul \0 and a lone \udce4"
    with open_db(place("texts")) as db:
        changed = trial(environment={"torch": odd, "driver": "570"}, code_hash=odd)
        assert db.record(changed)
        assert db.trials() == [changed]
        assert db.verify() == []


def test_an_older_schema_on_a_server_is_led_up_and_down(postgres, postgres_place):
    url = postgres_place("older", empty=True)
    engine = server.engine_for(place_of(url).url, url)
    with engine.begin() as connection:
        migrations.build(connection, 1)
        _copy_of_version_1(connection)
    engine.dispose()
    with pytest.raises(OlderSchema, match=f"schema version 1, this pagegen reads {SCHEMA_VERSION}"):
        open_db(url, read_only=True)
    with open_db(url) as db:
        assert len(db.trials()) == 5
        assert db.verify() == []
        assert db.record(trial(samples_us=(55.0,)))
        assert not db.record(trial())
        found = sa.inspect(db.store._engine)
        assert set(metadata.tables) <= set(found.get_table_names())
        db.store.migrate(1)
        assert set(sa.inspect(db.store._engine).get_table_names()) == {
            name
            for name in metadata.tables
            if name not in ("compile_facts", "predictions", "extras", "leases", "pagegen_revision")
        }
    with open_db(url) as db:
        assert len(db.trials()) == 6
        assert db.verify() == []
    database = url.split("@/")[1].split("?")[0]
    postgres.execute("UPDATE pagegen_schema SET version = 99", database)
    with pytest.raises(NewerSchema, match="schema version 99"):
        open_db(url)


def _copy_of_version_1(connection: sa.Connection) -> None:
    """The rows of the committed file of version 1."""
    source = sqlite3.connect(":memory:")
    source.executescript((HERE / "schema_1.sql").read_text(encoding="utf-8"))
    source.row_factory = sqlite3.Row
    order = ("devices", "environments", "kernels", "variants", "workloads", "trials", "profiles", "portfolios")
    for name in order:
        for row in source.execute(f"SELECT * FROM {name}"):
            table = sa.table(name, *[sa.column(column) for column in dict(row)])
            connection.execute(table.insert().values(dict(row)))
        connection.exec_driver_sql(
            f"SELECT setval(pg_get_serial_sequence('{name}', 'id'), (SELECT coalesce(max(id), 1) FROM {name}))"
        )
    source.close()


def test_a_file_merges_into_a_server_and_back(postgres_place, tmp_path):
    with open_db(tmp_path / "mine.db") as mine, open_db(postgres_place("fleet")) as fleet:
        mine.record(trial())
        mine.save_portfolio(spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=rule(), code_hash="c0de")
        fleet.record(cpu_trial())
        assert fleet.merge(mine).added == 3
        assert fleet.merge(mine).added == 0
        assert mine.merge(fleet).added == 1
        assert mine.trials() == fleet.trials()
        assert fleet.portfolio(SPEC, LAYOUT, H100.target, "c0de") == rule()
        assert fleet.trials(workload=DECODE, device=H100) == [trial()]
