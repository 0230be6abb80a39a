"""Measuring: first whether a variant computes the right thing, then how long it takes, side by side with others."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

import pagegen
from pagegen import settings, targets
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CompileFacts,
    Device,
    Profile,
    Status,
    Target,
    Variant,
    Workload,
    check,
)
from pagegen.targets import cpp_build, gpu_driver
from pagegen.targets.call import AttentionCall, AttentionKernel
from pagegen.targets.errors import CompileError
from pagegen_autotune import inputs
from pagegen_autotune.faults import machine_fault
from pagegen_autotune.guarded import Guarded

# Largest error as a share of the row's largest value. bfloat16 rounds to 2^-9, for the weights as for the result; a
# kernel that reads one wrong key among the heavy ones is off by more than a tenth.
TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8, torch.float32: 1e-3}
# The log-sum-exp moves with the scores, which reach 12 here: rounding scale * q to the query's type moves them.
LSE_TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.01, torch.float32: 1e-3}
# Shorter calls are repeated until a sample takes this long: below it the timer and the scheduler are what is seen.
SAMPLE_US = 500.0
MAX_CALLS_A_SAMPLE = 16
# Layouts whose check batches are kept: they take 2.5 s of CPU time to make (the reference is a long sequence in
# float64) and 0.3 GiB, which a GPU spares more easily than a host.
KEPT_CHECKS = {"cpu": 1, "cuda": 4}
MAX_DETAIL = 500


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a variant may be timed: OK, or the failure class and one line on what happened."""

    status: Status
    detail: str = ""
    max_error: float | None = None


class Bench(Protocol):
    """What compiles, checks and times kernels: the tuner's only contact with them, so that its tests need none.

    `workers` variants are worth checking at once. `sample` returns the microseconds of one call, `gauge` what memory
    gives just then, in GB/s (None where that does not change). `facts` tells what the compiler made of a variant, None
    where it does not say.
    """

    regime: str
    environment: dict[str, str]
    workers: int

    def check(self, layout: CacheLayout, variants: Sequence[Variant]) -> dict[Variant, Verdict]: ...

    def sample(self, layout: CacheLayout, variant: Variant, workload: Workload) -> float: ...

    def gauge(self) -> float | None: ...

    def facts(self, layout: CacheLayout, variant: Variant, *, decode: bool) -> CompileFacts | None: ...


class CandidateFailed(RuntimeError):
    """A candidate failed elsewhere: the failure class, and one line on what happened."""

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def classify(error: Exception) -> tuple[Status, str]:
    """The failure class of an exception that a candidate raised, and its first line. Raises MachineFault for what is
    not the candidate's."""
    if isinstance(error, CandidateFailed):
        return error.status, error.detail
    fault = machine_fault(error)
    if fault is not None:
        raise fault
    detail = check.class_and_line(error)[:MAX_DETAIL]
    if isinstance(error, CompileError):
        return Status.COMPILE_ERROR, detail
    if isinstance(error, TimeoutError):
        return Status.TIMEOUT, detail
    # by name: Triton's OutOfResources must not make the CPU path import triton; torch's CPU allocator has no type
    if (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or type(error).__name__ == "OutOfResources"
        or "DefaultCPUAllocator" in detail
    ):
        return Status.RESOURCE_LIMIT, detail
    return Status.RUNTIME_ERROR, detail


