"""A shared server: what each role may do, passwords that nobody else sees, TLS by URL."""

from __future__ import annotations

import json
import logging
import os
import shutil
import traceback
from dataclasses import replace

import pytest
from click.testing import CliRunner
from database_fakes import CPU, DECODE, H100, LAYOUT, PROFILE, SM_90, SPEC, cpu_trial, rule, trial
from wire import certificate, wire

from pagegen import targets
from pagegen.cli import doctor
from pagegen.cli.main import main
from pagegen.db import DatabaseError, ReadOnlyDatabase, Unreachable, open_db, server
from pagegen.db.places import place_of
from pagegen.db.schema import SCHEMA_VERSION, leases, metadata, revision, schema_info

SECRET = "pass/w0rd:with@all?of&it"
QUOTED = "pass%2Fw0rd%3Awith%40all%3Fof%26it"


def run(*arguments: str, **environment: str):
    return CliRunner().invoke(main, list(arguments), env=environment)


@pytest.fixture(scope="module")
def shared(postgres):
    """A database with the shipped roles, and a login of each; its URL by login."""
    postgres.execute("CREATE DATABASE fleet_roles TEMPLATE template0")
    url = postgres.url("fleet_roles")
    open_db(url).close()
    for _ in range(2):  # it may be repeated
        postgres.execute(run("db", "roles").output, "fleet_roles")
    postgres.execute("CREATE ROLE needs_password NOLOGIN")
    for login, group in (("serving", "pagegen_reader"), ("tuning", "pagegen_writer"), ("stranger", "needs_password")):
        quoted = SECRET.replace("'", "''")
        postgres.execute(f"CREATE ROLE {login} LOGIN PASSWORD '{quoted}' IN ROLE {group}, needs_password")
    yield lambda login: url.replace("pagegen@", f"{login}:{QUOTED}@")
    postgres.execute("DROP DATABASE fleet_roles WITH (FORCE)")
    for role in ("serving", "tuning", "stranger", "pagegen_reader", "pagegen_writer", "needs_password"):
        postgres.execute(f"DROP ROLE {role}")


@pytest.fixture
def emptied(postgres, shared):
    yield
    names = [name for name in metadata.tables if name not in (schema_info.name, revision.name)]
    postgres.execute(f"TRUNCATE {', '.join(names)} RESTART IDENTITY", "fleet_roles")


def test_a_writer_tunes_and_a_reader_is_served(shared, emptied, monkeypatch):
    code = targets.code_hash(SM_90)
    monkeypatch.setattr(targets, "current_device", lambda target: H100)
    with open_db(shared("tuning")) as db:
        with db.atomic():
            assert db.record(trial(code_hash=code))
            assert db.record(cpu_trial())
        saved = {"spec": SPEC, "layout": LAYOUT, "device": H100, "profile": PROFILE, "code_hash": code}
        assert db.save_portfolio(rule=rule(), **saved)
        assert db.trials(device=CPU) == [cpu_trial()]
        assert db.verify() == []
    with open_db(shared("serving")) as db:  # opened to write, as by default: it only reads then
        assert db.select(SPEC, LAYOUT, SM_90, DECODE).grade == "exact"
        assert len(db.trials()) == 2
        assert db.best_block_size(SPEC, SM_90, PROFILE)[0].block_size == 16
        assert db.stats()["rows"]["trials"] == 2
        for verb in (lambda: db.record(trial(samples_us=(55.0,))), lambda: db.save_profile(replace(PROFILE, name="x"))):
            with pytest.raises(ReadOnlyDatabase, match="permission denied"):
                verb()


def test_the_writer_leases_and_the_reader_sees_it(shared, emptied):
    with open_db(shared("tuning")) as db, open_db(shared("serving")) as reader:
        assert db.lease(["a", "b"], holder="one", seconds=60, what="a race") == set()
        assert db.lease(["b"], holder="two", seconds=60, what="a race") is None
        assert db.renew(holder="one", seconds=60) == 2 and db.holds(["a"], holder="one")
        assert db.release(holder="one") == 2
        with pytest.raises(ReadOnlyDatabase, match="permission denied"):
            reader.lease(["c"], holder="three", seconds=60, what="a race")


