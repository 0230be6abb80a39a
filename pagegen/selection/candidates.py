"""What a stored portfolio is worth for a question: its grade and its distances. And where to ask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagegen import costs, targets
from pagegen.selection.grades import ARCH, EXACT, NEAR, OTHER_ARCH, workload_distance
from pagegen.spec import CacheLayout, Device, Target, Workload, check

if TYPE_CHECKING:
    from pagegen.db import Database
    from pagegen.db.leads import Lead

# Of a GPU's memory: drivers of one product were seen to differ by 0.4 %, products differ by a tenth at least.
SLIVER = 0.02
OTHER_DEVICE_DISTANCE = 0.5
OTHER_ORDER_DISTANCE = 1.0
# Further than any product of the arch at the same layout; layouts count beside it.
OTHER_ARCH_DISTANCE = 4.0


@dataclass
class Candidate:
    """A portfolio, judged. `batch_distance` is that of the nearest batch it was tuned on, 0 where none is asked for;
    `refused` says why it does not answer, where it was asked and does not."""

    lead: Lead
    grade: str
    place_distance: float
    batch_distance: float
    same_device: bool
    renamed: bool
    refused: str = ""

    @property
    def distance(self) -> float:
        """How far the evidence is from the question."""
        return self.place_distance + self.batch_distance


def candidate(
    lead: Lead, layout: CacheLayout, device: Device, workload: Workload | None, known: dict[str, float] | None = None
) -> Candidate | None:
    """The portfolio judged for a question; None where it cannot be read. `known` remembers how far profiles are from
    the workload: portfolios share them."""
    from pagegen.db.keys import device_identity
    from pagegen.db.queries import UNDECODABLE

    try:
        batch = 0.0 if workload is None else _nearest(lead, workload, {} if known is None else known)
        same = lead.device_identity == device_identity(device)
        renamed = not same and lead.target == device.target and alike(lead.device, device)
    except UNDECODABLE:
        return None
    apart = abs(math.log2(lead.layout.block_size / layout.block_size))
    place = apart + OTHER_ORDER_DISTANCE * (lead.layout.order != layout.order)
    if same or renamed:
        grade = EXACT if place == batch == 0 else NEAR
    elif lead.target == device.target:
        grade, place = ARCH, place + OTHER_DEVICE_DISTANCE
    else:
        grade, place = OTHER_ARCH, place + OTHER_ARCH_DISTANCE
    return Candidate(
        lead=lead, grade=grade, place_distance=place, batch_distance=batch, same_device=same or renamed, renamed=renamed
    )


def _nearest(lead: Lead, workload: Workload, known: dict[str, float]) -> float:
    """The distance of the nearest batch that a portfolio was tuned on."""
    stored = str(lead.row.profile)
    if stored not in known:
        known[stored] = min(workload_distance(load, workload) for load in lead.profile.workloads)
    return known[stored]


def alike(a: Device, b: Device) -> bool:
    """Whether two GPUs are one product told differently: alike in everything but the name, the rates and the sliver of
    memory that drivers reserve, and known well enough to tell. CPUs are not: what a vendor sells under many names
    differs in more than a device says."""
    from pagegen.db.keys import device_identity

    known = a.target.is_gpu and a.units > 0 and a.memory_gib > 0
    close = abs(a.memory_gib - b.memory_gib) <= SLIVER * max(a.memory_gib, b.memory_gib)
    as_b = replace(a, name=b.name, memory_gib=b.memory_gib)
    return known and close and device_identity(as_b) == device_identity(b)


def device_for(target: Target, device: Device | str | None = None) -> Device:
    """The device that is meant: `device`, or the product of the target's arch that it names; where nothing is said,
    this machine's, or the shipped one that stands for an absent GPU. Raises ValueError for a GPU arch that is neither
    here nor in the table, a name that is not one product of the arch, and a device of another target."""
    if isinstance(device, Device):
        if device.target != target:
            raise ValueError(f"device must be one of {target}, got {device.name} of {device.target}")
        return device
    named = None
    if device is not None:
        check.instance("device", device, str)
        named = costs.product(target, device)
    try:
        here = targets.current_device(target)
    except ValueError:  # the GPU is not in this machine
        return named or costs.shipped_device(target)
    return here if named is None or alike(here, named) else named


@contextmanager
def opened(db: Database | str | None) -> Iterator[Database]:
    """The database to ask: `db` itself, or the one at that place (None: the default), opened for reading."""
    from pagegen.db import Database, open_db

    if isinstance(db, Database):
        yield db
    else:
        with open_db(db, read_only=True) as found:
            yield found


@contextmanager
def kept_open(db: Database | str | None) -> Iterator[Database | str | None]:
    """The database opened once, and its files read at one moment, for all that one question asks of it. Where it cannot
    be opened `db` as it is, and whoever asks it says why."""
    with ExitStack() as stack:
        try:
            source = stack.enter_context(opened(db))
            stack.enter_context(source.snapshot())
        except Exception:  # whatever it is, it comes again where it is dealt with
            yield db
        else:
            yield source


def sentence(error: Exception) -> str:
    """The error's first line, with its kind where it is not the database's own, which may be terse."""
    ours = type(error).__module__ == "pagegen.db.errors"
    return check.first_line(error) if ours else check.class_and_line(error)
