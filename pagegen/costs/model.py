"""How long a variant takes: the roofline's floor, and a prediction with the losses that a kernel cannot avoid.

The prediction is a roofline with waves: the slower of memory and matrix units, stretched where programs do not
fill the device evenly or where one program is the last to finish, plus fixed costs. It ranks variants and answers
where nothing was measured; it is not a measurement, and whoever shows it says so.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from pagegen.costs import symbols as s
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device, TritonVariant, Variant, Workload
from pagegen.spec.dtypes import bytes_per_element

# Good kernels reach 80-90 % of a GPU's memory bandwidth over long contexts (published decode kernels on A100, H100).
MEMORY_EFFICIENCY = 0.85
# FlashAttention-class prefill reaches 40-75 % of the dense matrix rate; Triton's without warp specialisation half.
MATRIX_EFFICIENCY = 0.5
# float32 operands run at half the 16-bit rate: TF32 against bf16 on GPUs, FMA against vdpbf16ps on AVX-512 (measured).
FLOAT32_RATE = 0.5
# One kernel in a CUDA graph or a stream that is already busy: published figures are 2-5 us.
LAUNCH_US = 3.0
# Latency of a dependent load from device memory under load, 600-800 ns on A100 and H100 microbenchmarks. A program's
# loop hides it only behind its own pipeline stages.
LOAD_LATENCY_US = 0.7
# Assumption: one multiprocessor draws at most twice its even share of the bandwidth, so half of them saturate it.
UNIT_SHARE = 2.0
# Programs of 4 warps that the registers of a multiprocessor hold: 80-100 a thread for tiles of 16 rows, 160-240 from
# 64 rows on (compiled for sm_80 and sm_90).
RESIDENT_SMALL, RESIDENT_LARGE = 5, 2
# A Python and OpenMP call of a compiled kernel: 10-13 us, measured on 2 cores (Zen 4).
CPU_CALL_US = 12.0
# Handing out one work item and merging its partial state: assumption, a lock-free counter and some cache misses.
CPU_ITEM_US = 0.3
# Starting a tile (block-table look-up, running maximum): chosen so that tiles of 16 keys lose 6-11 % against tiles of
# 64, as measured for a contiguous-head cache.
CPU_TILE_US = 0.02
# What one thread computes where the device does not say, in 1e12 flops/s: measured on a Zen 4 core for bf16 dot
# products and AVX-512 FMA; half of the latter for AVX2, an eighth of that for plain code (assumptions).
CPU_THREAD_TFLOPS = {"avx512_bf16": 0.234, "avx512f": 0.117, "avx2": 0.058, "": 0.007}
# Share of the sequential read bandwidth that a walk over chunks in random order reaches, 2 threads, loads only (Zen 4,
# bf16): by bytes of a contiguous chunk, without and with prefetch into L2, without and with four or more streams.
CPU_CHUNK_BYTES = (256, 4096, 8192, 32768, 65536, 262144)
CPU_WALK_EFFICIENCY = {
    (False, False): (0.44, 0.39, 0.32, 0.81, 0.89, 0.97),
    (False, True): (0.44, 0.55, 0.58, 0.81, 0.89, 0.97),
    (True, False): (0.77, 0.86, 0.76, 0.82, 0.88, 0.97),
    (True, True): (0.73, 0.87, 0.92, 0.94, 0.97, 0.99),
}
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


def _floor_bytes(values: dict[str, Any]) -> float:
    return s.total(s.KV_BYTES + s.QUERY_BYTES + s.METADATA_BYTES, values)


def bytes_per_us(device: Device) -> float:
    if not device.bandwidth_gb_s > 0:
        raise ValueError(f"device must have a known bandwidth_gb_s, got {device.bandwidth_gb_s} for {device.name}")
    return device.bandwidth_gb_s * 1e3


def flops_per_us(spec: AttentionSpec, device: Device) -> float:
    """The dense matrix rate for the spec's dtype; infinite where it is not known, so that memory alone decides."""
    if not device.matrix_tflops > 0:
        return math.inf
    rate = FLOAT32_RATE if spec.q_dtype == torch.float32 else 1.0
    return device.matrix_tflops * 1e6 * rate