def test_the_writer_imports_and_merges(shared, emptied, tmp_path):
    with open_db(tmp_path / "mine.db", shipped=False) as mine:
        mine.record(trial())
        mine.export(tmp_path / "mine.jsonl")
        with open_db(shared("tuning")) as db:
            assert db.merge(mine).added == 1
            assert db.import_(tmp_path / "mine.jsonl").present == 1


NEVER = (
    "CREATE TABLE mine (id integer)", "CREATE TEMPORARY TABLE mine (id integer)", "CREATE SCHEMA mine",
    "DROP TABLE trials", "ALTER TABLE trials ADD COLUMN x integer", "CREATE INDEX x ON trials (status)",
    "TRUNCATE trials", "DELETE FROM trials", "DELETE FROM portfolios", "UPDATE trials SET samples_us = '[1.0]'",
    "UPDATE portfolios SET rule = '{}'", "UPDATE pagegen_schema SET version = 99",
    "INSERT INTO pagegen_schema VALUES (99)", "INSERT INTO pagegen_revision VALUES ('x')",
    "SELECT setval('trials_id_seq', 1)", "CREATE ROLE mine", "SET ROLE pagegen", "ALTER ROLE tuning SUPERUSER",
    "SELECT pg_read_file('/etc/passwd')", "COPY trials TO PROGRAM 'true'",
)  # fmt: skip


@pytest.mark.parametrize("login", ["serving", "tuning"])
def test_neither_changes_removes_or_makes_anything(shared, emptied, login):
    import psycopg

    with psycopg.connect(shared(login), autocommit=True) as connection:
        for statement in NEVER:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)


def test_every_table_is_read_by_both_and_added_to_by_the_writer_alone_who_changes_leases_only(postgres, shared):
    versions = (schema_info.name, revision.name)
    for table in metadata.tables:
        adds = set() if table in versions else {"INSERT"} | ({"UPDATE", "DELETE"} if table == leases.name else set())
        for login, expected in (("serving", {"SELECT"}), ("tuning", {"SELECT"} | adds)):
            found = {
                privilege
                for privilege in ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
                if postgres.execute(f"SELECT has_table_privilege('{login}', '{table}', '{privilege}')", "fleet_roles")
                == [(True,)]
            }
            assert found == expected, (login, table)


def test_a_role_that_is_no_member_is_not_let_in(shared):
    with pytest.raises(Unreachable, match="permission denied for database"):
        open_db(shared("stranger"))


@pytest.mark.parametrize("version", [None, 1])
def test_tables_that_only_their_owner_can_make_or_upgrade_are_said_to_be_so(postgres, shared, version):
    postgres.execute("CREATE DATABASE fleet_empty TEMPLATE template0")
    try:
        url = postgres.url("fleet_empty")
        if version is not None:
            with open_db(url) as db:
                db.store.migrate(version)
            postgres.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO pagegen_writer", "fleet_empty")
        with pytest.raises(ReadOnlyDatabase, match=f"schema version {SCHEMA_VERSION}.*owner run pagegen db migrate"):
            open_db(shared("tuning").replace("fleet_roles", "fleet_empty"))
    finally:
        postgres.execute("DROP DATABASE fleet_empty WITH (FORCE)")


def told(caplog, *failures: BaseException) -> str:
    """All that was logged and raised, with every error behind it."""
    return caplog.text + "".join("".join(traceback.format_exception(error)) + repr(error) for error in failures)


