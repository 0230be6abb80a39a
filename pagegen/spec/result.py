"""`Measurement` (one trial) and `Selection` (what was chosen, and why)."""

from __future__ import annotations

import enum
import math
import numbers
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pagegen.spec import check
from pagegen.spec.attention import AttentionSpec
from pagegen.spec.layout import CacheLayout
from pagegen.spec.target import Device, Target
from pagegen.spec.variant import Variant
from pagegen.spec.workload import Workload

# Keys of a tuner's trial in its environment: samples of one session with one index were taken in one round.
# How a trial was timed: with the cache's blocks outside the last-level cache, or as they lay.
REGIMES = ("cold", "warm")
SESSION, PURPOSE = "tuning_session", "tuning_purpose"
# What memory gave before each sample, as text: GB/s by spaces, in the order of `samples_us`.
GAUGE = "tuning_gauge_gb_s"
# In a portfolio's evidence: stored while its run went on.
INTERIM = "interim"
COMPILE_COUNTS = ("registers", "spills", "shared_bytes", "num_warps", "programs_per_unit", "binary_bytes")
# Why the trial was made: the default before anything else; finding a winner; judging it on fresh samples; comparing
# layouts in rounds over all of them; the default once more at the end, for drift.
BASELINE, SEARCH, CONFIRM, COMPARE, AFTER = "baseline", "search", "confirm", "compare", "after"


class Status(str, enum.Enum):
    """How a trial ended. Everything but OK is a failure class, stored like any other result."""

    OK = "ok"
    COMPILE_ERROR = "compile_error"
    RESOURCE_LIMIT = "resource_limit"
    WRONG_RESULT = "wrong_result"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"


def _check_kernel(value: Measurement | CompileFacts | Prediction, target: Target) -> None:
    """What these have in common: a kernel, its code and a date."""
    check.instance("spec", value.spec, AttentionSpec)
    check.instance("layout", value.layout, CacheLayout)
    check.instance("variant", value.variant, Variant)
    check.text("code_hash", value.code_hash, printable=False)
    check.timestamp("created_at", value.created_at)
    if value.variant.family != target.family:
        raise ValueError(f"variant must be of the family {target.family} for {target}, got {value.variant.name}")


def _check_question(value: Measurement | Prediction, device: Device) -> None:
    check.instance("device", device, Device)
    check.instance("workload", value.workload, Workload)
    _check_kernel(value, device.target)


def _samples(samples: Any) -> tuple[float, ...]:
    if isinstance(samples, (str, bytes)) or not isinstance(samples, Iterable):
        raise TypeError(f"samples_us must be a sequence of numbers, got {type(samples).__name__} {samples!r}")
    found = tuple(samples)
    if {*map(type, found)} <= {float}:  # a database holds millions of them
        return found
    return tuple(_float("samples_us", us) for us in found)


def _float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer that no float holds") from None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One trial of one variant on one workload.

    `samples_us` holds every timed run in microseconds, in order; it is empty when `status` is a failure.
    `regime` says how it was timed ("cold": the cache's blocks were not in the last-level cache). `max_error`
    is the largest absolute difference from the float64 reference. `code_hash` identifies the templates.
    """

    spec: AttentionSpec
    layout: CacheLayout
    target: Target
    device: Device
    variant: Variant
    workload: Workload
    status: Status
    samples_us: tuple[float, ...] = ()
    regime: str = "cold"
    max_error: float | None = None
    detail: str = ""
    code_hash: str = ""
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    created_at: str = ""

    def __post_init__(self) -> None:
        _check_question(self, self.device)
        check.instance("target", self.target, Target)
        check.instance("status", self.status, Status)
        object.__setattr__(self, "samples_us", _samples(self.samples_us))
        if self.status is Status.OK:
            if not self.samples_us or not all(0 < s < math.inf for s in self.samples_us):
                raise ValueError(f"samples_us must be positive and finite for an ok trial, got {self.samples_us}")
        elif self.samples_us:
            raise ValueError(f"a {self.status.value} trial has no samples, got {len(self.samples_us)}")
        check.one_of("regime", self.regime, REGIMES)
        if self.max_error is not None:  # NaN and infinity are what a wrong result may differ by
            object.__setattr__(self, "max_error", _float("max_error", self.max_error))
        check.instance("detail", self.detail, str)
        check.texts("environment", self.environment)
        if self.device.target != self.target:
            raise ValueError(f"device must be of the target {self.target}, got one of {self.device.target}")

    @property
    def median_us(self) -> float | None:
        """The median of the samples; None for a failed trial."""
        return statistics.median(self.samples_us) if self.samples_us else None


@dataclass(frozen=True, kw_only=True)
class CompileFacts:
    """What a compiler made of one kernel, with no run of it; None is not known.

    `form` is the kernel's: "decode" or "ragged". `spills` is bytes of local memory a thread on NVIDIA, spilled vector
    registers on AMD. `shared_bytes` and `registers` are a program's and a thread's, `programs_per_unit` is how many fit
    one multiprocessor, `binary_bytes` is the size of the machine code's file. `loop` counts the instructions of the
    main loop by kind.
    """

    spec: AttentionSpec
    layout: CacheLayout
    target: Target
    variant: Variant
    form: str
    code_hash: str
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    num_warps: int | None = None
    programs_per_unit: int | None = None
    binary_bytes: int | None = None
    loop: dict[str, Any] = field(default_factory=dict, hash=False)
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    created_at: str = ""

    def __post_init__(self) -> None:
        check.instance("target", self.target, Target)
        _check_kernel(self, self.target)
        check.one_of("form", self.form, ("decode", "ragged"))
        for name in COMPILE_COUNTS:
            if getattr(self, name) is not None:
                check.integer(name, getattr(self, name), at_least=0, at_most=2**63 - 1)
        check.json_object("loop", self.loop)
        check.texts("environment", self.environment)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A time that no device showed: what `model` ("pagegen.costs 0.1.0") expects one call to take. It is never a
    `Measurement`, so that nobody takes one for the other."""

    spec: AttentionSpec
    layout: CacheLayout
    device: Device
    variant: Variant
    workload: Workload
    predicted_us: float
    model: str
    code_hash: str
    created_at: str = ""

    def __post_init__(self) -> None:
        _check_question(self, self.device)
        check.text("model", self.model)
        if not check.number("predicted_us", self.predicted_us) > 0:
            raise ValueError(f"predicted_us must be positive, got {self.predicted_us}")

    @property
    def target(self) -> Target:
        """The device's."""
        return self.device.target


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A chosen variant. `reason` is a sentence; `distance` is 0 for an exact answer and grows with how far
    the evidence is from the question; `predicted_us` is the expected time of one call where known;
    `evidence` holds the figures behind it. Its `kind` is "measured", "predicted" or "default", or "reference" where no
    generated kernel serves the spec: `pagegen.reference_attention` does, and `reason` says why; `variant` is what would
    be taken if one could. `grade` is the rung of the ladder that answered and `confidence` how much to trust it: see
    `pagegen.selection.grades`."""

    variant: Variant
    reason: str
    distance: float = 0.0
    predicted_us: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict, hash=False)
    grade: str = "default"
    confidence: str = "none"
