"""A bench in a process of its own: a candidate that hangs, aborts or takes the memory costs that candidate only."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from pagegen import settings, targets
from pagegen.spec import AttentionSpec, CacheLayout, CompileFacts, Device, Profile, Status, Target, Variant, Workload
from pagegen_autotune import known
from pagegen_autotune.faults import MachineFault
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.measure import Bench, CandidateFailed, KernelBench, Verdict

# A check compiles (the C++ compiler is given 120 s, a Triton kernel takes seconds) and runs two batches; a sample runs
# for milliseconds, at most a second or two where a long prefill meets a slow kernel.
_START_LIMIT_S, CHECK_LIMIT_S, SAMPLE_LIMIT_S = 300.0, 180.0, 30.0
# Once a stop is requested: how long the worker may go on with what it does, and how often the request is looked at.
_GRACE_S, _LOOK_S = 2.0, 0.2
_ENDING_S = 10.0  # from its closed connection to the end of a process
_PROGRAM = "import sys; sys.path[:] = {path!r}; from pagegen_autotune.worker import main; main({descriptor})"


class WorkerLost(RuntimeError):
    """The worker ended or did not answer in time: the failure class, and what is known."""

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class IsolatedBench:
    """`make(spec, target, device, profile, seed=seed)`, a bench, in a worker process that is replaced when it is lost.

    `make` must be importable by its name. Results are those of the bench; besides, a variant that takes longer than
    `check_limit_s` or `sample_limit_s` has `Status.TIMEOUT`, one whose process is killed for memory `RESOURCE_LIMIT`,
    one whose process ends otherwise `RUNTIME_ERROR`. On a GPU the process is replaced after every runtime error, since
    errors of CUDA stick to a process. Raises WorkerLost where the worker does not even start, and KeyboardInterrupt
    where it does not answer soon after `stop` was requested: a compiler or a hang must not hold up the end.
    """

    def __init__(
        self, spec: AttentionSpec, target: Target, device: Device, profile: Profile, *, seed: int,
        make: Callable[..., Bench] = KernelBench, check_limit_s: float = CHECK_LIMIT_S,
        sample_limit_s: float = SAMPLE_LIMIT_S, stop: StopSignal | None = None,
    ) -> None:  # fmt: skip
        self._made_by = make, (spec, target, device, profile), {"seed": seed}
        self._sticky = target.is_gpu
        self._check_limit_s = check_limit_s
        self._sample_limit_s = sample_limit_s
        self._stop = stop or StopSignal()
        self._process: subprocess.Popen[bytes] | None = None
        self.regime, self.environment, self.workers = self._start()

    def __enter__(self) -> IsolatedBench:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker, whatever it does."""
        if self._process is None:
            return
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its compilers too
        self._process.wait()
        self._process = None

    def check(self, layout: CacheLayout, variants: Sequence[Variant]) -> dict[Variant, Verdict]:
        """Compiles `variants` side by side, then checks each. Where that costs the worker, each is tried alone."""
        if not variants:
            return {}
        limit_s = self._check_limit_s * -(-len(variants) // self.workers)
        try:
            found: dict[Variant, Verdict] = self._ask("check", (layout, list(variants)), limit_s)
        except (CandidateFailed, WorkerLost) as error:
            if len(variants) > 1:
                return {v: verdict for variant in variants for v, verdict in self.check(layout, [variant]).items()}
            return {variants[0]: Verdict(status=error.status, detail=error.detail)}
        if any(verdict.status is Status.RUNTIME_ERROR for verdict in found.values()):
            self._replace_if_sticky()
        return found

    def sample(self, layout: CacheLayout, variant: Variant, workload: Workload) -> float:
        """Microseconds of one call. Raises CandidateFailed."""
        try:
            return float(self._ask("sample", (layout, variant, workload), self._sample_limit_s))
        except WorkerLost as error:
            raise CandidateFailed(error.status, error.detail) from error
        except CandidateFailed as error:
            if error.status is Status.RUNTIME_ERROR:
                self._replace_if_sticky()
            raise

    def gauge(self) -> float | None:
        """What memory gives just now, in GB/s; None where it does not change, or the worker was lost."""
        try:
            reading = self._ask("gauge", (), self._sample_limit_s)
        except (CandidateFailed, WorkerLost):
            return None
        return None if reading is None else float(reading)

    def facts(self, layout: CacheLayout, variant: Variant, *, decode: bool) -> CompileFacts | None:
        """What the compiler made of a variant, found in this process: nothing of it runs."""
        spec, target, *_ = self._made_by[1]
        code_hash = targets.code_hash(target)
        return known.compile_facts(spec, layout, variant, target, decode=decode, code_hash=code_hash)

    def _ask(self, name: str, arguments: tuple[Any, ...], limit_s: float) -> Any:
        """What a call of the bench returns. Raises CandidateFailed where it failed, MachineFault where that is no fault
        of the candidate, WorkerLost where no answer came."""
        if self._process is None:
            self._start()
        try:
            self._connection.send((name, arguments))
        except ConnectionError:
            raise self._lost() from None
        succeeded, answer = self._receive(limit_s)
        if isinstance(answer, MachineFault):
            raise answer
        if not succeeded:
            raise CandidateFailed(*answer)
        return answer

    def _start(self) -> tuple[str, dict[str, str], int]:
        """Starts a worker: its bench's regime, environment and how many variants it compiles side by side."""
        ours, its = socket.socketpair()
        program = _PROGRAM.format(path=sys.path, descriptor=its.fileno())
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program], pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, start_new_session=True,
                env=settings.measuring_environment(),
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self._connection.send((*self._made_by, torch.get_num_threads()))
        regime, environment, workers = self._receive(_START_LIMIT_S)
        return str(regime), dict(environment), int(workers)

    def _receive(self, limit_s: float) -> Any:
        """The worker's answer. Where none comes the worker is ended, and WorkerLost says why."""
        start = time.monotonic()
        stopped_at = math.inf
        try:
            while (waited := time.monotonic() - start) < limit_s:
                if self._connection.poll(min(_LOOK_S, limit_s - waited)):
                    return self._connection.recv()
                now = time.monotonic()
                if self._stop.requested:
                    stopped_at = min(stopped_at, now)
                if now - stopped_at > _GRACE_S:
                    self._stop.check()
        except (EOFError, ConnectionError):
            raise self._lost() from None
        except BaseException:  # Ctrl-C: a late answer must not be taken for that to the next question
            self.close()
            raise
        self.close()
        raise WorkerLost(Status.TIMEOUT, f"no answer within {time.monotonic() - start:.0f} s")

    def _lost(self) -> WorkerLost:
        """Ends what is left of a worker whose connection broke: the error that says how it ended."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = None if self._process is None else self._process.wait(_ENDING_S)
        self.close()
        if code == -signal.SIGKILL:
            return WorkerLost(Status.RESOURCE_LIMIT, "the process was killed, as systems do where memory runs out")
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit status {code}"
        return WorkerLost(Status.RUNTIME_ERROR, f"the process ended {how}")

    def _replace_if_sticky(self) -> None:
        if self._sticky:
            self.close()
