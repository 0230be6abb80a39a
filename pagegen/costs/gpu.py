"""What a Triton kernel's time is made of on a GPU: memory, matrix units, issue slots, latency, launches and waves.

Programs are dealt to multiprocessors, each of which holds as many at once as registers, shared memory and threads
allow. They share its part of the bandwidth, its matrix units and its issue slots; what one program cannot hide behind
its own pipeline stages, the others that are resident hide. Where a compiler has told what it made of the kernel
(`CompileFacts`), its residency and its main loop's instructions are taken; else estimates of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pagegen.costs import symbols as s
from pagegen.costs.parts import Parts
from pagegen.costs.rates import (
    CACHE_GAIN,
    MATRIX_EFFICIENCY,
    MEMORY_EFFICIENCY,
    bytes_per_us,
    clock_mhz,
    floor_bytes,
    flops_per_us,
)
from pagegen.spec import AttentionSpec, CompileFacts, Device, TritonVariant

# One kernel in a CUDA graph or a stream that is already busy: published figures are 2-5 us.
LAUNCH_US = 3.0
# Latency of a dependent load from device memory under load, 600-800 ns on A100 and H100 microbenchmarks. A program's
# loop hides it only behind its own pipeline stages.
LOAD_LATENCY_US = 0.7
# Assumption: one multiprocessor draws at most twice its even share of the bandwidth, so half of them saturate it.
UNIT_SHARE = 2.0
# Loads that a program waits for one after the other before its first product: the length, the block id, the keys.
PROLOGUE_LOADS = 3
# Warp instructions that a multiprocessor issues a cycle: four schedulers, one each. A compute unit of gfx9 has four
# SIMDs that take four cycles for the 64 lanes of a wave.
ISSUES_A_CYCLE = {"cuda": 4.0, "hip": 1.0}
# Share of the issue slots that a loop with barriers, shared-memory conflicts and dependent exponentials can fill.
ISSUE_EFFICIENCY = 0.6
# Cycles from one instruction of a lone warp to its next: arithmetic takes 4-6, matrix products and shared memory 20-35,
# and some of them overlap. On gfx9 the lanes of one wave alone take four.
CYCLES_ALONE = {"cuda": 3.0, "hip": 6.0}
# Where the matrix units take tiles of 64 rows from shared memory (wgmma, tcgen05), fewer rows go by way of registers:
# such products reach 63 % of the rate on H100 (arXiv 2402.13499).
SYNCHRONOUS_SHARE = 0.63
# float32 multiply-adds of the CUDA cores against 16-bit matrix products: 67 of 989 TFLOPS on H100, 19.5 of 312 on A100.
FMA_SHARE = 1 / 15
# Programs that a multiprocessor holds whatever they need.
MAX_RESIDENT = 32


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """A kernel on a batch: `programs` over `units`, at most `resident` on one at once; `tiles` in all and `longest` in
    one program; bytes and flops of a tile, and what a warp issues for it."""

    programs: float
    tiles: float
    longest: float
    units: int
    resident: int
    tile_bytes: float
    tile_flops: float
    instructions: float
    stages: float


def gpu_parts(
    spec: AttentionSpec, variant: TritonVariant, device: Device, values: dict[str, Any], facts: CompileFacts | None
) -> Parts:
    """The parts of one call; `values` bind every symbol. A batch with nothing to do costs its launch."""
    if not s.total(s.PROGRAMS, values):
        return Parts(fixed_us=LAUNCH_US)
    kernel = _kernel(variant, device, values, facts)
    memory_rate = bytes_per_us(device)
    matrix_rate = flops_per_us(spec, device) * MATRIX_EFFICIENCY * _matrix_share(variant, values)
    # programs on one multiprocessor at once, on average; those that have work, and the share of the last, partial turn
    together = min(float(kernel.resident), max(1.0, kernel.programs / kernel.units))
    busy = min(1.0, kernel.programs / kernel.units)
    uneven = math.ceil(kernel.programs / kernel.units) / (kernel.programs / kernel.units) if busy == 1.0 else 1.0

    # a program without a pipeline loads, then computes: its loads are in flight for a part of the time
    chain_us = kernel.instructions * CYCLES_ALONE[device.target.kind] / clock_mhz(device)
    loading = 1.0 if variant.num_stages > 1 else LOAD_LATENCY_US / (LOAD_LATENCY_US + chain_us)
    # a multiprocessor draws what its programs keep in flight, at most twice its even share (Little's law)
    in_flight = together * kernel.stages * loading * kernel.tile_bytes
    unit_rate = min(UNIT_SHARE * memory_rate / kernel.units, in_flight / LOAD_LATENCY_US)
    reachable = min(MEMORY_EFFICIENCY * memory_rate, min(kernel.units, kernel.programs) * unit_rate)
    # what several query tiles read is read from the last-level cache all but once
    cached_us = kernel.tiles * kernel.tile_bytes / (CACHE_GAIN * memory_rate * busy)
    memory_us = max(floor_bytes(values) / reachable, cached_us) * _last_turn(kernel)

    slots = ISSUES_A_CYCLE[device.target.kind] * clock_mhz(device)
    issued = kernel.instructions * variant.num_warps
    issue_us = kernel.tiles * issued / (kernel.units * busy * slots * ISSUE_EFFICIENCY) * uneven
    matrix_us = kernel.tiles * kernel.tile_flops / (matrix_rate * busy) * uneven

    # the longest program, and those before it in its place: a tile waits for its loads, less what the pipeline hides,
    # for a lone warp's chain of instructions, or for what one multiprocessor draws and multiplies
    tile_us = max(
        LOAD_LATENCY_US / kernel.stages if variant.num_stages > 1 else LOAD_LATENCY_US + chain_us,
        chain_us,
        kernel.tile_bytes * kernel.units / (UNIT_SHARE * memory_rate),
        kernel.tile_flops * kernel.units / matrix_rate,
    )
    turns = max(1.0, math.ceil(kernel.programs / (kernel.units * kernel.resident)))
    in_turn = max(kernel.longest, kernel.tiles / kernel.programs * turns)
    return Parts(
        fixed_us=LAUNCH_US + PROLOGUE_LOADS * LOAD_LATENCY_US,
        memory_us=memory_us,
        matrix_us=matrix_us,
        issue_us=issue_us,
        latency_us=in_turn * tile_us,
        merge_us=merge_us(variant, device, values),
    )


def _matrix_share(variant: TritonVariant, values: dict[str, Any]) -> float:
    """The share of the matrix rate that the instructions of this variant can reach."""
    if variant.dot == "fma":
        return FMA_SHARE
    return SYNCHRONOUS_SHARE if values["has_wgmma"] and variant.tile_rows < 64 else 1.0


def _last_turn(kernel: _Kernel) -> float:
    """How much longer memory takes since the last turn does not fill the device: few multiprocessors draw less than
    all can, each at most twice its even share. 1 where the programs make whole turns or less than one."""
    turns = kernel.programs / (kernel.units * kernel.resident)
    whole = math.floor(turns)
    rest = turns - whole
    if not whole or not rest:
        return 1.0
    active = min(1.0, rest * kernel.resident)  # programs go to the emptiest multiprocessor
    return (whole + rest / min(1.0, UNIT_SHARE * active)) / turns


def _kernel(variant: TritonVariant, device: Device, values: dict[str, Any], facts: CompileFacts | None) -> _Kernel:
    programs = s.total(s.PROGRAMS, values)
    tiles = s.total(s.PROGRAMS * s.TILES_PER_PROGRAM, values)
    longest = float(s.evaluate(s.TILES_PER_PROGRAM, values).max())
    if variant.programs:  # all have the same number of tiles, so nobody waits for a longest one
        programs, longest = _shares(variant, tiles)
    columns = float(s.evaluate(s.HEAD_COLUMNS + s.V_COLUMNS, values))
    return _Kernel(
        programs=programs,
        tiles=tiles,
        longest=longest,
        units=max(1, device.units),
        resident=resident(variant, device, values, facts),
        tile_bytes=variant.tile_kv * values["kv_token_bytes"] / values["num_kv_heads"],
        tile_flops=2 * variant.tile_rows * variant.tile_kv * columns,
        instructions=instructions(values, facts),
        stages=float(s.evaluate(s.STAGES_IN_FLIGHT, values)),
    )


def instructions(values: dict[str, Any], facts: CompileFacts | None) -> float:
    """What a warp issues for one tile of keys: as disassembled, else estimated."""
    told = 0 if facts is None else facts.loop.get("instructions", 0)
    return float(told or s.evaluate(s.INSTRUCTIONS, values))


def resident(variant: TritonVariant, device: Device, values: dict[str, Any], facts: CompileFacts | None = None) -> int:
    """Programs that one multiprocessor holds at once, by registers, shared memory and threads; 1 at least."""
    if facts is not None and facts.programs_per_unit is not None:
        return max(1, min(MAX_RESIDENT, facts.programs_per_unit))
    limits = [MAX_RESIDENT]
    if device.registers_per_unit > 0:
        limits.append(int(device.registers_per_unit // float(s.evaluate(s.REGISTERS * s.THREADS, values))))
    if device.shared_memory_kib > 0:
        limits.append(int(device.shared_memory_kib * 1024 // float(s.evaluate(s.SHARED_BYTES, values))))
    if device.max_threads_per_unit > 0:
        limits.append(device.max_threads_per_unit // (variant.num_warps * device.target.warp_size))
    return max(1, min(limits))


def _shares(variant: TritonVariant, tiles: float) -> tuple[float, float]:
    """Programs that have something to do where they share all key tiles, and the key tiles of each."""
    programs = min(float(variant.programs), max(tiles, 1.0))
    return programs, float(math.ceil(tiles / programs))


def merge_us(variant: TritonVariant, device: Device, values: dict[str, Any]) -> float:
    """Merging partial states: their way out and in again, and who does it."""
    memory_rate = MEMORY_EFFICIENCY * bytes_per_us(device)
    if variant.programs:  # one launch counts tiles beforehand, and one merges what each began and ended within
        programs, _ = _shares(variant, s.total(s.PROGRAMS * s.TILES_PER_PROGRAM, values))
        columns = int(values["v_head_dim"]) + 1
        return 2 * LAUNCH_US + LOAD_LATENCY_US + 2 * 2 * 4 * programs * variant.tile_rows * columns / memory_rate
    if not variant.splits:
        return 0.0
    partial_us = s.total(s.PARTIAL_BYTES, values) / memory_rate
    # the last to finish waits for a counter and then for the partial states: two dependent loads and no launch
    return partial_us + (2 * LOAD_LATENCY_US if variant.reduce == "last" else LAUNCH_US)
