"""An executor over the equal devices of a Ray cluster: checks spread over them, races side by side, one a device."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagegen import targets
from pagegen.spec import AttentionSpec, CacheLayout, CompileFacts, Status, TritonVariant, Variant, check
from pagegen_autotune.executor import Entry, Race, Result
from pagegen_autotune.fleet.cluster import Cluster, Member
from pagegen_autotune.fleet.libraries import Library
from pagegen_autotune.fleet.station import Built, Unsound
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.known import facts_of
from pagegen_autotune.measure import Verdict
from pagegen_autotune.measured import TuneError

log = logging.getLogger(__name__)

# A kind without a device for so long gives up: a node that is started anew is back before.
WITHOUT_S = 120.0
# Work that was lost with so many stations is what loses them.
MAX_LOSSES = 3
_WAIT_S = 0.25


class RayExecutor:
    """The stations of one kind of device. `join` takes another one, from any thread; the rest belongs to the thread
    of the kind's run. What a lost station was at is done by another."""

    def __init__(
        self, cluster: Cluster, spec: AttentionSpec, first: Member, *, clock: Callable[[], float], stop: StopSignal
    ) -> None:
        self.regime = first.found.regime
        self.environment = dict(first.found.environment)
        self.device = first.device
        self.lost = 0
        self._cluster = cluster
        self._ray = cluster.ray
        self._spec = spec
        self._toolchain = first.found.toolchain
        self._clock = clock
        self._stop = stop
        self._joining: queue.SimpleQueue[Member] = queue.SimpleQueue()
        self._members: list[Member] = []
        self._idle: list[Member] = []
        self._racing: dict[Any, tuple[Member, Race]] = {}
        self._again: deque[Race] = deque()
        self._losses: dict[Race, int] = {}
        self._libraries: dict[Entry, Library] = {}
        self._facts: dict[tuple[CacheLayout, Variant, bool], CompileFacts] = {}
        self._builders: list[Any] | None = None
        self._since = time.monotonic()
        self.join(first)
        self._welcome()

    # --- who is there -------------------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """Another device of the kind."""
        self._joining.put(member)

    def _welcome(self) -> None:
        while not self._joining.empty():
            member = self._joining.get()
            self._members.append(member)
            self._idle.append(member)
        if self._members:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > WITHOUT_S:
            raise TuneError(
                f"all stations of {self.device.name} were lost, and none came back within {WITHOUT_S:.0f} s: what was "
                "measured is stored, run the same command again"
            )

    def _lose(self, member: Member, error: Exception) -> None:
        log.warning("lost a station of %s on %s: %s", self.device.name, member.found.host, _words(error))
        self.lost += 1
        self._members.remove(member)
        if isinstance(error, Unsound):
            self._cluster.retire(member, _words(error))
        else:
            self._cluster.lost(member)

    @property
    def workers(self) -> int:
        self._welcome()
        return max(1, sum(member.found.workers for member in self._members))

    @property
    def free(self) -> int:
        self._welcome()
        return max(0, len(self._idle) - len(self._again))

    @property
    def busy(self) -> int:
        return len(self._racing) + len(self._again)

    @property
    def stations(self) -> int:
        """How many devices of the kind are there just now."""
        return len(self._members)

    # --- races --------------------------------------------------------------------------------------------------------

    def start(self, race: Race) -> None:
        """Sends a race to an idle station, with the compiled kernels that it lacks."""
        self._again.append(race)
        self._send()

    def _send(self) -> None:
        while self._again and self._idle:
            race, member = self._again.popleft(), self._idle.pop()
            left_s = race.until - self._clock()
            self._racing[member.actor.race.remote(race, left_s, self._lacking(member, race.entries))] = (member, race)

    def ended(self, wait_s: float) -> list[Result]:
        """The races that ended; those whose station was lost meanwhile begin anew elsewhere."""
        self._welcome()
        self._send()
        if not self._racing:
            time.sleep(wait_s)
            return []
        ready, _ = self._ray.wait(list(self._racing), num_returns=1, timeout=wait_s)
        found: list[Result] = []
        for reference in ready:
            member, race = self._racing.pop(reference)
            try:
                found.append((race, self._ray.get(reference)))
                self._idle.append(member)
            except (self._ray.exceptions.RayError, Unsound) as error:
                self._lose(member, error)
                self._again.appendleft(race)
                self._count(race, error)
        return found

    def _count(self, race: Race, error: Exception) -> None:
        self._losses[race] = self._losses.get(race, 0) + (not isinstance(error, Unsound))
        if self._losses[race] >= MAX_LOSSES:
            names = ", ".join(variant.name for _, variant in race.entries)
            raise TuneError(f"{MAX_LOSSES} stations of {self.device.name} were lost timing {names}: {_words(error)}")

    def _lacking(self, member: Member, entries: Sequence[Entry]) -> list[Library]:
        """The libraries of entries that a station has not got yet, from now on known to have."""
        new = [entry for entry in entries if entry in self._libraries and entry not in member.has]
        member.has.update(new)
        return [self._libraries[entry] for entry in new]

    # --- checks -------------------------------------------------------------------------------------------------------

    def check(self, layout: CacheLayout, variants: Sequence[Variant]) -> dict[Variant, Verdict]:
        """Compiles variants on spare CPUs of the cluster, where there are any, then has the stations check them, each
        its part."""
        found = self._compiled(layout, variants)
        waiting = deque(v for v in variants if v not in found)
        losses: Counter[Variant] = Counter()
        running: dict[Any, tuple[Member, list[Variant]]] = {}
        while waiting or running:
            self._stop.check()
            self._welcome()
            while waiting and self._idle:
                member = self._idle.pop()
                part = self._part(member, waiting, losses)
                given = self._lacking(member, [(layout, v) for v in part])
                running[member.actor.check.remote(layout, part, given)] = (member, part)
            for reference in self._ready(running):
                member, part = running.pop(reference)
                try:
                    verdicts, made = self._ray.get(reference)
                except (self._ray.exceptions.RayError, Unsound) as error:
                    self._lose(member, error)
                    losses.update(() if isinstance(error, Unsound) else part)
                    waiting += [v for v in part if losses[v] < MAX_LOSSES]
                    detail = f"{MAX_LOSSES} stations were lost with it: {_words(error)}"
                    gone = Verdict(status=Status.RUNTIME_ERROR, detail=detail)
                    found |= {v: gone for v in part if losses[v] >= MAX_LOSSES}
                else:
                    self._idle.append(member)
                    found |= verdicts
                    self._libraries |= {(layout, variant): library for variant, library in made.items()}
                    member.has.update((layout, variant) for variant in made)
        return {variant: found[variant] for variant in variants}

    def _part(self, member: Member, waiting: deque[Variant], losses: Counter[Variant]) -> list[Variant]:
        """What a station is given of the variants that wait: an even part, and no more than it compiles side by side.
        One that a station was lost with goes alone: it costs only itself."""
        many = max(1, min(member.found.workers, -(-len(waiting) // (len(self._idle) + 1))))
        part = [waiting.popleft()]
        while waiting and len(part) < many and not losses[part[0]] and not losses[waiting[0]]:
            part.append(waiting.popleft())
        return part

    def _ready(self, running: Mapping[Any, Any]) -> list[Any]:
        """The references of what has ended, after a while at most."""
        if not running:
            time.sleep(_WAIT_S)
            return []
        ready, _ = self._ray.wait(list(running), num_returns=1, timeout=_WAIT_S)
        return list(ready)

    def _compiled(self, layout: CacheLayout, variants: Sequence[Variant]) -> dict[Variant, Verdict]:
        """The failures of the variants that do not compile; of the others their libraries, or the compiler's facts."""
        if self._builders is None:
            self._builders = self._cluster.builders(self.device, self._toolchain)
        failed: dict[Variant, Verdict] = {}
        waiting, idle = deque(variants), list(self._builders)
        running: dict[Any, tuple[Any, Variant]] = {}
        while (waiting and idle) or running:
            self._stop.check()
            while waiting and idle:
                actor, variant = idle.pop(), waiting.popleft()
                running[actor.build.remote(layout, variant)] = (actor, variant)
            for reference in self._ready(running):
                actor, variant = running.pop(reference)
                try:
                    self._take(layout, variant, self._ray.get(reference), failed)
                    idle.append(actor)
                except self._ray.exceptions.RayError as error:  # the station compiles it
                    log.warning("lost a compiler for %s: %s", self.device.name, _words(error))
                    self._builders.remove(actor)
        return failed

    def _take(self, layout: CacheLayout, variant: Variant, built: Built, failed: dict[Variant, Verdict]) -> None:
        if built.verdict is not None:
            failed[variant] = built.verdict
        if built.library is not None:
            self._libraries[layout, variant] = built.library
        for decode, told in built.facts.items():
            assert isinstance(variant, TritonVariant)
            target = self.device.target
            self._facts[layout, variant, decode] = facts_of(
                told, self._spec, layout, variant, target, decode=decode, code_hash=targets.code_hash(target)
            )

    def facts(self, layout: CacheLayout, variant: Variant, *, decode: bool) -> CompileFacts | None:
        """What the compiler made of a variant: known from when it was compiled, or asked of a station."""
        known = self._facts.get((layout, variant, decode))
        if known is not None:
            return known
        self._welcome()
        while self._idle:
            member = self._idle[-1]
            try:
                found: CompileFacts | None = self._ray.get(member.actor.facts.remote(layout, variant, decode))
                return found
            except self._ray.exceptions.RayError as error:
                self._idle.pop()
                self._lose(member, error)
        return None

    def close(self) -> None:
        """Ends the stations and compilers of the kind; what they are at is lost."""
        while not self._joining.empty():
            self._members.append(self._joining.get())
        for member in self._members:
            self._cluster.retire(member)
        for actor in self._builders or ():
            self._ray.kill(actor)


def _words(error: Exception) -> str:
    """An error in one line: of one that was raised in a station, what was raised there."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return check.class_and_line(cause)
    return check.first_line(error)