def compare(kernel: AttentionKernel, batch: inputs.CheckBatch, dtype: torch.dtype) -> Verdict:
    """Runs `kernel` on a batch whose answer is known. The output is poisoned: a row left alone shows as NaN. It lies
    between guards, as the log-sum-exp does: a write outside of them, or into an operand, shows too."""
    call = batch.call
    out = Guarded.empty(*call.out.shape, dtype=call.out.dtype, device=call.out.device)
    sums = Guarded.empty(*call.q.shape[:2], dtype=torch.float32, device=call.q.device)
    call.out, call.lse = out.inside, sums.inside
    something = torch.isfinite(batch.expected_lse).to(call.out.device)
    # Rows with nothing to attend are zeroed for batches with query_start_loc; the kernel writes them in decode.
    poison = something if call.query_start_loc is not None else torch.ones_like(something)
    call.out.zero_().masked_fill_(poison[..., None], math.nan)
    call.lse.fill_(-math.inf).masked_fill_(poison, math.nan)
    try:
        kernel(call)
    finally:
        written = batch.put_back()  # one that raises may have written before
    got, lse = call.out.float().cpu(), call.lse.cpu()
    difference = (got - batch.expected).abs()
    largest = batch.expected.abs().amax(dim=-1, keepdim=True).clamp_min(1e-3)
    share, error = _largest(difference / largest), _largest(difference)
    # -inf - -inf is NaN where both say that there is nothing to attend
    lse_error = _largest((lse - batch.expected_lse).abs().masked_fill(lse == batch.expected_lse, 0.0))
    kind = "decode" if call.query_start_loc is None else "mixed"
    if not (out.intact and sums.intact):
        return Verdict(status=Status.WRONG_RESULT, detail=f"{kind} batch: memory outside of the results was written")
    if written:
        return Verdict(status=Status.WRONG_RESULT, detail=f"{kind} batch: {', '.join(written)} was written")
    if not math.isfinite(share):
        detail = f"{kind} batch: a result is NaN or Inf, or a row was not written"
        return Verdict(status=Status.WRONG_RESULT, detail=detail)
    if share > TOLERANCE[dtype]:
        detail = f"{kind} batch: off by {share:.3g} of the row's largest value, {TOLERANCE[dtype]:.3g} allowed"
        return Verdict(status=Status.WRONG_RESULT, detail=detail, max_error=error)
    if lse_error > LSE_TOLERANCE[dtype]:
        detail = f"{kind} batch: lse off by {lse_error:.3g}, {LSE_TOLERANCE[dtype]:.3g} allowed"
        return Verdict(status=Status.WRONG_RESULT, detail=detail, max_error=error)
    return Verdict(status=Status.OK, max_error=error)


def _largest(errors: Tensor) -> float:
    """The largest of non-negative errors; infinite where one is NaN or infinite."""
    return float(errors.nan_to_num(nan=math.inf, posinf=math.inf).max())


class KernelBench:
    """The real bench: generated kernels on the device that `target` names, which is present."""

    def __init__(self, spec: AttentionSpec, target: Target, device: Device, profile: Profile, *, seed: int) -> None:
        self.spec = spec
        self.target = target
        self.workers = cpp_build.workers() if target.kind == "cpu" else 1  # compilers are processes
        self.environment = environment_of(target)
        self._on = "cuda" if target.is_gpu else "cpu"
        self._seed = seed
        self._pool = inputs.Pool(spec, profile, device, on=self._on, seed=seed)
        self.regime = self._pool.regime
        self._batches: dict[CacheLayout, list[inputs.CheckBatch]] = {}  # the last one used is the last
        self._workload: Workload | None = None
        self._operands: dict[CacheLayout, _Operands] = {}

    def check(self, layout: CacheLayout, variants: Sequence[Variant]) -> dict[Variant, Verdict]:
        """Compiles `variants` side by side, then checks each alone."""
        with ThreadPoolExecutor(self.workers) as pool:
            kernels = dict(zip(variants, pool.map(lambda v: self._load(layout, v), variants), strict=True))
        return {v: k if isinstance(k, Verdict) else self._verify(layout, k) for v, k in kernels.items()}

    def sample(self, layout: CacheLayout, variant: Variant, workload: Workload) -> float:
        """Microseconds of one call, as the mean over as many as last half a millisecond; each reads other blocks."""
        if workload != self._workload:  # one workload at a time: its tables may take 64 MiB a layout
            self._workload, self._operands = workload, {}
        if layout not in self._operands:
            self._operands[layout] = _Operands(self._pool.calls(layout, workload))
        kernel = self._kernel(layout, variant)
        clock = _time_gpu if self._on == "cuda" else _time_cpu
        return self._operands[layout].sample(kernel, variant, clock)

    def gauge(self) -> float | None:
        """On a CPU the read bandwidth just now, from as much of the pool as takes some 0.2 ms to read, another part
        each time; None on a GPU, whose memory no other tenant slows."""
        return None if self._on == "cuda" else self._pool.read_gb_s()

    def facts(self, layout: CacheLayout, variant: Variant, *, decode: bool) -> CompileFacts | None:
        """What the compiler made of a variant; see `pagegen_autotune.known`."""
        from pagegen_autotune import known

        code_hash = targets.code_hash(self.target)
        return known.compile_facts(self.spec, layout, variant, self.target, decode=decode, code_hash=code_hash)

    def _checks(self, layout: CacheLayout) -> list[inputs.CheckBatch]:
        """The batches to check a layout's kernels on."""
        made = self._batches.pop(layout, None)
        if made is None:
            while len(self._batches) >= KEPT_CHECKS[self._on]:
                del self._batches[next(iter(self._batches))]
            loads = inputs.check_workloads(self.spec, layout)
            made = [inputs.check_batch(self.spec, layout, w, self._on, self._seed + i) for i, w in enumerate(loads)]
        self._batches[layout] = made
        return made

    def _kernel(self, layout: CacheLayout, variant: Variant) -> AttentionKernel:
        return targets.load_attention(self.spec, layout, variant, self.target)

    def _load(self, layout: CacheLayout, variant: Variant) -> AttentionKernel | Verdict:
        try:
            return self._kernel(layout, variant)
        except Exception as error:  # a candidate may fail in any way: its failure is its result
            status, detail = classify(error)
            return Verdict(status=status, detail=detail)

    def _verify(self, layout: CacheLayout, kernel: AttentionKernel) -> Verdict:
        worst = 0.0
        for batch in self._checks(layout):
            try:
                verdict = compare(kernel, batch, self.spec.q_dtype)
            except Exception as error:  # as above
                status, detail = classify(error)
                return Verdict(status=status, detail=detail)
            if verdict.status is not Status.OK:
                return verdict
            worst = max(worst, verdict.max_error or 0.0)
        return Verdict(status=Status.OK, max_error=worst)


