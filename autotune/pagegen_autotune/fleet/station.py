"""What a node of a cluster does: measures on its one device, or compiles. Plain classes, which know nothing of Ray."""

from __future__ import annotations

import importlib.metadata
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pagegen import targets
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CompileFacts,
    CppVariant,
    Device,
    Profile,
    Status,
    Target,
    Variant,
    check,
)
from pagegen.targets import cpp_build
from pagegen.targets.errors import CompileError
from pagegen_autotune import executor
from pagegen_autotune.compiling import COMPILE_LIMIT_S, CompilerProcess, Task, quiet_compiler
from pagegen_autotune.executor import Entry, Race
from pagegen_autotune.faults import MachineFault
from pagegen_autotune.fleet import libraries
from pagegen_autotune.fleet.libraries import Library
from pagegen_autotune.isolated import IsolatedBench, WorkerLost
from pagegen_autotune.measure import Bench, Verdict, classify
from pagegen_autotune.rounds import Rounds


class Unsound(RuntimeError):
    """A node that is not to be used any more: the default variant fails on it that passed on another of its kind, so
    that nothing it measures counts, or nothing can be compiled on it."""


def device_here(gpu: bool) -> Device:
    """The GPU that this process was given, or the CPU. Raises ValueError where torch sees no such GPU."""
    if gpu and not torch.cuda.is_available():
        raise ValueError("the node offers a GPU that torch does not see")
    target = Target.current() if gpu else Target("cpu")
    if gpu and not target.is_gpu:
        raise ValueError(f"the node offers a GPU, and PAGEGEN_TARGET names {target}")
    return targets.current_device(target)


@dataclass(frozen=True)
class Kit:
    """What stations work with: how a node tells its device, how a bench is made, and what of it other stations can use,
    by functions that every node can import. Tests give others."""

    look: Callable[[bool], Device] = device_here
    make: Callable[..., Bench] = IsolatedBench
    share: Callable[[AttentionSpec, CacheLayout, Sequence[Variant]], dict[Variant, Library]] = libraries.of


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a node tells of itself. `unfit` says why it cannot be used, "" where it can; then the rest is known."""

    host: str
    unfit: str = ""
    device: Device | None = None
    regime: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: int = 1
    toolchain: str = ""


class Station:
    """One device, and the bench on it, which times only what it has itself found right. Races that were lost with
    another station may come to it; `expected` is the hash of the templates that the tuner knows, by target."""

    def __init__(
        self, spec: AttentionSpec, profile: Profile, *, gpu: bool, seed: int, kit: Kit, expected: Mapping[str, str]
    ) -> None:
        self._spec = spec
        self._profile = profile
        self._gpu = gpu
        self._seed = seed
        self._kit = kit
        self._expected = expected
        self._bench: Bench | None = None
        self._verdicts: dict[Entry, Verdict] = {}

    def describe(self) -> Found:
        """Looks at the device and starts the bench."""
        host = socket.gethostname()
        try:
            device = self._kit.look(self._gpu)
            target = device.target
            here = targets.code_hash(target)
            if self._expected.get(target.family, here) != here:
                return Found(host=host, unfit="its templates are not the tuner's: install the same pagegen everywhere")
            reason = targets.unsupported(self._spec, target)
            if reason is not None:
                return Found(host=host, unfit=f"no generated kernel serves the spec on {target}: {reason}")
            bench = self._kit.make(self._spec, target, device, self._profile, seed=self._seed)
        except (ValueError, RuntimeError, OSError) as error:
            return Found(host=host, unfit=check.class_and_line(error))
        self._bench = bench
        return Found(
            host=host, device=device, regime=bench.regime, environment=dict(bench.environment), workers=bench.workers,
            toolchain=toolchain(target),
        )  # fmt: skip

    def check(
        self, layout: CacheLayout, variants: Sequence[Variant], given: Sequence[Library]
    ) -> tuple[dict[Variant, Verdict], dict[Variant, Library]]:
        """Compiles variants, or takes compiled ones that were `given`, and compares what they compute with the
        reference; with the verdicts, the libraries of those that passed, for other stations. Raises Unsound."""
        libraries.adopt(given)
        bench = self._ready()
        found: dict[Variant, Verdict] = {}
        for first in range(0, len(variants), bench.workers):
            try:
                found |= bench.check(layout, list(variants[first : first + bench.workers]))
            except MachineFault as fault:
                raise Unsound(str(fault)) from fault
        self._verdicts |= {(layout, variant): verdict for variant, verdict in found.items()}
        passed = [v for v, verdict in found.items() if verdict.status is Status.OK]
        return found, self._kit.share(self._spec, layout, passed)

    def race(self, race: Race, left_s: float, given: Sequence[Library]) -> Rounds[Entry]:
        """Runs a race, with no further round after `left_s` seconds from now. What this station has not checked it
        checks before. Raises Unsound."""
        end = time.monotonic() + left_s
        rounds: Rounds[Entry] = Rounds()
        for layout in dict.fromkeys(layout for layout, _ in race.entries):
            new = [v for where, v in race.entries if where == layout and (layout, v) not in self._verdicts]
            if new:
                self.check(layout, new, given)
        bad = {e: v for e in race.entries if (v := self._verdicts[e]).status is not Status.OK}
        for entry in race.essential:
            if entry in bad:
                raise Unsound(f"the default variant failed here and passed elsewhere: {bad[entry].detail}")
        rounds.failures.update({entry: (verdict.status, verdict.detail) for entry, verdict in bad.items()})
        sound = tuple(entry for entry in race.entries if entry not in bad)
        try:
            executor.run(race, sound, self._ready(), rounds, more=lambda: time.monotonic() < end)
        except MachineFault as fault:
            raise Unsound(str(fault)) from fault
        return rounds

    def facts(self, layout: CacheLayout, variant: Variant, decode: bool) -> CompileFacts | None:
        """What the compiler made of a variant."""
        return self._ready().facts(layout, variant, decode=decode)

    def _ready(self) -> Bench:
        if self._bench is None:
            raise RuntimeError("describe must be called first")
        return self._bench


def toolchain(target: Target) -> str:
    """What decides whether a kernel that one node compiled is the one that another would compile."""
    if target.kind == "cpu":
        try:
            return cpp_build.toolchain()
        except CompileError:
            return ""
    try:
        return f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Built:
    """What came of compiling a variant: the failure that it ends with, or its library and the compiler's facts."""

    verdict: Verdict | None = None
    library: Library | None = None
    facts: Mapping[bool, Any] = field(default_factory=dict)  # decode -> offline.ResourceFacts


