"""Files of every earlier schema version: led up and down without loss, each in one transaction."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from click.testing import CliRunner
from database_fakes import CPU, H100, trial

from pagegen.cli.main import main
from pagegen.db import DatabaseError, NewerSchema, OlderSchema, codec, keys, migrations, open_db
from pagegen.db.engine import Store
from pagegen.db.schema import SCHEMA_VERSION, metadata

HERE = Path(__file__).parent
EARLIER = range(migrations.FIRST, SCHEMA_VERSION)


def restored(path: Path, version: int) -> Path:
    """The committed database of an earlier version as a file at `path`."""
    connection = sqlite3.connect(path)
    connection.executescript((HERE / f"schema_{version}.sql").read_text(encoding="utf-8"))
    connection.close()
    return path


def exported(path: Path, folder: Path) -> list[dict]:
    with open_db(path, read_only=True) as db:
        db.export(folder / "out.jsonl")
    return [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]


def dump(path: Path) -> list[str]:
    """Everything in a file as SQL, less the statistics of pages and ids that no one reads."""
    connection = sqlite3.connect(path)
    found = sorted(connection.iterdump())
    connection.close()
    return found


@pytest.mark.parametrize("version", EARLIER)
def test_there_is_a_file_of_every_earlier_version(version):
    assert (HERE / f"schema_{version}.sql").exists()
    assert (HERE / f"schema_{version}.jsonl").exists()


@pytest.mark.parametrize("version", EARLIER)
def test_opening_an_older_file_leads_it_up_and_keeps_every_record(version, tmp_path):
    path = restored(tmp_path / "old.db", version)
    with open_db(path) as db:
        assert db.verify() == []
        assert db.stats()["schema_version"] == SCHEMA_VERSION
        assert db.record(trial(samples_us=(1000.0,)))
        assert not db.record(trial())  # what is there is known as the same
    before = [json.loads(line) for line in (HERE / f"schema_{version}.jsonl").read_text().splitlines()]
    after = exported(path, tmp_path)
    assert [record for record in before if record not in after] == []
    assert len(after) == len(before) + 1


def test_the_named_columns_of_version_2_are_filled_from_what_version_1_stored(tmp_path):
    path = restored(tmp_path / "old.db", 1)
    with open_db(path) as db, db.atomic() as connection:

        def column(statement: str) -> list:
            return [tuple(row) for row in connection.exec_driver_sql(statement)]

        assert column("SELECT kv_dtype, kv_zero_points FROM kernels ORDER BY 2, 1")[-1] == ("int4", 1)
        assert ("torch 2.13.0", "4", "g++ 12") in [
            (f"torch {t}", n, c) for t, n, c in column("SELECT torch, threads, compiler FROM environments")
        ]
        devices = column("SELECT name, last_level_cache_mib, shared_memory_kib, features FROM devices ORDER BY name")
        assert devices == [(H100.name, 50.0, 227.0, ""), (CPU.name, 32.0, 0.0, "avx2 fma")]
        assert column("SELECT kind FROM portfolios ORDER BY kind") == [("measured",), ("predicted",)]


@pytest.mark.parametrize("version", EARLIER)
def test_going_down_and_up_again_gives_back_the_same_file(version, tmp_path):
    path = restored(tmp_path / "old.db", version)
    original = dump(path)
    with open_db(path) as db:
        db.store.migrate(version)
    assert sorted(tables(path)) == sorted(tables(restored(tmp_path / "again.db", version)))
    assert rows(path) == rows(tmp_path / "again.db")
    assert dump(tmp_path / "again.db") == original
    with open_db(path) as db:
        assert db.verify() == []
        up = dump(path)
        db.store.migrate(version)
    with open_db(path) as db:
        assert dump(path) == up


def tables(path: Path) -> list[tuple]:
    """(table, column, type) of a file's tables."""
    connection = sqlite3.connect(path)
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = [(name, row[1], row[2]) for name in names for row in connection.execute(f"PRAGMA table_info({name})")]
    connection.close()
    return found


