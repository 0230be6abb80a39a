"""Files that people name for output: written whole or not at all, and never over a database."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from pagegen.db import sqlite


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file to write that appears at `path` whole or not at all; links are followed, and a pipe or a device is
    written as it is. Text that is no UTF-8 is escaped. Raises ValueError where a database lies at `path`."""
    path = path.resolve()
    if sqlite.is_part_of_a_database(path):
        raise ValueError(f"{path} is a database, or belongs to one, and would be overwritten: name another file")
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    scratch = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        # made by open itself, so that the user's umask decides who may read it
        with scratch.open("x", encoding="utf-8", errors="backslashreplace") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            scratch.chmod(path.stat().st_mode & 0o7777)
        scratch.replace(path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise
