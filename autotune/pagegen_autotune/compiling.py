"""Compiling for a GPU that is not here, in worker processes side by side: a compiler that hangs, aborts or takes the
memory costs that candidate only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pagegen.spec import AttentionSpec, CacheLayout, Device, Profile, Status, Target, TritonVariant, Variant
from pagegen.targets import cpp_build, offline
from pagegen_autotune.isolated import IsolatedBench, WorkerLost
from pagegen_autotune.measure import CandidateFailed, classify

# A kernel takes a second; ptxas may take a minute over one that spills thousands of registers.
COMPILE_LIMIT_S = 60.0
# Each holds torch and Triton, some 700 MB.
MAX_WORKERS = 16
# How often a caller that waits is asked whether to go on.
_ASK_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kernel to compile: a variant's for decode, or for batches with longer queries."""

    layout: CacheLayout
    variant: Variant
    decode: bool


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What came of a task: the facts where `status` is OK, else the failure class and one line on what happened."""

    status: Status
    facts: offline.ResourceFacts | None = None
    detail: str = ""


class KernelCompiler:
    """What compiles in a worker process; it answers what `pagegen_autotune.worker` asks of a bench, less the timing."""

    regime = ""
    workers = 1

    def __init__(self, spec: AttentionSpec, target: Target, device: Device, profile: Profile, *, seed: int) -> None:
        self.environment: dict[str, str] = {}
        self._spec = spec
        self._target = target

    def compile(self, layout: CacheLayout, variant: Variant, decode: bool) -> offline.ResourceFacts:
        """Compiles one kernel. Raises CompileError."""
        assert isinstance(variant, TritonVariant)  # the family of every GPU target
        return offline.compile_facts(self._spec, layout, variant, self._target, decode=decode)


def quiet_compiler(*arguments: Any, **options: Any) -> KernelCompiler:
    """A KernelCompiler for a process of its own: what LLVM prints of a candidate that it refuses goes nowhere."""
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  a device and not a path
        os.dup2(nowhere.fileno(), 2)
    return KernelCompiler(*arguments, **options)


class CompilerProcess(IsolatedBench):
    """A KernelCompiler (or what `make` makes) in a process of its own, replaced when it is lost."""

    def kill(self) -> None:
        """Ends the process from another thread than the one that waits for its answer."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def compile(self, task: Task) -> Compiled:
        """What comes of a task; never raises for a candidate."""
        try:
            facts = self._ask("compile", (task.layout, task.variant, task.decode), self._check_limit_s)
        except (CandidateFailed, WorkerLost) as error:
            return Compiled(status=error.status, detail=error.detail)
        return Compiled(status=Status.OK, facts=facts)


class Compilers:
    """As many compilers as there are CPUs to use, started when first needed.

    Score and mask functions are known to this process alone: kernels with one are compiled in it, one at a time and
    without a time limit. `make` must be importable by its name.
    """

    def __init__(
        self, spec: AttentionSpec, device: Device, profile: Profile, *, make: Callable[..., Any] = quiet_compiler,
        workers: int | None = None, limit_s: float = COMPILE_LIMIT_S,
    ) -> None:  # fmt: skip
        self.workers = min(MAX_WORKERS, cpp_build.workers()) if workers is None else workers
        self._made_by = spec, device.target, device, profile
        self._options: dict[str, Any] = {"seed": 0, "make": make, "check_limit_s": limit_s}
        self._here = spec.score_mod is not None or spec.mask_mod is not None
        self._lock = threading.Lock()
        self._idle: list[CompilerProcess] = []
        self._all: list[CompilerProcess] = []
        self._closed = False
        self._threads = ThreadPoolExecutor(1 if self._here else self.workers)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, kind: object, error: object, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers, whatever they do; what was not begun is not compiled."""
        with self._lock:
            self._closed = True
            running = list(self._all)
        for process in running:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in running:
            process.close()

    def run(self, tasks: Sequence[Task], may_go_on: Callable[[], bool]) -> Iterator[tuple[Task, Compiled]]:
        """Each task with what came of it, in the order in which they end. `may_go_on` is asked before each is begun and
        while waiting: when it says no, those that were not begun are left out; what it raises ends the run."""
        left = list(reversed(tasks))
        running: dict[Future[Compiled], Task] = {}
        while left or running:
            going_on = may_go_on()
            while going_on and left and len(running) < self.workers:
                task = left.pop()
                running[self._threads.submit(self._compile, task)] = task
            if not running:
                return
            done, _ = wait(running, timeout=_ASK_S, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()

    def _compile(self, task: Task) -> Compiled:
        if self._here:
            return _compiled_here(KernelCompiler(*self._made_by, seed=0), task)
        process = self._taken()
        try:
            return process.compile(task)
        finally:
            with self._lock:
                self._idle.append(process)

    def _taken(self) -> CompilerProcess:
        """A worker that nobody uses, a new one where there is none. Raises WorkerLost where it does not start."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        process = CompilerProcess(*self._made_by, **self._options)
        with self._lock:
            if self._closed:
                process.close()
                raise WorkerLost(Status.RUNTIME_ERROR, "the compilers were closed")
            self._all.append(process)
        return process


def _compiled_here(compiler: KernelCompiler, task: Task) -> Compiled:
    try:
        return Compiled(status=Status.OK, facts=compiler.compile(task.layout, task.variant, task.decode))
    except Exception as error:  # a candidate may fail in any way: its failure is its result
        status, detail = classify(error)
        return Compiled(status=status, detail=detail)
