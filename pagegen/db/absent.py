"""A database that is not there, where questions are answered by what ships."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from pagegen.db import places
from pagegen.db.engine import Store
from pagegen.db.errors import MissingDatabase


class Absent(Store):
    """A database that is not there, opened for reading: it has a place and a name, and every look into it raises the
    MissingDatabase that opening it did."""

    def __init__(self, url: str | os.PathLike[str], error: MissingDatabase) -> None:
        place = places.place_of(url)
        self.path, self.name, self.read_only = place.path, place.name, True
        self._active = threading.local()
        self._error = error

    @contextmanager
    def _transaction(self, *, write: bool, keep: bool = False) -> Iterator[sa.Connection]:
        raise self._error
        yield

    def release(self) -> None:
        """There is nothing to release."""

    close = leave = release
