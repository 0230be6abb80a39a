"""A uniform sample of a simulation's steps, decode-only and mixed ones apart."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pagegen.spec import Workload
from pagegen_autotune.simulation import Step


class Snapshot(NamedTuple):
    """One step: its batch, and the tokens of the cache's sequences that another one has too."""

    load: Workload
    shared_tokens: int = 0


class Reservoir:
    """A uniform sample of at most `capacity` of the steps offered, each with the same chance.

    Skips ahead from pick to pick (Li, "Reservoir-sampling algorithms of time complexity O(n(1+log(N/n)))", TOMS 1994,
    algorithm L), so a run of equal steps costs nothing but its picks.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.items: list[Snapshot] = []
        self.offered = 0
        self._capacity = capacity
        self._random = random.Random(seed)
        self._acceptance = 1.0
        self._next = 0

    def offer(self, step: Step) -> None:
        """Takes in all the steps of one run."""
        while self._next < self.offered + step.count:
            self._keep(Snapshot(step.at(self._next - self.offered), step.shared_tokens))
            self._next += 1 + self._skip()
        self.offered += step.count

    def _keep(self, item: Snapshot) -> None:
        if len(self.items) < self._capacity:
            self.items.append(item)
        else:
            self.items[self._random.randrange(self._capacity)] = item

    def _skip(self) -> int:
        """How many of the next steps go by, 0 until the reservoir is full."""
        if len(self.items) < self._capacity:
            return 0
        self._acceptance *= math.exp(math.log(1.0 - self._random.random()) / self._capacity)
        return int(math.log(1.0 - self._random.random()) / math.log1p(-self._acceptance))


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """Steps drawn uniformly from the decode-only ones and from the others, with how many there were of each."""

    decode: tuple[Snapshot, ...]
    mixed: tuple[Snapshot, ...]
    decode_steps: int
    mixed_steps: int

    @property
    def steps(self) -> int:
        return self.decode_steps + self.mixed_steps

    @property
    def decode_share(self) -> float:
        """The share of decode-only steps."""
        return self.decode_steps / self.steps

    def groups(self) -> tuple[tuple[tuple[Snapshot, ...], float], ...]:
        """Each kind's snapshots and its share of the steps, kinds without a step left out."""
        shares = ((self.decode, self.decode_share), (self.mixed, 1.0 - self.decode_share))
        return tuple((snapshots, share) for snapshots, share in shares if snapshots)

    def weighted(self) -> list[tuple[Snapshot, float]]:
        """Every snapshot with the share of steps it stands for."""
        return [(one, share / len(snapshots)) for snapshots, share in self.groups() for one in snapshots]


def draw(steps: Iterable[Step], *, capacity: int, seed: int) -> Snapshots:
    """Runs through `steps` and keeps at most `capacity` of each kind."""
    decode, mixed = Reservoir(capacity, seed), Reservoir(capacity, seed + 1)
    for step in steps:
        (decode if max(step.query_lens) <= 1 else mixed).offer(step)
    return Snapshots(
        decode=tuple(decode.items),
        mixed=tuple(mixed.items),
        decode_steps=decode.offered,
        mixed_steps=mixed.offered,
    )