def rows(path: Path) -> dict[str, list[tuple]]:
    connection = sqlite3.connect(path)
    names = sorted({name for name, _, _ in tables(path)})
    found = {name: sorted(map(repr, connection.execute(f"SELECT * FROM {name}"))) for name in names}
    connection.close()
    return found


def engine_at(path: Path) -> sa.Engine:
    return sa.create_engine(f"sqlite:///{path}")


def test_the_migrations_lead_to_the_very_tables_that_a_new_file_gets(tmp_path):
    with engine_at(tmp_path / "stepped.db").begin() as connection:
        migrations.build(connection, SCHEMA_VERSION)
        context = MigrationContext.configure(connection, opts={"version_table": "pagegen_revision"})
        assert compare_metadata(context, metadata) == []
        stepped = _shape(connection)
    open_db(tmp_path / "new.db").close()
    with engine_at(tmp_path / "new.db").begin() as connection:
        assert _shape(connection) == stepped
        assert connection.exec_driver_sql("SELECT version FROM pagegen_schema").scalar() == SCHEMA_VERSION
    with open_db(tmp_path / "stepped.db") as db:
        assert db.record(trial())


def _shape(connection: sa.Connection) -> dict:
    """Columns, keys and indexes of all tables, in no order."""
    found = {}
    inspector = sa.inspect(connection)
    for name in inspector.get_table_names():
        columns = {
            (c["name"], str(c["type"]), c["nullable"], str(c["default"]).strip("'()"))
            for c in inspector.get_columns(name)
        }
        indexes = {(i["name"], tuple(i["column_names"]), bool(i["unique"])) for i in inspector.get_indexes(name)}
        keys = {(tuple(k["constrained_columns"]), k["referred_table"]) for k in inspector.get_foreign_keys(name)}
        unique = {tuple(u["column_names"]) for u in inspector.get_unique_constraints(name)}
        found[name] = (columns, indexes, keys, unique)
    return found


def test_a_failing_migration_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = restored(tmp_path / "old.db", 1)
    before = dump(path)
    real = migrations._run

    def breaking(connection, **where):
        real(connection, **where)
        connection.exec_driver_sql("SELECT * FROM no_such_table")

    monkeypatch.setattr(migrations, "_run", breaking)
    with pytest.raises(DatabaseError, match="no_such_table"):
        open_db(path)
    assert dump(path) == before
    monkeypatch.undo()
    with open_db(path) as db:
        assert db.verify() == []


def test_rows_that_cannot_be_read_do_not_stop_a_migration_and_are_named_after_it(tmp_path):
    path = restored(tmp_path / "old.db", 1)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE devices SET data = 'oops' WHERE id = 1")
    connection.execute("UPDATE kernels SET data = '[]' WHERE id = 1")
    connection.execute("UPDATE portfolios SET rule = '{}' WHERE id = 1")
    connection.commit()
    connection.close()
    with open_db(path) as db:
        problems = " ".join(db.verify())
        assert "device 1 cannot be read" in problems
        assert "kernel 1 cannot be read" in problems


def test_an_older_file_opened_for_reading_names_the_command(tmp_path):
    path = restored(tmp_path / "old.db", 1)
    with pytest.raises(OlderSchema, match=f"reads {SCHEMA_VERSION}: run pagegen db migrate --db .*old"):
        open_db(path, read_only=True)
    assert not list(tmp_path.glob("*-wal"))


def test_the_command_leads_a_file_up_and_back(tmp_path):
    path = restored(tmp_path / "old.db", 1)

    def command(*arguments: str):
        return CliRunner().invoke(main, ["db", *arguments, "--db", str(path)])

    refused = command("stats")
    assert refused.exit_code == 1
    assert "run pagegen db migrate --db" in refused.output
    assert f"has schema version {SCHEMA_VERSION}" in command("migrate").output
    assert command("verify").exit_code == 0
    back = command("migrate", "--to", "1", "--json")
    assert json.loads(back.stdout) == {"database": str(path), "schema_version": 1}
    assert rows(path) == rows(restored(tmp_path / "again.db", 1))
    unknown = command("migrate", "--to", str(SCHEMA_VERSION + 1))
    assert unknown.exit_code == 2
    assert f"must be at most the present version {SCHEMA_VERSION}, got {SCHEMA_VERSION + 1}" in unknown.output


