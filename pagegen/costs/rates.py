"""What a device does a microsecond, and what good kernels reach of it."""

from __future__ import annotations

import math
from typing import Any

import torch

from pagegen.costs import symbols as s
from pagegen.spec import AttentionSpec, Device

# Good kernels reach 80-94 % of a GPU's memory bandwidth over long contexts: the fastest decode kernels of three engines
# 93 % on an H200 (bench/results/cost-model.json).
MEMORY_EFFICIENCY = 0.9
# FlashAttention-class prefill reaches 40-75 % of the dense matrix rate; Triton's without warp specialisation half.
MATRIX_EFFICIENCY = 0.5
# How much faster than memory the last-level cache gives what it holds: 26 against 10.5 GB/s a thread for decode (Zen 4,
# measured); L2 against HBM on A100 and H100 is 2 to 3 in published microbenchmarks.
CACHE_GAIN = 2.5
# float32 operands run at half the 16-bit rate: TF32 against bf16 on GPUs, FMA against vdpbf16ps on AVX-512 (measured).
FLOAT32_RATE = 0.5
# Clocks of the GPUs of the table lie in this octave: from 1410 MHz (A100) to 2520 MHz (RTX 4090).
LOWEST_CLOCK_MHZ = 1300.0
# Where neither a clock nor a matrix rate is known.
USUAL_CLOCK_MHZ = 1500.0


def floor_bytes(values: dict[str, Any]) -> float:
    """Bytes that any implementation must move: K, V, q, out and the block table once."""
    return s.total(s.KV_BYTES + s.QUERY_BYTES + s.METADATA_BYTES, values)


def bytes_per_us(device: Device) -> float:
    """The memory's rate. Raises ValueError where it is not known."""
    if not device.bandwidth_gb_s > 0:
        raise ValueError(f"device must have a known bandwidth_gb_s, got {device.bandwidth_gb_s} for {device.name}")
    return device.bandwidth_gb_s * 1e3


def flops_per_us(spec: AttentionSpec, device: Device) -> float:
    """The dense matrix rate for the spec's dtype; infinite where it is not known, so that memory alone decides."""
    if not device.matrix_tflops > 0:
        return math.inf
    rate = FLOAT32_RATE if spec.q_dtype == torch.float32 else 1.0
    return device.matrix_tflops * 1e6 * rate


def clock_mhz(device: Device) -> float:
    """A GPU's clock: as known; else what its dense 16-bit matrix rate implies, since a multiprocessor does a power of
    two of flops a cycle (2048 on sm_80 and gfx942, 4096 on sm_90, 512 on GeForce) and only one puts the clock into the
    octave of all."""
    if device.core_clock_mhz > 0:
        return device.core_clock_mhz
    if not (device.matrix_tflops > 0 and device.units > 0):
        return USUAL_CLOCK_MHZ
    flops_a_mhz = device.matrix_tflops * 1e6 / device.units
    return flops_a_mhz / 2.0 ** math.floor(math.log2(flops_a_mhz / LOWEST_CLOCK_MHZ))
