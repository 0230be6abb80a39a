"""Dates of records, which are texts in ISO 8601 and UTC that sort as times do; against the clock of this machine."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

# Clocks of a fleet differ by less.
TOLERANCE = timedelta(hours=1)
_SECOND = "%Y-%m-%dT%H:%M:%S"


def now() -> str:
    """The present moment."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def is_ahead(created_at: str) -> bool:
    """Whether a record's date lies ahead of this machine's clock."""
    return created_at > (datetime.now(timezone.utc) + TOLERANCE).strftime(_SECOND)


def after(created_at: str) -> str:
    """A date that sorts after another, however exact that is: a minute later. The other itself where there is none, at
    the end of 9999."""
    numbers = [int(number) for number in re.findall("[0-9]+", created_at)[:6]]
    year, month, day, hour, minute, second = numbers + [1, 1, 1, 0, 0, 0][len(numbers) :]
    try:
        later = datetime(year, month, min(day, 28), hour, minute, second) + timedelta(
            days=day - min(day, 28), minutes=1
        )
    except (ValueError, OverflowError):
        return created_at
    return f"{later.strftime(_SECOND)}+00:00"
