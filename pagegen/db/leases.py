"""Leases: of several tuners that share a database, one at a time measures a thing, and one that died is not waited for.

A lease is a row: a name (the digest of what is leased), its holder, and when it ends by the database's clock. On
PostgreSQL that is the server's, asked anew in every statement (`clock_timestamp`, since `now()` is the beginning of a
transaction that may have waited for others). SQLite has no server: its clock is that of the host that runs the
statement, the same for all tuners of one host; hosts that share a file must agree to well within a lease's length.

A lease that was given back, or that ended, keeps its row for a while: the next holder learns whether another one was
there before, and only then looks for what that one stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from pagegen.db.engine import Store
from pagegen.db.schema import leases
from pagegen.spec import check

# How long a row is kept after its lease ended. Who comes later reads what is stored anyway.
KEPT_S = 7 * 86400.0
MAX_NAME = 64
GIVEN_BACK = ""  # in place of what is leased
_CLOCK = {
    "postgresql": "extract(epoch from clock_timestamp())",
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",  # to the millisecond; 2440587.5 is 1970
}


class _Taken(Exception):
    """One of the names is leased to another: the transaction is rolled back."""


def take(store: Store, names: Sequence[str], *, holder: str, seconds: float, what: str) -> set[str] | None:
    """Leases all of `names` to `holder` for `seconds` from now, or none of them: None where another holds one.

    Returns the names that another held before, whose lease was given back or ended. Leasing again what one holds
    prolongs it. `what` says for people what is leased. Raises ValueError for names, words or seconds that are none.
    """
    _checked(names, holder, seconds)
    check.text("what", what, empty=False)
    others: set[str] = set()
    try:
        with store.writing() as connection:
            now = _now(connection)
            for name in sorted(set(names)):  # in one order, so that two who take the same names do not block each other
                before = connection.execute(sa.select(leases.c.holder).where(leases.c.name == name)).scalar()
                row = {"name": name, "holder": holder, "expires_at": now + seconds, "what": what}
                if connection.execute(_insert_or_take_over(connection, row, now)).rowcount != 1:
                    raise _Taken
                if before not in (None, holder):
                    others.add(name)
    except _Taken:
        return None
    return others


def renew(store: Store, *, holder: str, seconds: float) -> int:
    """Prolongs all leases of a holder to `seconds` from now, those included that ended and that nobody took; returns
    how many there are. Rows that ended long ago go."""
    _checked((), holder, seconds)
    with store.writing() as connection:
        now = _now(connection)
        connection.execute(leases.delete().where(leases.c.expires_at < now - KEPT_S))
        mine = leases.update().where(leases.c.holder == holder, leases.c.what != GIVEN_BACK)
        return int(connection.execute(mine.values(expires_at=now + seconds)).rowcount)


def holds(store: Store, names: Iterable[str], *, holder: str) -> bool:
    """Whether all of `names` are still `holder`'s: nobody took one over when its time had ended. It stays true until
    the end of the write transaction that this is asked in."""
    wanted = set(names)
    with store.writing() as connection:
        mine = sa.select(leases.c.name).where(
            leases.c.name.in_(wanted), leases.c.holder == holder, leases.c.what != GIVEN_BACK
        )
        return set(connection.execute(mine.with_for_update()).scalars()) == wanted


def release(store: Store, names: Iterable[str] | None = None, *, holder: str) -> int:
    """Gives leases of a holder back, all of them where no names are given; returns how many."""
    with store.writing() as connection:
        mine = leases.update().where(leases.c.holder == holder, leases.c.what != GIVEN_BACK)
        if names is not None:
            mine = mine.where(leases.c.name.in_(set(names)))
        ended = mine.values(what=GIVEN_BACK, expires_at=_now(connection))
        return int(connection.execute(ended).rowcount)


def held(store: Store) -> list[dict[str, Any]]:
    """The leases that are in force: what is leased, to whom, and the seconds that are left."""
    with store.reading() as connection:
        now = _now(connection)
        rows = connection.execute(sa.select(leases).where(leases.c.expires_at > now).order_by(leases.c.name))
        return [
            {"what": row.what, "holder": row.holder, "seconds_left": row.expires_at - now, "name": row.name}
            for row in rows
        ]


def _checked(names: Sequence[str], holder: str, seconds: float) -> None:
    if not check.number("seconds", seconds) > 0:
        raise ValueError(f"seconds of a lease must be positive, got {seconds!r}")
    for what, text in (*(("name", name) for name in names), ("holder", holder)):
        if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME:
            raise ValueError(f"{what} of a lease must be text of 1 to {MAX_NAME} characters, got {text!r}")


def _now(connection: sa.Connection) -> float:
    return float(connection.execute(sa.select(sa.literal_column(_CLOCK[connection.dialect.name]))).scalar_one())


def _insert_or_take_over(connection: sa.Connection, row: dict[str, Any], now: float) -> Any:
    """An insert that takes over what has ended or is the holder's own; one row where it did, else none."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    mine = sa.or_(leases.c.expires_at <= now, leases.c.holder == row["holder"])
    changes = {name: value for name, value in row.items() if name != "name"}
    statement = insert(leases).values(row).on_conflict_do_update(index_elements=["name"], set_=changes, where=mine)
    return statement.inline().execution_options(preserve_rowcount=True)
