"""The races of one part of a run, in the order in which they can be started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pagegen.spec.result import SEARCH
from pagegen_autotune.claims import Claims
from pagegen_autotune.executor import Race
from pagegen_autotune.ledger import Ledger


class Queue:
    """Races from an iterator that is asked for one when it can be started; None in it waits for all before.

    With `claims`, a race whose trials another tuner takes just now waits until that one is done or dead. Then the
    database is read again, and what is there is not measured.
    """

    def __init__(self, races: Iterator[Race | None], claims: Claims | None, ledger: Ledger) -> None:
        self._races = races
        self._claims = claims
        self._ledger = ledger
        self._waiting: list[tuple[Race, int]] = []  # with what the ledger had seen of others when it was asked for
        self._all_asked = self._paused = False

    @property
    def ended(self) -> bool:
        """Whether no race is left."""
        return self._all_asked and not self._waiting

    def next(self, busy: int) -> Race | None:
        """The next race to start, while `busy` run; None where there is none just now."""
        for waiting in list(self._waiting):
            free, left = self._claimed(*waiting)
            if free:
                self._waiting.remove(waiting)
            if left is not None:
                return left
        while not self._all_asked:
            if self._paused and (busy or self._waiting):
                return None
            self._paused = False
            try:
                asked = next(self._races)
            except StopIteration:
                self._all_asked = True
                return None
            if asked is None:
                self._paused = True
                continue
            seen = self._ledger.arrivals
            free, left = self._claimed(asked, seen)
            if left is not None:
                return left
            if not free:
                self._waiting.append((asked, seen))
        return None

    def _claimed(self, race: Race, seen: int) -> tuple[bool, Race | None]:
        """Whether nobody else is at a race, and what of it is left to do."""
        if self._claims is None:
            return True, race
        others = self._claims.take(race)
        if others is None:
            return False, None
        if others:
            self._ledger.refresh({layout for layout, _ in race.entries})
        left = self._left(race, seen)
        if left is None:
            self._claims.give_back(race)
        return True, left

    def _left(self, race: Race, seen: int) -> Race | None:
        """A race less what others measured since it was asked for: all of it, or rivals of the default in a search.
        Other purposes need all side by side, or nothing."""
        arrived = self._ledger.arrived(seen, race.workload, race.purpose)
        missing = tuple(entry for entry in race.entries if entry not in arrived)
        if race.purpose != SEARCH:
            return race if missing else None
        rivals = tuple(entry for entry in missing if entry not in race.essential)
        return replace(race, entries=(*race.essential, *rivals)) if rivals else None
