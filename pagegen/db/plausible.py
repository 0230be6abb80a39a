"""Times that cannot be true: refused when they come, found by `verify` where they came another way."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pagegen import costs
from pagegen.spec import AttentionSpec, CacheLayout, Device, Measurement, Workload

# A cold read cannot beat the device's bandwidth; 10x covers a working set that a last-level cache holds (5-6x device
# memory on CPUs, about 3x on GPUs).
IMPOSSIBLY_FAST = 0.1
# A kernel 1000 times slower than the hardware is a unit gone wrong: the worst that a search space held was 60x, and a
# launch's or a call's own microseconds are added, which are all that a short batch takes.
IMPOSSIBLY_SLOW = 1000.0
CALL_US = 50.0
# What a thread of a CPU is allowed to read though its device says less: where others kept all cores busy meanwhile the
# probe found a tenth of the true rate, and times that were true afterwards seemed too short.
THREAD_GB_S = 10.0
# Plain C++ without vector instructions, in flops a microsecond a thread: see `pagegen.costs.model.CPU_THREAD_TFLOPS`.
PLAIN_FLOPS_PER_US = 7000.0
# An hour for one call of one layer, where nothing is known of the device.
LONGEST_US = 3.6e9
UNITS = ((1e-6, "seconds"), (1e-3, "milliseconds"), (1e3, "nanoseconds"))


@dataclass(frozen=True)
class Bounds:
    """Microseconds that one call takes at least with a cold cache (0: not known), and at most."""

    roofline_us: float
    most_us: float


@functools.lru_cache(maxsize=16384)
def bounds(spec: AttentionSpec, layout: CacheLayout, device: Device, workload: Workload) -> Bounds:
    """What a device can take for a batch, from its roofline; of a device without known rates only the longest."""
    if not device.bandwidth_gb_s > 0:
        return Bounds(0.0, LONGEST_US)
    roofline = slowest = costs.roofline_us(spec, layout, device, workload)
    if device.target.kind == "cpu":  # its roofline may know no arithmetic, which is what long queries wait for
        threads = max(1, device.units)
        slowest = max(roofline, costs.flops(spec, layout, workload) / (PLAIN_FLOPS_PER_US * threads))
        roofline *= min(1.0, device.bandwidth_gb_s / (THREAD_GB_S * threads))
    return Bounds(roofline, min(LONGEST_US, IMPOSSIBLY_SLOW * (slowest + CALL_US)))


def absurdities(median_us: float | None, longest_us: float, regime: str, limits: Bounds, device: str) -> list[str]:
    """Why times cannot be true, a sentence each; empty where they can, or where nothing was timed."""
    if median_us is None:
        return []
    problems = []
    if longest_us > LONGEST_US:
        problems.append(f"a sample of {longest_us:.3g} us is over an hour: are these microseconds?")
    elif median_us > limits.most_us:
        problems.append(
            f"a median of {median_us:.3g} us is {_times(median_us, limits)} the {limits.roofline_us:.3g} us that "
            f"{device} needs at least: are these microseconds?{_guess(median_us, limits)}"
        )
    if regime == "cold" and median_us < IMPOSSIBLY_FAST * limits.roofline_us:
        problems.append(
            f"a median of {median_us:.3g} us is {_times(median_us, limits)} the {limits.roofline_us:.3g} us that "
            f"{device} takes to read the keys and values: are these microseconds?{_guess(median_us, limits)}"
        )
    return problems


def impossible_times(measurement: Measurement) -> list[str]:
    """`absurdities` of a measurement."""
    m = measurement
    if not m.samples_us:
        return []
    limits = bounds(m.spec, m.layout, m.device, m.workload)
    return absurdities(m.median_us, max(m.samples_us), m.regime, limits, m.device.name)


def refuse_absurd(measurement: Measurement) -> None:
    """Raises ValueError for times that cannot be true, with the reason."""
    problems = impossible_times(measurement)
    if problems:
        raise ValueError(f"samples_us must be microseconds of one call: {'; '.join(problems)}")


def _times(us: float, limits: Bounds) -> str:
    ratio = us / limits.roofline_us if limits.roofline_us else float("inf")
    if ratio >= 1:
        return f"{ratio:.2g} times"
    return f"1/{1 / ratio:.2g} of" if ratio > 1e-300 else "next to nothing of"  # 1 / 5e-324 is infinite


def _guess(us: float, limits: Bounds) -> str:
    """The unit in which the times would be a usual 1 to 20 times the roofline."""
    for factor, unit in UNITS:
        if limits.roofline_us and 0.5 <= us / factor / limits.roofline_us <= 50:
            return f" In {unit} they would be likely."
    return ""