def roofline_us(spec: AttentionSpec, layout: CacheLayout, device: Device, workload: Workload) -> float:
    """The least time the device could take with a cold cache: K, V, q, out and the block table once at full
    bandwidth, or the flops at the full matrix rate, whichever is longer.

    A working set that the last-level cache holds can be faster when warm. Raises ValueError where the device's
    bandwidth is not known.
    """
    values = _bind(spec, layout, workload)
    return max(_floor_bytes(values) / bytes_per_us(device), s.total(s.FLOPS, values) / flops_per_us(spec, device))


def predict_us(spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device, workload: Workload) -> float:
    """The expected time of one call. Raises ValueError where the device's bandwidth is not known, and TypeError for
    a variant of another family than the device's."""
    if variant.family != device.target.family:
        raise TypeError(f"variant must be of family {device.target.family} for {device.target}, got {variant.name}")
    values = {**_bind(spec, layout, workload), **s.bind_variant(variant), **s.bind_device(device)}
    if isinstance(variant, CppVariant):
        return _predict_cpp(spec, layout, variant, device, values)
    assert isinstance(variant, TritonVariant)  # the family says so
    if device.target.kind == "interpreter":
        return s.total(s.PROGRAMS * s.TILES_PER_PROGRAM, values) * INTERPRETER_ITERATION_US
    return _predict_triton(spec, variant, device, values)


def _predict_triton(spec: AttentionSpec, variant: TritonVariant, device: Device, values: dict[str, Any]) -> float:
    memory_rate, matrix_rate = bytes_per_us(device), flops_per_us(spec, device) * MATRIX_EFFICIENCY
    units = max(1, device.units)
    programs = s.total(s.PROGRAMS, values)
    if not programs:
        return LAUNCH_US
    slots = units * _resident(variant, device, values)
    longest_tiles = float(s.evaluate(s.TILES_PER_PROGRAM, values).max())
    if variant.programs:  # all have the same number of tiles, so nobody waits for a longest one
        programs, longest_tiles = _shares(variant, values)
    tile_bytes = variant.tile_kv * values["kv_token_bytes"] / values["num_kv_heads"]
    columns = float(s.evaluate(s.HEAD_COLUMNS + s.V_COLUMNS, values))
    tile_flops = 2 * variant.tile_rows * variant.tile_kv * columns

    # a multiprocessor draws what its programs keep in flight, at most twice its even share (Little's law)
    stages = float(s.evaluate(s.STAGES_IN_FLIGHT, values))
    in_flight = max(1.0, min(slots, programs) / units) * stages * tile_bytes
    unit_rate = min(UNIT_SHARE * memory_rate / units, in_flight / LOAD_LATENCY_US)
    reachable = min(MEMORY_EFFICIENCY * memory_rate, min(units, programs) * unit_rate)
    memory_us = _floor_bytes(values) / reachable
    matrix_us = s.total(s.EXECUTED_FLOPS, values) / (matrix_rate * min(1.0, programs / units))
    waves = programs / slots
    stretch = math.ceil(waves) / waves if waves > 1 else 1.0
    # the longest program alone: each tile waits for its loads, less what the pipeline hides
    tile_us = max(LOAD_LATENCY_US / stages, tile_bytes / unit_rate, tile_flops / (matrix_rate / units))
    longest_us = LOAD_LATENCY_US + longest_tiles * tile_us
    expected: float = LAUNCH_US + max(memory_us * stretch, matrix_us * stretch, longest_us)
    return expected + _reduce_us(variant, device, values)


def _shares(variant: TritonVariant, values: dict[str, Any]) -> tuple[float, float]:
    """Programs that have something to do where they share all key tiles, and the key tiles of each."""
    tiles = s.total(s.PROGRAMS * s.TILES_PER_PROGRAM, values)
    programs = min(float(variant.programs), max(tiles, 1.0))
    return programs, float(math.ceil(tiles / programs))


