"""The records that ship with pagegen, as a database that is only read.

cache_db/records holds JSON lines, which people can review; questions need indexes. The lines are therefore imported
once into a file of the user's cache folder, named by what was read, so that a new release makes a new one.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from pathlib import Path

from pagegen import paths, private, settings
from pagegen.db import sources, sqlite, transfer
from pagegen.db.engine import Store
from pagegen.db.errors import DatabaseError
from pagegen.db.schema import SCHEMA_VERSION

log = logging.getLogger(__name__)


def files() -> tuple[Path, ...]:
    """The files that ship: one a device."""
    try:
        return tuple(sorted((paths.data("cache_db") / "records").glob("*.jsonl")))
    except FileNotFoundError:
        return ()


def store() -> Store | None:
    """The shipped records, opened for reading; None where none ship or they cannot be read, which is logged."""
    try:
        found = files()
        stamps = tuple(_stamp(path) for path in found)
    except OSError as error:  # an installation that this user may not read
        log.warning("the shipped records cannot be read: %s", error)
        return None
    if not found:
        return None
    opened = _opened(found, stamps)
    if opened is not None and opened.path is not None and not opened.path.exists():  # the cache was emptied meanwhile
        _opened.cache_clear()
        opened = _opened(found, stamps)
    return opened


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=4)  # once a process, and again where the files changed
def _opened(found: tuple[Path, ...], stamps: tuple[tuple[int, int], ...]) -> Store | None:
    named = repr((SCHEMA_VERSION, [str(path) for path in found], stamps))
    name = f"shipped-{hashlib.sha256(named.encode()).hexdigest()[:16]}.db"
    for folder in (_users_folder, _own_folder):
        try:
            place = folder() / name
            if place.exists():
                try:
                    return Store(str(place), read_only=True)
                except DatabaseError as error:
                    log.warning("%s; it is made anew", error)
            _build(found, place)
            return Store(str(place), read_only=True)
        except (OSError, DatabaseError) as error:
            log.warning("the shipped records cannot be kept: %s", error)
    return None


def _users_folder() -> Path:
    """The folder in the user's cache, which nobody else can write: what stands there chooses kernels."""
    return private.own_path(settings.cache_dir() / "records")


@functools.cache
def _own_folder() -> Path:
    """A folder of this process, where the user's cache cannot be written."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix="pagegen-shipped-"))
    return Path(_KEPT[0].name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed at exit


def _build(found: tuple[Path, ...], place: Path) -> None:
    """Imports the files into a database that appears whole or not at all, and is one file that needs no other."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=".tmp")
    os.close(handle)
    try:
        made = Store(scratch)
        for path in found:
            report = transfer.absorb(made, sources.named_records(path))
            for problem in report.malformed:
                log.warning("shipped records %s: %s", path.name, problem)
        made.close()
        connection = sqlite.connect(sqlite.uri(Path(scratch), read_only=False))
        connection.execute("PRAGMA journal_mode=delete")
        connection.close()
        Path(scratch).replace(place)
    finally:
        Path(scratch).unlink(missing_ok=True)
