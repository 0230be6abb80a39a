"""Where a database may be: the one place that decides what a path or URL means, and how it is told to people."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pagegen.db.errors import BadPlace

EXPECTED = "url must be a path, sqlite:///PATH or postgresql://..."
# What begins so means a URL, and a misspelt one must not become a file of that name.
_SCHEME = re.compile(r"(?:file|sqlite|postgres|postgresql)(?:\+\w+)?:", re.IGNORECASE)
_SECRETS = (
    (re.compile(r"(://[^:/@?#]*):.*@", re.DOTALL), r"\1:***@"),
    (re.compile(r"((?:password|passwd|passfile|sslpassword|sslkey)=)[^&\s]*", re.IGNORECASE), r"\1***"),
)
_DRIVERS = ("postgresql", "postgresql+psycopg")


@dataclass(frozen=True)
class Place:
    """One database: the file of SQLite (`path`, links followed), or a server's URL (`url`). `name` tells it to people,
    without a password."""

    name: str
    path: Path | None = None
    url: sa.URL | None = field(default=None, repr=False)


def place_of(url: str | os.PathLike[str]) -> Place:
    """The database that a path or a URL names. Raises TypeError for what is neither, BadPlace for what names none: an
    in-memory database, a database that is neither SQLite nor PostgreSQL, a URL or a name that cannot be."""
    if not isinstance(url, (str, os.PathLike)) or not isinstance(text := os.fspath(url), str):
        raise TypeError(f"{EXPECTED}, got {type(url).__name__} {url!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadPlace(f"{EXPECTED} in UTF-8, got {text!r}") from None
    if not text.strip() or text == ":memory:" or "\0" in text:
        raise BadPlace(f"{EXPECTED}, got {text!r}: a tuning database lives in a file")
    if "://" in text:
        return _of_url(text)
    if _SCHEME.match(text):
        raise BadPlace(f"{EXPECTED}, got {masked(text)!r}: a URL has :// and a file of that name needs ./ before it")
    return _of_file(text)


def _of_file(text: str) -> Place:
    try:
        # links are followed once, here: SQLite keeps a log beside the file itself, and that folder decides
        path = Path(text).expanduser().resolve()
    except (RuntimeError, OSError) as error:  # no such user, a circle of links, a name that is too long
        raise BadPlace(f"{EXPECTED}, got {text[:200]!r} ({error})") from error
    return Place(str(path), path=path)


def _of_url(text: str) -> Place:
    try:
        parsed = sa.engine.make_url(text)
        backend = parsed.get_backend_name()
    except (SQLAlchemyError, ValueError):  # ValueError: a port that is no number; its text holds the URL
        raise BadPlace(f"{EXPECTED}, got {masked(text)!r}") from None
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise BadPlace(f"url must name a file, got {text!r}: a tuning database lives in a file")
        if parsed.drivername != "sqlite" or parsed.query or str(parsed.database).startswith("file:"):
            raise BadPlace(f"url must be sqlite:///PATH without a driver or options, got {text!r}")
        return _of_file(str(parsed.database))
    if parsed.drivername not in _DRIVERS:
        raise BadPlace(f"{EXPECTED}, got {masked(text)!r}")
    return Place(masked(text), url=parsed.set(drivername="postgresql+psycopg"))


def masked(url: str) -> str:
    """A URL, well-formed or not, without its passwords."""
    for secret, shown in _SECRETS:
        url = secret.sub(shown, url)
    return url