class _Operands:
    """The calls of one workload, used in turn, and how many of them make a sample."""

    def __init__(self, calls: list[AttentionCall]) -> None:
        self._calls = calls
        self._next = 0
        self._warm: set[Variant] = set()
        self._repeat = 0

    def sample(self, kernel: AttentionKernel, variant: Variant, clock: _Clock) -> float:
        if variant not in self._warm:  # the first call allocates, and finds its code outside every cache
            estimate = clock(kernel, self._take(1))
            self._warm.add(variant)
            # decided once, by the first variant: all of a workload's samples are means over equally many calls
            self._repeat = self._repeat or max(1, min(MAX_CALLS_A_SAMPLE, math.ceil(SAMPLE_US / max(estimate, 1.0))))
        return clock(kernel, self._take(self._repeat))

    def _take(self, count: int) -> list[AttentionCall]:
        taken = [self._calls[(self._next + i) % len(self._calls)] for i in range(count)]
        self._next = (self._next + count) % len(self._calls)
        return taken


_Clock = Callable[[AttentionKernel, list[AttentionCall]], float]


def _time_cpu(kernel: AttentionKernel, calls: list[AttentionCall]) -> float:
    start = time.perf_counter_ns()
    for call in calls:
        kernel(call)
    return max(1, time.perf_counter_ns() - start) / 1e3 / len(calls)


def _time_gpu(kernel: AttentionKernel, calls: list[AttentionCall]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for call in calls:
        kernel(call)
    end.record()
    end.synchronize()
    return max(float(start.elapsed_time(end)), 1e-6) * 1e3 / len(calls)


def environment_of(target: Target) -> dict[str, str]:
    """What measurements on a target that is here depend on beside the device."""
    found = {
        "pagegen": pagegen.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "threads": str(torch.get_num_threads()),
    }
    if target.is_gpu:
        found["compiler"] = f"triton {importlib.metadata.version('triton')}"
        found["triton"] = importlib.metadata.version("triton")
        found["runtime"] = str(torch.version.hip or torch.version.cuda)
        found["driver"] = gpu_driver.release()
    else:
        from pagegen.targets import cpu

        found["compiler"] = str(cpu.compiler())
        found["omp_wait_policy"] = settings.omp_wait_policy()
    return found
