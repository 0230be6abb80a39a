"""A tuner's leases: which races it measures just now, told to every other tuner of the same database."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagegen.spec import CacheLayout, Workload
from pagegen_autotune.executor import Race
from pagegen_autotune.patience import Asking

log = logging.getLogger(__name__)

# A dead tuner's races are free after so long; a living one renews its leases four times as often. A database that is
# out of reach for less costs nothing.
LEASE_S = 60.0
RENEWALS = 4


class LeaseStore(Protocol):
    """The part of `pagegen.db.Database` that leases use."""

    def lease(self, names: Sequence[str], *, holder: str, seconds: float, what: str) -> set[str] | None: ...

    def renew(self, *, holder: str, seconds: float) -> int: ...

    def holds(self, names: Sequence[str], *, holder: str) -> bool: ...

    def release(self, names: Sequence[str] | None = None, *, holder: str) -> int: ...


@dataclass(frozen=True)
class Lease:
    """The leases of one race. Its verbs belong into the transaction that stores the race: either its trials are there
    and its leases are given back, or neither."""

    store: LeaseStore
    names: tuple[str, ...]
    holder: str

    def holds(self) -> bool:
        """Whether no other tuner took it over, after this one was not heard of for too long."""
        return self.store.holds(self.names, holder=self.holder)

    def give_back(self) -> None:
        self.store.release(self.names, holder=self.holder)


class Heartbeat:
    """While entered, renews the leases of one tuner; at the end it gives back what is left of them. `holder` is its
    name, a new one each time: a tuner that is started again waits for what it leased before it was killed."""

    def __init__(self, store: LeaseStore) -> None:
        self.store = store
        self.seconds = LEASE_S
        self.holder = uuid.uuid4().hex
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pagegen leases", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        try:
            self.store.release(holder=self.holder)
        except RuntimeError as problem:  # a DatabaseError: they end by themselves
            log.warning("the leases of this run end in %.0f s: %s", self.seconds, problem)

    def _beat(self) -> None:
        while not self._over.wait(self.seconds / RENEWALS):
            try:
                self.store.renew(holder=self.holder, seconds=self.seconds)
            except RuntimeError as problem:  # a DatabaseError: whoever stores meets it, and waits for the database
                log.warning("leases could not be renewed: %s", problem)


class Claims:
    """The races of one device's run, leased as they are begun. `question` names what is measured of one layout on
    one workload, the same in every tuner that measures the same (see `Ledger.question`)."""

    def __init__(self, heartbeat: Heartbeat, question: Callable[[CacheLayout, Workload], str], asking: Asking) -> None:
        self._heartbeat = heartbeat
        self._question = question
        self._asking = asking

    def take(self, race: Race) -> set[str] | None:
        """Leases a race: None where another tuner is at it, else which of its leases another had before."""
        beat = self._heartbeat
        what = f"{race.purpose} of {len(race.entries)} variants on {race.workload.num_seqs} sequences"
        names = self.of(race).names
        return self._asking(lambda: beat.store.lease(names, holder=beat.holder, seconds=beat.seconds, what=what))

    def of(self, race: Race) -> Lease:
        """The leases of a race."""
        names = dict.fromkeys(self._question(layout, race.workload) for layout, _ in race.entries)
        return Lease(self._heartbeat.store, tuple(names), self._heartbeat.holder)

    def give_back(self, race: Race) -> None:
        """Gives the leases of a race back that is not to be measured."""
        self._asking(self.of(race).give_back)