class Builder:
    """Compiles candidates for a device that may be elsewhere, on one CPU."""

    def __init__(self, spec: AttentionSpec, device: Device, profile: Profile) -> None:
        self._spec = spec
        self._device = device
        self._profile = profile
        self._process: CompilerProcess | None = None

    def toolchain(self) -> str:
        """See `toolchain`; "" where nothing can be compiled for the device here."""
        return toolchain(self._device.target)

    def build(self, layout: CacheLayout, variant: Variant) -> Built:
        """Compiles a variant: for a CPU into a library, for a GPU to see that it compiles and what its code takes.
        Raises MachineFault where this node can compile nothing."""
        if isinstance(variant, CppVariant):
            try:
                return Built(library=libraries.built(self._spec, layout, variant))
            except (CompileError, OSError) as error:
                status, detail = classify(error)
                return Built(verdict=Verdict(status=status, detail=detail))
        facts = {}
        for decode in (True, False):
            try:
                compiled = self._compiler().compile(Task(layout=layout, variant=variant, decode=decode))
            except WorkerLost:  # no process starts here: the device compiles it
                return Built()
            if compiled.facts is None:
                return Built(verdict=Verdict(status=compiled.status, detail=compiled.detail))
            facts[decode] = compiled.facts
        return Built(facts=facts)

    def _compiler(self) -> CompilerProcess:
        if self._process is None:
            self._process = CompilerProcess(
                self._spec, self._device.target, self._device, self._profile, seed=0, make=quiet_compiler,  # type: ignore[arg-type]
                check_limit_s=COMPILE_LIMIT_S,
            )  # fmt: skip
        return self._process