def test_a_version_that_is_not_known_is_refused(tmp_path):
    with open_db(tmp_path / "new.db") as db:
        for version in (0, SCHEMA_VERSION + 1):
            with pytest.raises(ValueError, match=f"version must be from 1 to {SCHEMA_VERSION}"):
                db.store.migrate(version)
        assert db.record(trial())


def test_a_newer_file_is_left_alone(tmp_path):
    path = tmp_path / "newer.db"
    open_db(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE pagegen_schema SET version = {SCHEMA_VERSION + 1}")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(NewerSchema, match=f"schema version {SCHEMA_VERSION + 1}"):
        open_db(path)
    assert path.read_bytes() == before


def test_an_older_pagegen_sees_that_the_file_is_newer_and_says_so(tmp_path):
    """It reads the version from the same place as ever, before it looks at any other table."""
    open_db(tmp_path / "new.db").close()
    connection = sqlite3.connect(tmp_path / "new.db")
    assert connection.execute("SELECT version FROM pagegen_schema").fetchall() == [(SCHEMA_VERSION,)]
    connection.close()


def test_threads_that_open_older_files_at_once_do_not_disturb_each_other(tmp_path):
    paths = [restored(tmp_path / f"old{i}.db", 1) for i in range(4)]
    failures = []

    def work(path: Path) -> None:
        try:
            Store(str(path)).close()
        except Exception as error:  # noqa: BLE001  shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(path,)) for path in paths * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_processes_that_open_an_older_file_at_once_lead_it_up_once(tmp_path):
    path = restored(tmp_path / "old.db", 1)
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with open_db(path) as db:
                    code = 0 if len(db.trials()) == 5 else 2
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 8
    with open_db(path) as db:
        assert db.verify() == []


def test_version_3_gives_one_product_with_more_and_less_memory_left_by_its_driver_one_key(tmp_path):
    path = restored(tmp_path / "old.db", 2)
    assert len(identities(path, "NVIDIA L4")) == 2  # 22.0 and 22.5 GiB as one, 22.6 as another
    with open_db(path) as db:
        of_l4 = [t for t in db.trials() if t.device.name == "NVIDIA L4"]
        assert sorted(t.device.memory_gib for t in of_l4) == [22.0, 22.5, 22.6]
        assert len({codec.trial_key(t) for t in of_l4}) == 1
        assert len(db.trials(device=of_l4[0].device)) == 3
        db.store.migrate(2)
    assert len(identities(path, "NVIDIA L4")) == 2


def identities(path: Path, name: str) -> set[str]:
    connection = sqlite3.connect(path)
    found = {i for (i,) in connection.execute("SELECT identity FROM devices WHERE name = ?", (name,))}
    connection.close()
    return found


# What drivers were seen to leave of one product's memory, in GiB; the sizes are of public listings.
REPORTED = {
    "L4": (21.95, 22.03, 22.49, 22.5, 22.6), "A10G": (21.99, 22.06, 22.49), "RTX 4090": (23.5, 23.52, 23.64, 23.99),
    "L40S": (44.39, 44.53, 44.99, 47.54), "T4": (14.56, 14.58, 14.75), "A100 40": (39.39, 39.5, 39.59),
    "H100": (79.1, 79.11, 79.44, 79.6, 80.0), "H200": (139.72, 139.81, 140.4, 141.0), "B200": (178.35, 179.1, 183.4),
    "MI300X": (191.5, 191.98, 192.0), "a VM of 16": (15.4, 15.5, 15.6, 15.7), "a VM of 32": (30.5, 31.1, 31.5),
}  # fmt: skip


@pytest.mark.parametrize("product", REPORTED)
def test_one_products_memory_is_of_one_class(product):
    assert len({keys.device_identity(replace(H100, memory_gib=gib)) for gib in REPORTED[product]}) == 1


def test_products_of_one_name_and_another_memory_stay_apart():
    for less, more in ((8, 12), (8, 16), (12, 24), (16, 32), (40, 80), (0, 8)):
        assert len({keys.device_identity(replace(H100, memory_gib=gib)) for gib in (less, more)}) == 2