def test_a_password_in_a_url_is_in_no_message_repr_log_or_report(shared, emptied, postgres, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(server, "OPENING_S", 0.0)
    url = shared("tuning")
    texts = []
    with open_db(url) as db:
        db.record(trial())
        texts += [repr(db), db.name, str(db.stats()), repr(db.store.__dict__), repr(place_of(url)), str(db.verify())]
        with pytest.raises(DatabaseError) as failed, db.atomic() as connection:
            connection.exec_driver_sql("SELECT no_such_thing")
        texts.append(told(caplog, failed.value))
    wrong = [
        url.replace("tuning:", "nobody:"), url.replace(QUOTED, QUOTED + "x"), url.replace("fleet_roles", "nowhere"),
        url.replace("host=/tmp", "host=/nowhere"), url + "&sslmode=banana", url + "&no_such_option=1",
        url.replace("postgresql", "postgresqll"), url.replace("@/", "@host:notaport/"), f"postgresql://a:{SECRET}\n@h/d",
        url.replace(f":{QUOTED}", "").replace("?", f"?password={QUOTED}&") + "&port=1",
    ]  # fmt: skip
    for place in wrong:
        with pytest.raises((DatabaseError, ValueError)) as failed:
            open_db(place)
        texts.append(told(caplog, failed.value))
    for place in (url, *wrong):
        for command in (("db", "stats"), ("db", "migrate")):
            done = run(*command, "--db", place)
            texts.append(done.output + done.stderr + repr(done.exception))
        monkeypatch.setenv("PAGEGEN_DB", place)
        texts += [doctor.text(doctor.examine()), json.dumps(doctor.examine())]
    for text in texts:
        for secret in (SECRET, QUOTED, "w0rd"):
            assert secret not in text, text


def test_doctor_hides_the_password_of_a_database_without_tables(postgres, shared, monkeypatch):
    postgres.execute("CREATE DATABASE fleet_bare TEMPLATE template0")
    try:
        monkeypatch.setenv("PAGEGEN_DB", shared("tuning").replace("fleet_roles", "fleet_bare"))
        found = doctor.database()
        assert not found["exists"]
        assert "w0rd" not in json.dumps(found) + doctor.text(doctor.examine())
    finally:
        postgres.execute("DROP DATABASE fleet_bare WITH (FORCE)")


def test_a_password_comes_from_the_environment_or_from_pgpass(shared, tmp_path, monkeypatch):
    url = shared("serving").replace(f":{QUOTED}@", "@")
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
    with pytest.raises(Unreachable, match="no password supplied"):
        open_db(url)
    monkeypatch.setenv("PGPASSWORD", SECRET)
    open_db(url).close()
    monkeypatch.delenv("PGPASSWORD")
    passes = tmp_path / "pgpass"
    passes.write_text("*:*:fleet_roles:serving:" + SECRET.replace("\\", "\\\\").replace(":", "\\:") + "\n")
    passes.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passes))
    with open_db(url) as db:
        assert db.trials() == []
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    (tmp_path / "services").write_text(f"[fleet]\nhost={url.split('host=')[1]}\ndbname=fleet_roles\nuser=serving\n")
    with open_db("postgresql:///?service=fleet") as db:
        assert db.trials() == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")
def test_tls_is_asked_for_and_checked_by_the_url(postgres, shared, emptied, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "OPENING_S", 0.0)
    context, trusted = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other = certificate(tmp_path / "other")
    user = f"tuning:{QUOTED}"
    with wire(postgres, tls=context, port=True) as tls, wire(postgres, port=True) as plain:
        with open_db(tls.url(postgres.url("fleet_roles"), user, sslmode="verify-full", sslrootcert=str(trusted))) as db:
            assert db.record(trial())
        for how, message in (
            ({"sslmode": "verify-full", "sslrootcert": str(other)}, "certificate verify failed"),
            ({"sslmode": "verify-full", "sslrootcert": str(tmp_path / "none")}, "root certificate file"),
        ):
            with pytest.raises(Unreachable, match=message):
                open_db(tls.url(postgres.url("fleet_roles"), user, **how))
        with pytest.raises(Unreachable, match="certificate.*does not match host name"):
            named = tls.url(postgres.url("fleet_roles"), user, sslmode="verify-full", sslrootcert=str(trusted))
            open_db(named.replace("localhost", "127.0.0.1"))
        with pytest.raises(Unreachable):  # no TLS there: refused, and not gone on without
            open_db(plain.url(postgres.url("fleet_roles"), user, sslmode="require"))
    assert os.environ.get("PGSSLMODE") is None
