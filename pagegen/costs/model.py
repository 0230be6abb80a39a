"""How long a variant takes: the roofline's floor, and a prediction with the losses that a kernel cannot avoid.

The prediction is a roofline with waves: the slower of memory, matrix units and issue slots, stretched where programs do
not fill the device evenly, or one program alone where it is the last to finish, plus fixed costs. It ranks variants and
answers where nothing was measured; it is not a measurement, and whoever shows it says so.
"""

from __future__ import annotations

from typing import Any

from pagegen.costs import symbols as s
from pagegen.costs.cpu import cpu_parts
from pagegen.costs.fitted import Fit
from pagegen.costs.gpu import gpu_parts, merge_us
from pagegen.costs.parts import Parts
from pagegen.costs.rates import bytes_per_us, floor_bytes, flops_per_us
from pagegen.spec import AttentionSpec, CacheLayout, CompileFacts, CppVariant, Device, TritonVariant, Variant, Workload

# One loop iteration of one program under Triton's interpreter takes 3.4-6.6 ms, whatever the tile (measured).
INTERPRETER_ITERATION_US = 5000.0


def _bind(spec: AttentionSpec, layout: CacheLayout, workload: Workload) -> dict[str, Any]:
    return {**s.bind_spec(spec, layout), **s.bind_workload(spec, workload)}


def kv_bytes(spec: AttentionSpec, layout: CacheLayout, workload: Workload) -> int:
    """Bytes of K and V that the workload must read, each once: the keys that some query sees, scales included.

    A mask function may see fewer. The block size changes no byte of it: slots past a sequence's end are not read.
    """
    return round(s.total(s.KV_BYTES, _bind(spec, layout, workload)))


def flops(spec: AttentionSpec, layout: CacheLayout, workload: Workload) -> int:
    """Multiplies and adds of both products over the (query, key) pairs that the masks allow."""
    return round(s.total(s.FLOPS, _bind(spec, layout, workload)))


def roofline_us(spec: AttentionSpec, layout: CacheLayout, device: Device, workload: Workload) -> float:
    """The least time the device could take with a cold cache: K, V, q, out and the block table once at full
    bandwidth, or the flops at the full matrix rate, whichever is longer.

    A working set that the last-level cache holds can be faster when warm. Raises ValueError where the device's
    bandwidth is not known.
    """
    values = _bind(spec, layout, workload)
    return max(floor_bytes(values) / bytes_per_us(device), s.total(s.FLOPS, values) / flops_per_us(spec, device))


def parts(
    spec: AttentionSpec,
    layout: CacheLayout,
    variant: Variant,
    device: Device,
    workload: Workload,
    *,
    facts: CompileFacts | None = None,
) -> Parts:
    """What one call's expected time is made of. `facts` are what a compiler made of this very kernel.

    Raises ValueError where the device's bandwidth is not known, and TypeError for a variant of another family than the
    device's.
    """
    if variant.family != device.target.family:
        raise TypeError(f"variant must be of family {device.target.family} for {device.target}, got {variant.name}")
    values = {**_bind(spec, layout, workload), **s.bind_variant(variant), **s.bind_device(device)}
    if isinstance(variant, CppVariant):
        return cpu_parts(spec, layout, variant, device, values)
    assert isinstance(variant, TritonVariant)  # the family says so
    if device.target.kind == "interpreter":
        return Parts(fixed_us=s.total(s.PROGRAMS * s.TILES_PER_PROGRAM, values) * INTERPRETER_ITERATION_US)
    return gpu_parts(spec, variant, device, values, facts)


def predict_us(
    spec: AttentionSpec,
    layout: CacheLayout,
    variant: Variant,
    device: Device,
    workload: Workload,
    *,
    facts: CompileFacts | None = None,
    fit: Fit | None = None,
) -> float:
    """The expected time of one call, corrected by a `fit` to the device's own trials where one is given, and never
    below the roofline. Raises as `parts` does."""
    made_of = parts(spec, layout, variant, device, workload, facts=facts)
    if fit is None:
        return made_of.total_us
    return max(made_of.total_us * fit.factor(made_of, variant), roofline_us(spec, layout, device, workload))


def reduce_us(
    spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, device: Device, workload: Workload
) -> float:
    """The part of `predict_us` that merging partial states takes; 0 for a variant that has none."""
    values = {**_bind(spec, layout, workload), **s.bind_variant(variant), **s.bind_device(device)}
    return merge_us(variant, device, values)