def _reduce_us(variant: TritonVariant, device: Device, values: dict[str, Any]) -> float:
    """Merging partial states: their way out and in again, and who does it."""
    memory_rate = MEMORY_EFFICIENCY * bytes_per_us(device)
    if variant.programs:  # one launch counts tiles beforehand, and one merges what each began and ended within
        programs, _ = _shares(variant, values)
        columns = int(values["v_head_dim"]) + 1
        return 2 * LAUNCH_US + LOAD_LATENCY_US + 2 * 2 * 4 * programs * variant.tile_rows * columns / memory_rate
    if not variant.splits:
        return 0.0
    partial_us = s.total(s.PARTIAL_BYTES, values) / memory_rate
    # the last to finish waits for a counter and then for the partial states: two dependent loads and no launch
    return partial_us + (2 * LOAD_LATENCY_US if variant.reduce == "last" else LAUNCH_US)


def reduce_us(
    spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, device: Device, workload: Workload
) -> float:
    """The part of `predict_us` that merging partial states takes; 0 for a variant that has none."""
    values = {**_bind(spec, layout, workload), **s.bind_variant(variant), **s.bind_device(device)}
    return _reduce_us(variant, device, values)


def _resident(variant: TritonVariant, device: Device, values: dict[str, Any]) -> int:
    """Programs that one multiprocessor holds at once, by registers, shared memory and threads."""
    limits = [4 * (RESIDENT_SMALL if variant.tile_rows < 64 else RESIDENT_LARGE) // variant.num_warps]
    if device.shared_memory_kib > 0:
        limits.append(int(device.shared_memory_kib * 1024 // float(s.evaluate(s.SHARED_BYTES, values))))
    if device.max_threads_per_unit > 0:
        limits.append(device.max_threads_per_unit // (variant.num_warps * device.target.warp_size))
    return max(1, min(limits))


def _predict_cpp(
    spec: AttentionSpec, layout: CacheLayout, variant: CppVariant, device: Device, values: dict[str, Any]
) -> float:
    threads = max(1, device.units)
    shape = np.shape(values["context"])
    items = np.broadcast_to(s.evaluate(s.ITEMS, values), shape)
    num_items = float(items.sum())
    if not num_items:
        return CPU_CALL_US
    share = _walk_share(spec, layout, variant)
    memory_us = _floor_bytes(values) / (bytes_per_us(device) * share)
    rate = min(flops_per_us(spec, device), _cpu_flops_per_us(spec, device)) * MATRIX_EFFICIENCY
    matrix_us = s.total(s.CPU_FLOPS, values) / rate + s.total(s.CPU_TILES, values) * CPU_TILE_US / threads
    # Items are handed out longest first. The call ends no sooner than its longest item, and a few equal items leave
    # threads idle in the last turn.
    keys = np.broadcast_to(s.evaluate(s.ITEM_KEYS, values), shape)
    longest_share = float(keys.max()) / max(float((items * keys).sum()), 1.0)
    balance = max(1.0, longest_share * threads, math.ceil(num_items / threads) * threads / num_items)
    return CPU_CALL_US + max(memory_us, matrix_us) * balance + num_items * CPU_ITEM_US / threads


def _cpu_flops_per_us(spec: AttentionSpec, device: Device) -> float:
    """The rate of the widest instructions that the device's features name and the dtype can use."""
    usable = [f for f in device.features if f != "avx512_bf16" or spec.q_dtype == spec.kv_dtype == torch.bfloat16]
    best = max(CPU_THREAD_TFLOPS.get(feature, 0.0) for feature in ("", *usable))
    return best * 1e6 * max(1, device.units)


def _walk_share(spec: AttentionSpec, layout: CacheLayout, variant: CppVariant) -> float:
    """The share of sequential read bandwidth that the walk over the blocks reaches, by its contiguous chunk: one
    head's rows of a block in HND order, one token's rows of the heads read together in NHD order."""
    row_bytes = float(spec.head_dim * bytes_per_element(spec.kv_dtype))
    rows = layout.block_size if layout.order == "HND" else min(variant.heads_together, spec.num_kv_heads)
    shares = CPU_WALK_EFFICIENCY[variant.prefetch_ahead > 0, variant.streams >= 4]
    return float(np.interp(math.log2(rows * row_bytes), np.log2(CPU_CHUNK_BYTES), shares))
